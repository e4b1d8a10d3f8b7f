"""`python -m bench.experts`: Qwen3-30B-A3B's shape in 4.5 bits, in RAM and within budgets, beside llama.cpp.

Both engines read the same text of random tokens, each alone in a cgroup of the budget, in turns, with an empty page
cache before; routers have the same rows. Our plans go by a profile of other random tokens. Tables: `uniform`, rows of
routers as they are drawn, so experts are asked for about alike; `skewed`, their norms fall as rank^-0.5; `local`,
injected answers (each token keeps each of its experts with probability 0.5, else draws by rank^-0.5), which llama.cpp
cannot follow and nobody guesses. Both engines are warmed by the same few tokens; ours is measured once more after many,
for its predictions are of caches in their steady state. Ceilings are read right before and right after what is
measured. Two bounds of a token: max(missed bytes / disk, active bytes / RAM), and the chain of layers, whose experts
are known one layer at a time: of each layer what is not an expert / RAM + max(missed bytes / disk at reads of one
expert, active experts' bytes / RAM). GB are 10^9 bytes. `--config` takes another shape in its place, to try the bench
out: budgets shrink with its weights. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.ceilings import Ceilings
from bench.cgroup import Cgroup, whole_pages
from bench.cpu import spread
from bench.offload_engines import started, tell
from bench.peers import Answer, Worker
from bench.peers import random_gguf as gguf
from penstock.runtime import host
from penstock.runtime.probe import load_or_probe
from penstock.runtime.this_machine import cpu_name
from penstock.serve.shapes import locate
from penstock.spec.format import parse_format
from penstock.spec.parts import parts
from penstock.store.packed import read_config
from penstock.store.synth import synth

SHAPE, WEIGHTS = "qwen3-30b-a3b", "int4"
TABLES = {"uniform": 0.0, "skewed": 0.5}  # how the norms of routers' rows fall
BUDGETS_GB = ("13.5", "9.2", "4.9")
CONTEXT, PREFILL_TOKENS, PREFILL_GB = 1024, 512, "9.2"
COLD_TOKENS = 16
# Tokens that warm both engines (the cold ones count among them), those that are measured, and rounds. The peer takes
# some 10 s a token where least fits.
TOKENS = {"13.5": (64, 32, 3), "9.2": (64, 32, 3), "4.9": (16, 16, 2)}
STEADY_TOKENS = 160  # more, before caches are as they stay
STEADY = ("tokens_per_s", "share_of_bound", "share_of_layer_chain", "hit_rate", "disk_bytes_exact")
RESIDENT_TOKENS, RESIDENT_ROUNDS = 32, 3
EXPERT_DEPTHS = (2, 4, 8)  # reads of one expert in flight: a layer may miss as many

Figures = dict[str, Any]


class Bench:
    """The models of `folder`, of one table at a time: two do not fit on a common disk."""

    def __init__(self, folder: Path, config: Path | None) -> None:
        whole = locate(Path(SHAPE))
        self.folder, self.cache, self.config = folder, folder / "cache", config or whole
        self.name = config.stem if config else SHAPE
        self.scale = weights_bytes(self.config) / weights_bytes(whole)
        self.threads = host.usable_cpus()
        self.table = ""

    def limit(self, gb: str) -> int:
        """The bytes of a budget."""
        return whole_pages(round(float(gb) * 1e9 * self.scale))

    @property
    def packed(self) -> Path:
        return self.folder / f"{self.name}-{WEIGHTS}-{self.table}"

    @property
    def gguf(self) -> Path:
        return self.folder / f"{self.name}-q4_0-{self.table}.gguf"

    def make(self, table: str) -> None:
        """Writes what is missing of the table's models, and removes the other table's."""
        for other in TABLES.keys() - {table}:
            self.table = other
            shutil.rmtree(self.packed, ignore_errors=True)
            self.gguf.unlink(missing_ok=True)
        self.table = table
        if not self.packed.exists():
            tell(f"writing {self.packed.name}")
            synth(self.config, self.packed, parse_format(WEIGHTS), router_skew=TABLES[table])
        if not self.gguf.exists():
            tell(f"writing {self.gguf.name}")
            gguf.write(self.config, self.gguf, TABLES[table])
        os.sync()
        load_or_probe(self.cache, disk_folder=self.folder, whole=True)
        tell("asking routers about other random tokens, as `penstock profile` does")
        with self.ours(None, "--prompt", PREFILL_TOKENS) as (worker, _):
            worker.ask("profile", PREFILL_TOKENS)

    def ours(self, limit: int | None, *more: object) -> AbstractContextManager[tuple[Worker, Cgroup | None]]:
        within = () if limit is None else ("--limit", limit)
        arguments = ("--cache", self.cache, "--context", CONTEXT, *within, *more)
        return started(self.folder, "bench.peers.routed", limit, self.packed, *arguments)

    def peer(self, limit: int | None, how: str) -> AbstractContextManager[tuple[Worker, Cgroup | None]]:
        arguments = ("--config", self.config, "--threads", self.threads, "--context", CONTEXT, *filter(None, [how]))
        return started(self.folder, "bench.peers.llamacpp", limit, self.gguf, *arguments)

    def ceilings(self, expert_bytes: int | None = None) -> Ceilings:
        """Of large reads, or of reads of one expert."""
        files = sorted(self.packed.glob("*.safetensors"))
        return Ceilings(files) if expert_bytes is None else Ceilings(files, (expert_bytes,), EXPERT_DEPTHS)


def weights_bytes(config: Path) -> int:
    """Of the shape of a config.json."""
    return sum(part.granules * part.granule_bytes for part in parts(read_config(config)[1], parse_format(WEIGHTS)))


def measured(bench: Bench, worker: Worker, command: str, tokens: int) -> Figures:
    """A decode of ours between two readings of the ceilings, and its bounds."""
    facts = worker.facts
    plain, single = bench.ceilings(), bench.ceilings(facts["expert_bytes"])
    before = (plain.read(), single.read())
    answer = worker.ask(command, tokens)
    after = (plain.read(), single.read())
    plain.close()
    single.close()
    ram = statistics.mean(reading.ram_read_bytes_per_s for reading in (*before, *after))
    disk, disk_by_expert = (
        statistics.mean(reading.disk_read_bytes_per_s for reading in readings)
        for readings in zip(before, after, strict=True)
    )
    seconds, expert_bytes, by_misses = answer["seconds"], facts["expert_bytes"], answer["by_misses"]
    active_bytes = facts["active"] * expert_bytes
    bytes_per_token = facts["dense_bytes"] + facts["routed_layers"] * active_bytes
    missed_bytes = answer["missed"] * expert_bytes
    bound_s = max(missed_bytes / disk, tokens * bytes_per_token / ram)
    chain_s = tokens * facts["dense_bytes"] / ram
    layers = by_misses if sum(by_misses) else [tokens * facts["routed_layers"]]
    for misses, times in enumerate(layers):
        chain_s += times * max(misses * expert_bytes / disk_by_expert, active_bytes / ram)
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "share_of_bound": bound_s / seconds,
        "share_of_layer_chain": chain_s / seconds,
        "share_of_ram_bandwidth": tokens * bytes_per_token / seconds / ram,
        "disk_bytes_per_token": answer["disk_bytes"] / tokens,
        "disk_bytes_exact": answer["exact"],
        "wrong_guesses_per_token": answer["wrong_guesses"] / tokens,
        "hit_rate": answer["hit_rate"],
        "peak_host_bytes": answer["peak_host_bytes"],
        "ram_read_bytes_per_s": ram,
        "disk_read_bytes_per_s": disk,
        "disk_read_by_expert_bytes_per_s": disk_by_expert,
    }


def budget(bench: Bench, gb: str, table: str, rounds: int | None, beside: bool) -> Figures:
    """Rounds of ours and the peer's turns within so many GB. `table` "local" is of injected answers."""
    warm, tokens, usual = TOKENS[gb]
    limit = bench.limit(gb)
    found, facts = [], {}
    for i in range(rounds or usual):
        figures: Figures = {}
        turns = ["ours", "peer"] if i % 2 == 0 else ["peer", "ours"]
        for turn in turns if beside and table != "local" else ["ours"]:
            if turn == "ours":
                figures |= _ours_within(bench, limit, "follow_local" if table == "local" else "follow", warm, tokens)
                facts = figures.pop("facts")
            else:
                with bench.peer(limit, "--mmap") as (worker, _):
                    worker.ask("follow", warm)
                    figures["llamacpp_tokens_per_s"] = tokens / worker.ask("follow", tokens)["seconds"]
        if "llamacpp_tokens_per_s" in figures:
            figures["vs_llamacpp"] = figures["tokens_per_s"] / figures["llamacpp_tokens_per_s"]
        tell(f"{gb} GB, {table}, round {i + 1}: {json.dumps(figures)}")
        found.append(figures)
    return _medians(found) | {"facts": facts}


def _ours_within(bench: Bench, limit: int, command: str, warm: int, tokens: int) -> Figures:
    with bench.ours(limit) as (worker, cgroup):
        cold_s = worker.ask(command, COLD_TOKENS)["seconds"]
        if warm > COLD_TOKENS:
            worker.ask(command, warm - COLD_TOKENS)
        figures = measured(bench, worker, command, tokens)
        # A prediction is of caches that have seen many tokens. The peer would take an hour to see as many.
        worker.ask(command, STEADY_TOKENS)
        steady = measured(bench, worker, command, tokens)
        figures |= {f"steady_{name}": steady[name] for name in STEADY}
        told = worker.ask("predicted", 0)
        facts = worker.facts
        return figures | {
            "cold_tokens_per_s": COLD_TOKENS / cold_s,
            "predicted_cold_tokens_per_s": COLD_TOKENS / facts["predicted_cold_s"]
            if facts["predicted_cold_s"]
            else None,
            "predicted_tokens_per_s": told["tokens_per_s"],
            "predicted_hit_rate": told["hit_rate"],
            "predicted_vs_measured": told["tokens_per_s"] / figures["steady_tokens_per_s"],
            "planned_host_bytes": facts["planned_host_bytes"],
            "peak_cgroup_bytes": cgroup.peak_bytes() if cgroup else 0,
            "facts": facts,
        }


def resident(bench: Bench, rounds: int) -> Figures:
    """Everything in memory: ours, and the peer repacked and as it is, of which the faster counts."""
    found, facts = [], {}
    for i in range(rounds):
        figures: Figures = {}
        peers: dict[str, Answer] = {}
        for turn in ("ours", "", "--plain") if i % 2 == 0 else ("--plain", "", "ours"):
            if turn == "ours":
                with bench.ours(None, "--prompt", PREFILL_TOKENS) as (worker, _):
                    worker.ask("follow", COLD_TOKENS)
                    figures |= measured(bench, worker, "follow", RESIDENT_TOKENS)
                    figures["prefill_tokens_per_s"] = PREFILL_TOKENS / worker.ask("prefill", PREFILL_TOKENS)["seconds"]
                    facts = worker.facts
            else:
                with bench.peer(None, turn) as (worker, _):
                    worker.ask("follow", COLD_TOKENS)
                    decode = RESIDENT_TOKENS / worker.ask("follow", RESIDENT_TOKENS)["seconds"]
                    prefill = PREFILL_TOKENS / worker.ask("prefill", PREFILL_TOKENS)["seconds"]
                    peers[turn or "--repacked"] = {"decode": decode, "prefill": prefill}
        for name in ("decode", "prefill"):
            figures[f"llamacpp_{name}_tokens_per_s"] = max(peer[name] for peer in peers.values())
        figures["decode_share_of_ram_bandwidth"] = figures["share_of_ram_bandwidth"]
        figures["vs_llamacpp"] = figures["tokens_per_s"] / figures["llamacpp_decode_tokens_per_s"]
        figures["prefill_vs_llamacpp"] = figures["prefill_tokens_per_s"] / figures["llamacpp_prefill_tokens_per_s"]
        tell(f"in memory, round {i + 1}: {json.dumps(figures | {'llamacpp': peers})}")
        found.append(figures | {"llamacpp": peers})
    return _medians(found) | {"facts": facts}


def prefill(bench: Bench, rounds: int) -> Figures:
    """Of one prompt within a budget, beside max(its bytes / disk, the time of the same round with all in memory)."""
    limit = bench.limit(PREFILL_GB)
    found = []
    for i in range(rounds):
        figures: Figures = {}
        for name, within in (
            (("resident", None), ("limited", limit)) if i % 2 == 0 else (("limited", limit), ("resident", None))
        ):
            with bench.ours(within, "--prompt", PREFILL_TOKENS) as (worker, _):
                worker.ask("prefill", PREFILL_TOKENS)  # not counted
                ceilings = bench.ceilings()
                before = ceilings.read()
                answer = worker.ask("prefill", PREFILL_TOKENS)
                disk = (before.disk_read_bytes_per_s + ceilings.read().disk_read_bytes_per_s) / 2
                ceilings.close()
                figures |= {f"{name}_s": answer["seconds"], f"{name}_disk_s": answer["disk_bytes"] / disk}
        figures["share_of_bound"] = max(figures["limited_disk_s"], figures["resident_s"]) / figures["limited_s"]
        tell(f"prefill of {PREFILL_TOKENS}, {PREFILL_GB} GB, round {i + 1}: {json.dumps(figures)}")
        found.append(figures)
    return _medians(found)


def _medians(found: list[Figures]) -> Figures:
    """Of every figure that all rounds have; whether what was exact was so in all; what each round gave."""
    medians: Figures = {}
    for name, value in found[0].items():
        column = [figures[name] for figures in found]
        if isinstance(value, bool):
            medians[name] = all(column)
        elif isinstance(value, float | int):
            medians[name] = statistics.median(column)
    ranges = {name: spread([f[name] for f in found]) for name in medians if not isinstance(medians[name], bool)}
    return medians | {"ranges": ranges, "by_round": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (35 GB); default a temporary folder")
    parser.add_argument("--config", type=Path, help=f"config.json of another shape than {SHAPE}")
    parser.add_argument("--only", nargs="+", choices=("resident", "prefill", *BUDGETS_GB), help="default all")
    parser.add_argument("--tables", nargs="+", choices=(*TABLES, "local"), default=(*TABLES, "local"))
    parser.add_argument("--rounds", type=int, help="default 3, of the smallest budget 2")
    parser.add_argument("--alone", action="store_true", help="leave llama.cpp out, but where everything is in memory")
    wanted = parser.parse_args()
    chosen = wanted.only or ("resident", *BUDGETS_GB, "prefill")
    results: Figures = {}
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        bench = Bench((wanted.folder or Path(temporary)).resolve(), wanted.config)
        bench.folder.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            tables = [t for t in wanted.tables if t == table or (t == "local" and table == "uniform")]
            if not tables:
                continue
            bench.make(table)
            if table == "uniform" and "resident" in chosen:
                results["resident"] = resident(bench, wanted.rounds or RESIDENT_ROUNDS)
            if table == "uniform" and "prefill" in chosen:
                results["prefill"] = prefill(bench, wanted.rounds or 3)
            for gb in (gb for gb in BUDGETS_GB if gb in chosen):
                for each in tables:
                    figures = budget(bench, gb, each, wanted.rounds, not wanted.alone)
                    at = results.setdefault(gb, {})
                    at |= figures if each == "uniform" else {each: figures}
    machine = {"cpu": cpu_name(), "threads": host.usable_cpus(), "memory_bytes": host.physical_bytes()}
    took_s = time.perf_counter() - start_s
    print(json.dumps({"bench": "experts", "machine": machine, "took_s": took_s, **results}), file=sys.stdout)


if __name__ == "__main__":
    main()
