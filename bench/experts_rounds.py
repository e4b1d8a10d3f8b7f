"""The parts of `bench.experts`, and how an engine's turn of each is measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from bench.cpu import spread
from bench.experts_engines import PREFILL_TOKENS, ROOM_BYTES, Engines
from bench.peers import Worker
from bench.rounds import Figures
from penstock.planner.predict import COLD_PASSES

PREFILL_GB = "9.2"
COLD_TOKENS = 16
STEADY_TOKENS = 160  # more, before caches are as they stay
# The first tokens after the seconds in which ceilings are read take 1.3 times as long (docs/LOG.md), which tokens after
# each other, as the peer's are, do not: so many of ours come between, of those that warm.
AFTER_PAUSE = 8
STEADY = (
    "tokens_per_s", "share_of_bound", "share_of_layer_chain", "share_of_layer_chain_to_slots", "hit_rate",
    "disk_bytes_exact",
)  # fmt: skip
RESIDENT_TOKENS = 32
PEERS = ("peer", "repacked", "plain")  # turns of llama.cpp


class Tokens(NamedTuple):
    """Tokens that warm both engines (the cold ones count among them), and those that are measured."""

    warm: int
    measured: int


def measured(engines: Engines, worker: Worker, command: str, tokens: int, uncounted: int) -> Figures:
    """A decode of ours between two readings of the ceilings, and its bounds. `uncounted`: tokens right before it."""
    facts = worker.facts
    of_expert = facts["expert_bytes"]
    ceilings = engines.ceilings(), engines.ceilings(of_expert), engines.ceilings(of_expert, ROOM_BYTES)
    before = [each.read() for each in ceilings]
    if uncounted:
        worker.ask(command, uncounted)
    answer = worker.ask(command, tokens)
    after = [each.read() for each in ceilings]
    for each in ceilings:
        each.close()
    ram = statistics.mean(reading.ram_read_bytes_per_s for reading in (*before, *after))
    disk, disk_by_expert, disk_to_slots = (
        statistics.mean(reading.disk_read_bytes_per_s for reading in readings)
        for readings in zip(before, after, strict=True)
    )
    seconds, expert_bytes, by_misses = answer["seconds"], facts["expert_bytes"], answer["by_misses"]
    active_bytes = facts["active"] * expert_bytes
    bytes_per_token = facts["dense_bytes"] + facts["routed_layers"] * active_bytes
    missed_bytes = answer["missed"] * expert_bytes
    bound_s = max(missed_bytes / disk, tokens * bytes_per_token / ram)
    layers = by_misses if sum(by_misses) else [tokens * facts["routed_layers"]]

    def chain_s(by_expert: float) -> float:
        """Of the layers one after the other, where the disk gives so many bytes/s to reads of one expert."""
        of_layers = (
            times * max(misses * expert_bytes / by_expert, active_bytes / ram) for misses, times in enumerate(layers)
        )
        return float(tokens * facts["dense_bytes"] / ram + sum(of_layers))

    return {
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "share_of_bound": bound_s / seconds,
        "share_of_layer_chain": chain_s(disk_by_expert) / seconds,
        "share_of_layer_chain_to_slots": chain_s(disk_to_slots) / seconds,
        "share_of_ram_bandwidth": tokens * bytes_per_token / seconds / ram,
        "disk_bytes_per_token": answer["disk_bytes"] / tokens,
        "disk_bytes_exact": answer["exact"],
        "wrong_guesses_per_token": answer["wrong_guesses"] / tokens,
        "hit_rate": answer["hit_rate"],
        "peak_host_bytes": answer["peak_host_bytes"],
        "ram_read_bytes_per_s": ram,
        "disk_read_bytes_per_s": disk,
        "disk_read_by_expert_bytes_per_s": disk_by_expert,
        "disk_read_to_slots_bytes_per_s": disk_to_slots,
    }


class Part(NamedTuple):
    """What is measured in rounds of one or several engines' turns, each with its name; every other round they come the
    other way round. `together`: figures of a round, of those of its turns. The `optional` ones may be missing there,
    and among `turns` where they are not to be measured."""

    turns: dict[str, Callable[[], Figures]]
    together: Callable[[dict[str, Figures]], Figures]
    optional: tuple[str, ...] = ()


def budget(engines: Engines, gb: str, table: str, tokens: Tokens, beside: bool) -> Part:
    """Ours and the peer within so many GB. `table` "local" is of injected answers, which no peer follows. What is
    beside the peer is None in a round without it."""
    limit = engines.limit(gb)

    def peer() -> Figures:
        with engines.peer(limit, "--mmap") as (worker, _):
            worker.ask("follow", tokens.warm)
            return {"llamacpp_tokens_per_s": tokens.measured / worker.ask("follow", tokens.measured)["seconds"]}

    def together(turns: dict[str, Figures]) -> Figures:
        figures = {**turns["ours"], "llamacpp_tokens_per_s": None, "vs_llamacpp": None, **turns.get("peer", {})}
        if "peer" in turns:
            figures["vs_llamacpp"] = figures["tokens_per_s"] / figures["llamacpp_tokens_per_s"]
        return figures

    command = "follow_local" if table == "local" else "follow"
    both = {"ours": lambda: _ours_within(engines, limit, command, tokens), "peer": peer}
    follows = table != "local"
    return Part(both if beside and follows else {"ours": both["ours"]}, together, ("peer",) if follows else ())


def _ours_within(engines: Engines, limit: int, command: str, tokens: Tokens) -> Figures:
    with engines.ours(limit) as (worker, cgroup):
        cold_s = worker.ask(command, COLD_TOKENS)["seconds"]
        warm = max(0, tokens.warm - COLD_TOKENS)
        if warm > AFTER_PAUSE:
            worker.ask(command, warm - AFTER_PAUSE)
        figures = measured(engines, worker, command, tokens.measured, min(warm, AFTER_PAUSE))
        # A prediction is of caches that have seen many tokens. The peer would take an hour to see as many.
        worker.ask(command, STEADY_TOKENS - AFTER_PAUSE)
        steady = measured(engines, worker, command, tokens.measured, AFTER_PAUSE)
        figures["warm_tokens"] = tokens.warm
        figures |= {f"steady_{name}": steady[name] for name in STEADY}
        told = worker.ask("predicted", 0)
        facts = worker.facts
        return figures | {
            "cold_tokens_per_s": COLD_TOKENS / cold_s,
            "predicted_cold_tokens_per_s": foretold_cold(facts),
            "predicted_tokens_per_s": told["tokens_per_s"],
            "predicted_hit_rate": told["hit_rate"],
            "predicted_vs_measured": told["tokens_per_s"] / figures["steady_tokens_per_s"],
            "predicted_today_vs_measured": told["today_tokens_per_s"] / figures["steady_tokens_per_s"],
            "planned_host_bytes": facts["planned_host_bytes"],
            "peak_cgroup_bytes": cgroup.peak_bytes() if cgroup else 0,
            "facts": facts,
        }


def foretold_cold(facts: Figures) -> float | None:
    """Tokens/s of the first ones, whose first one finds its caches empty. `predicted_cold_s` is of COLD_PASSES passes
    after that one."""
    if not facts["predicted_cold_s"]:
        return None
    after_s: float = facts["predicted_cold_s"] / COLD_PASSES * (COLD_TOKENS - 1)
    first_s: float = facts["predicted_ttft_s"]
    return COLD_TOKENS / (first_s + after_s)


def resident(engines: Engines) -> Part:
    """Everything in memory: ours, and the peer repacked and as it is, of which the faster counts."""

    def ours() -> Figures:
        with engines.ours(None, "--prompt", PREFILL_TOKENS) as (worker, _):
            worker.ask("follow", COLD_TOKENS - AFTER_PAUSE)
            figures = measured(engines, worker, "follow", RESIDENT_TOKENS, AFTER_PAUSE)
            figures["prefill_tokens_per_s"] = PREFILL_TOKENS / worker.ask("prefill", PREFILL_TOKENS)["seconds"]
            return figures | {"facts": worker.facts}

    def peer(how: str) -> Figures:
        with engines.peer(None, how) as (worker, _):
            worker.ask("follow", COLD_TOKENS)
            decode = RESIDENT_TOKENS / worker.ask("follow", RESIDENT_TOKENS)["seconds"]
            return {"decode": decode, "prefill": PREFILL_TOKENS / worker.ask("prefill", PREFILL_TOKENS)["seconds"]}

    def together(turns: dict[str, Figures]) -> Figures:
        figures = dict(turns["ours"])
        for name in ("decode", "prefill"):
            figures[f"llamacpp_{name}_tokens_per_s"] = max(turns[peer][name] for peer in ("repacked", "plain"))
        figures["decode_share_of_ram_bandwidth"] = figures["share_of_ram_bandwidth"]
        figures["vs_llamacpp"] = figures["tokens_per_s"] / figures["llamacpp_decode_tokens_per_s"]
        figures["prefill_vs_llamacpp"] = figures["prefill_tokens_per_s"] / figures["llamacpp_prefill_tokens_per_s"]
        return figures | {"llamacpp": {peer: turns[peer] for peer in ("repacked", "plain")}}

    return Part({"ours": ours, "repacked": lambda: peer(""), "plain": lambda: peer("--plain")}, together)


def prefill(engines: Engines) -> Part:
    """Of one prompt within a budget, beside max(its bytes / disk, the time of the same round with all in memory)."""

    def of(within: int | None) -> Figures:
        with engines.ours(within, "--prompt", PREFILL_TOKENS) as (worker, _):
            worker.ask("prefill", PREFILL_TOKENS)  # not counted
            ceilings = engines.ceilings()
            before = ceilings.read()
            answer = worker.ask("prefill", PREFILL_TOKENS)
            disk = (before.disk_read_bytes_per_s + ceilings.read().disk_read_bytes_per_s) / 2
            ceilings.close()
            return {"s": answer["seconds"], "disk_s": answer["disk_bytes"] / disk}

    def together(turns: dict[str, Figures]) -> Figures:
        figures = {f"{turn}_{name}": value for turn, found in turns.items() for name, value in found.items()}
        bound_s = max(figures["limited_disk_s"], figures["resident_s"])
        return figures | {"share_of_bound": bound_s / figures["limited_s"]}

    limit = engines.limit(PREFILL_GB)
    return Part({"resident": lambda: of(None), "limited": lambda: of(limit)}, together)


def medians(found: list[Figures]) -> Figures:
    """Of every figure, over the rounds that have it, None where none has; whether what was exact was so in all; what
    each round gave. `facts` are the last round's."""
    rounds = [without_facts(figures) for figures in found]
    facts = {"facts": found[-1]["facts"]} if "facts" in found[-1] else {}
    middle: Figures = {}
    ranges: Figures = {}
    for name in dict.fromkeys(name for figures in rounds for name in figures):
        column = [figures[name] for figures in rounds if figures.get(name) is not None]
        if not column:
            middle[name] = None
        elif isinstance(column[0], bool):
            middle[name] = all(column)
        elif isinstance(column[0], float | int):
            middle[name], ranges[name] = statistics.median(column), spread(column)
    return middle | {"ranges": ranges, "by_round": rounds} | facts


def without_facts(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if name != "facts"}
