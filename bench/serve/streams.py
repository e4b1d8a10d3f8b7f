"""Many answers at once: 8 and 32 streams beside one, beside llama.cpp, and with HTTP beside without."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

from bench.clients import medians, together, tokens_per_s
from bench.offload_engines import started, tell
from bench.serve.models import CONTEXT, OUTPUT_TOKENS, Bench, Figures
from penstock.runtime import host

PROMPT_TOKENS = 4  # short, so that 32 of them are read before the first answer ends


def streams(bench: Bench, rounds: int) -> Figures:
    found = []
    for i in range(rounds):
        figures: Figures = {}
        turns: list[Callable[[], Figures]] = [
            lambda: {"single_tokens_per_s": _without_http(bench, bench.limit, 1)},
            lambda: {"streams_8_tokens_per_s": _with_http(bench, bench.limit, 8)},
            lambda: {"streams_32_tokens_per_s": _with_http(bench, bench.limit, 32)},
            lambda: {"streams_32_in_ram_tokens_per_s": _with_http(bench, None, 32)},
        ]
        for turn in turns if i % 2 == 0 else reversed(turns):
            figures |= turn()
        for count in (8, 32):
            figures[f"streams_{count}_gain"] = figures[f"streams_{count}_tokens_per_s"] / figures["single_tokens_per_s"]
        figures["streams_32_share_of_ram"] = (
            figures["streams_32_tokens_per_s"] / figures["streams_32_in_ram_tokens_per_s"]
        )
        tell(f"streams, round {i + 1}: {json.dumps(figures)}")
        found.append(figures)
    return medians(found)


def _with_http(bench: Bench, limit: int | None, count: int) -> float:
    with bench.server("large", limit, count, CONTEXT) as server:
        together(server, bench.streams("large", count, PROMPT_TOKENS, 4, seed=1000))  # not counted
        made = bench.streams("large", count, PROMPT_TOKENS, CONTEXT - PROMPT_TOKENS)
        return tokens_per_s(server, made, OUTPUT_TOKENS)


def _without_http(bench: Bench, limit: int | None, count: int) -> float:
    within = () if limit is None else ("--limit", limit)
    arguments = ("--cache", bench.folder / "cache", "--context", CONTEXT, "--output", OUTPUT_TOKENS, *within)
    model = bench.models["large"]
    with started(bench.folder, "bench.peers.together", limit, model, *arguments, "--sequences", count) as (worker, _):
        worker.ask("decode", 2)
        return count * OUTPUT_TOKENS / float(worker.ask("decode", OUTPUT_TOKENS)["seconds"])


def resident(bench: Bench, rounds: int) -> Figures:
    if importlib.util.find_spec("llama_cpp") is None:
        tell("llama-cpp-python is not installed: no peer")
        return {"vs_llamacpp_8": None}
    found = []
    for i in range(rounds):
        figures: Figures = {}
        for turn in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
            figures[f"{turn}_tokens_per_s"] = _with_http(bench, None, 8) if turn == "ours" else _llamacpp(bench)
        figures["vs_llamacpp_8"] = figures["ours_tokens_per_s"] / figures["peer_tokens_per_s"]
        tell(f"in memory, round {i + 1}: {json.dumps(figures)}")
        found.append(figures)
    return medians(found)


def _llamacpp(bench: Bench) -> float:
    arguments = ("--config", bench.configs["large"], "--threads", host.usable_cpus(), "--context", 8 * CONTEXT)
    with started(bench.folder, "bench.peers.llamacpp", None, bench.gguf(), *arguments, "--sequences", 8) as (worker, _):
        worker.ask("decode_together", 2)
        return 8 * OUTPUT_TOKENS / float(worker.ask("decode_together", OUTPUT_TOKENS)["seconds"])


def http(bench: Bench, rounds: int) -> Figures:
    found = []
    for i in range(rounds):
        figures: Figures = {}
        for turn in ("with", "without") if i % 2 == 0 else ("without", "with"):
            measure = _with_http if turn == "with" else _without_http
            figures[f"{turn}_http_tokens_per_s"] = measure(bench, None, 8)
        figures["http_costs"] = 1 - figures["with_http_tokens_per_s"] / figures["without_http_tokens_per_s"]
        tell(f"HTTP, round {i + 1}: {json.dumps(figures)}")
        found.append(figures)
    return medians(found)
