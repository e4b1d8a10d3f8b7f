"""Many answers at once: 8 and 32 streams beside one, beside llama.cpp, and with HTTP beside without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from bench.clients import medians, together, tokens_per_s
from bench.offload_engines import started, tell
from bench.serve.models import CONTEXT, OUTPUT_TOKENS, Bench, Figures, in_turns, over
from penstock.runtime import host

PROMPT_TOKENS = 4  # short, so that 32 of them are read before the first answer ends


def streams(bench: Bench, rounds: int) -> Iterator[Figures]:
    found: list[Figures] = []
    for i in range(rounds):
        turns: dict[str, Callable[[], float]] = {
            "single_tokens_per_s": lambda: _without_http(bench, bench.limit, 1),
            "streams_8_tokens_per_s": lambda: _with_http(bench, bench.limit, 8),
            "streams_32_tokens_per_s": lambda: _with_http(bench, bench.limit, 32),
            "streams_32_in_ram_tokens_per_s": lambda: _with_http(bench, None, 32),
        }
        found.append({})
        for figures in in_turns(turns, i % 2 == 1):
            found[i] = figures
            for count in (8, 32):
                figures[f"streams_{count}_gain"] = over(figures, f"streams_{count}_tokens_per_s", "single_tokens_per_s")
            in_ram = "streams_32_in_ram_tokens_per_s"
            figures["streams_32_share_of_ram"] = over(figures, "streams_32_tokens_per_s", in_ram)
            yield medians(found)
        tell(f"streams, round {i + 1}: {json.dumps(found[i])}")


def _with_http(bench: Bench, limit: int | None, count: int) -> float:
    with bench.server("large", limit, count, CONTEXT) as server:
        together(server, bench.streams("large", count, PROMPT_TOKENS, 4, seed=1000))  # not counted
        made = bench.streams("large", count, PROMPT_TOKENS, CONTEXT - PROMPT_TOKENS)
        return tokens_per_s(server, made, OUTPUT_TOKENS)


def _without_http(bench: Bench, limit: int | None, count: int, *more: str) -> float:
    within = () if limit is None else ("--limit", limit)
    arguments = ("--cache", bench.folder / "cache", "--context", CONTEXT, "--output", OUTPUT_TOKENS, *within, *more,
                 *bench.kv_flags)  # fmt: skip
    model = bench.model("large")
    with started(bench.folder, "bench.peers.together", limit, model, *arguments, "--sequences", count) as (worker, _):
        worker.ask("decode", 2)
        return count * OUTPUT_TOKENS / float(worker.ask("decode", OUTPUT_TOKENS)["seconds"])


def resident(bench: Bench, rounds: int, with_peer: bool) -> Iterator[Figures]:
    """`with_peer`: whether llama.cpp can be run here."""
    found: list[Figures] = []
    for i in range(rounds):
        turns = {"ours_tokens_per_s": lambda: _with_http(bench, None, 8)}
        if with_peer:
            turns["peer_tokens_per_s"] = lambda: _llamacpp(bench)
        found.append({})
        for figures in in_turns(turns, i % 2 == 1):
            found[i] = figures
            figures["vs_llamacpp_8"] = over(figures, "ours_tokens_per_s", "peer_tokens_per_s")
            yield medians(found)
        tell(f"in memory, round {i + 1}: {json.dumps(found[i])}")


def _llamacpp(bench: Bench) -> float:
    arguments = ("--config", bench.configs["large"], "--threads", host.usable_cpus(), "--context", 8 * CONTEXT)
    with started(bench.folder, "bench.peers.llamacpp", None, bench.gguf(), *arguments, "--sequences", 8) as (worker, _):
        worker.ask("decode_together", 2)
        return 8 * OUTPUT_TOKENS / float(worker.ask("decode_together", OUTPUT_TOKENS)["seconds"])


def http(bench: Bench, rounds: int) -> Iterator[Figures]:
    found: list[Figures] = []
    for i in range(rounds):
        turns = {
            "with_http_tokens_per_s": lambda: _with_http(bench, None, 8),
            "without_http_tokens_per_s": lambda: _without_http(bench, None, 8, "--logprobs"),
        }
        found.append({})
        for figures in in_turns(turns, i % 2 == 1):
            found[i] = figures
            ratio = over(figures, "with_http_tokens_per_s", "without_http_tokens_per_s")
            figures["http_costs"] = None if ratio is None else 1 - ratio
            yield medians(found)
        tell(f"HTTP, round {i + 1}: {json.dumps(found[i])}")
