"""Turn 20 of a chat that begins with 2,000 tokens, for `bench.serve`: when its first token comes.

`ttft_prefix_ratio`  beside the first token of as many new tokens without a chat before them
`ttft_pass_ratio`    beside one pass of the same plan in one process without HTTP: the new tokens behind the chat
`ttft_bound_ratio`   beside a bound: the new tokens alone with all weights in memory, so that no disk is waited for, and
                     what attention over the chat takes at the float peak of the same minute
`prefix_bound_ratio` what `ttft_prefix_ratio` would be at that bound: less is not possible with the same bits
`restart_…`          the same turn once more, by a server that has started again with --keep-kv: less what reading the
                     kept pages takes at the disk's speed of the same minute, beside the new tokens. They are more than
                     before, for whole pages alone are kept
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.ceilings import Ceilings
from bench.clients import Server, Stream, medians, together
from bench.offload_engines import started, tell
from bench.peers import token_ids
from bench.serve.models import Bench, Figures
from penstock.spec import plan as plans

PREFIX_TOKENS, TURN_TOKENS, TURN_ANSWER, TURNS = 2000, 60, 20, 20
CONTEXT = PREFIX_TOKENS + TURNS * (TURN_TOKENS + TURN_ANSWER) + TURN_TOKENS


def prefix(bench: Bench, rounds: int) -> Iterator[Figures]:
    found: list[Figures] = []
    chats: list[list[int]] = []
    with tempfile.TemporaryDirectory(prefix="kept-kv-", dir=bench.folder) as kept:
        flags = ("--keep-kv", kept)
        with bench.server("large", bench.limit, 2, CONTEXT, more=flags) as server:
            plan = server.get("/v1/plan")["plan"]
            for i in range(rounds):
                chat, figures = _last_turn(bench, server, i)
                chats.append(chat)
                found.append(figures)
                tell(f"turn {TURNS}, round {i + 1}: {json.dumps(figures)}")
                yield medians(found)
                _settle(Path(kept))
        with bench.server("large", bench.limit, 2, CONTEXT, more=flags) as server:
            together(server, bench.streams("large", 1, TURN_TOKENS, 2, seed=70_000))  # not counted: checksums
            for i, (chat, figures) in enumerate(zip(chats, found, strict=True)):
                asked, cached, new = _asked(server, chat)
                (alone,) = together(server, bench.streams("large", 1, new, 2, seed=80_000 + i))
                figures |= {"restart_ttft_s": asked.ttft_s, "restart_cached_tokens": cached,
                            "restart_new_tokens": new, "restart_ttft_new_tokens_s": alone.ttft_s}  # fmt: skip
    yield medians(found)
    _add_passes(bench, plan, found)
    yield medians(found)
    _add_bounds(bench, found)
    yield medians(found)


def _last_turn(bench: Bench, server: Server, number: int) -> tuple[list[int], Figures]:
    """Chats through all turns. Returns the prompt of the last one, and its figures."""
    vocab = bench.vocab("large")
    said = token_ids(vocab, PREFIX_TOKENS, 30_000 + number).tolist()
    for turn in range(TURNS):
        said += token_ids(vocab, TURN_TOKENS, 40_000 + TURNS * number + turn).tolist()
        asked, cached, new = _asked(server, said)
        if turn < TURNS - 1:
            # An answer's ids are not told. So what the next turn repeats is made up, and new, and two tokens are enough
            # of what is said here.
            said += token_ids(vocab, TURN_ANSWER, 50_000 + TURNS * number + turn).tolist()
    (alone,) = together(server, bench.streams("large", 1, new, 2, seed=60_000 + number))
    return said, {
        "ttft_turn_s": asked.ttft_s, "ttft_new_tokens_s": alone.ttft_s, "new_tokens": new, "cached_tokens": cached,
        "ttft_prefix_ratio": asked.ttft_s / alone.ttft_s,
    }  # fmt: skip


def _asked(server: Server, prompt: list[int]) -> tuple[Stream, int, int]:
    """The answer to a prompt, how many of its tokens were there, and how many were new."""
    (asked,) = together(server, [Stream(list(prompt), 2)])
    cached = asked.usage["prompt_tokens_details"]["cached_tokens"]
    return asked, cached, asked.usage["prompt_tokens"] - cached


def _settle(folder: Path) -> None:
    """Waits until nothing more is kept there: pages are stored while nobody asks."""
    held_bytes = -1
    while held_bytes != (held_bytes := sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())):
        time.sleep(1.0)


def _add_passes(bench: Bench, plan: dict[str, Any], found: list[Figures]) -> None:
    """Adds to each round what the model's own passes take, and the ratios."""
    file, model = bench.folder / "turn-plan.json", bench.model("large")
    file.write_text(json.dumps(plan))
    with closing(Ceilings(sorted(model.glob("*.safetensors")))) as ceilings:
        read_bytes_per_s = ceilings.read().disk_read_bytes_per_s
    token_bytes = kv_bytes_of_token(plan)
    with started(bench.folder, "bench.peers.turn", bench.limit, model, "--cache", bench.folder / "cache",
                 "--plan", file, "--limit", bench.limit) as (worker, _):  # fmt: skip
        restarted, whole = found[0]["restart_cached_tokens"], found[0]["cached_tokens"]
        worker.ask("read", restarted)
        worker.ask("turn", TURN_TOKENS)  # not counted
        for figures in found:
            seconds = worker.ask("turn", figures["restart_new_tokens"])["seconds"]
            pages_s = figures["restart_cached_tokens"] * token_bytes / read_bytes_per_s
            took_s = figures["restart_ttft_s"] - pages_s
            figures |= {
                "restart_pages_s": pages_s, "restart_pass_s": seconds, "restart_pass_ratio": took_s / seconds,
                "restart_prefix_ratio": took_s / figures["restart_ttft_new_tokens_s"],
            }  # fmt: skip
        worker.ask("read", whole - restarted)
        for figures in found:
            there, alone = (worker.ask(where, figures["new_tokens"]) for where in ("turn", "alone"))
            figures |= {
                "pass_turn_s": there["seconds"], "pass_new_tokens_s": alone["seconds"],
                "attention_flops": there["attend_flops"] - alone["attend_flops"],
                "ttft_pass_ratio": figures["ttft_turn_s"] / there["seconds"],
            }  # fmt: skip


def _add_bounds(bench: Bench, found: list[Figures]) -> None:
    """Adds to each round the least that its turn can take."""
    arguments = ("--cache", bench.folder / "cache", "--context", CONTEXT)
    with started(bench.folder, "bench.peers.turn", None, bench.model("large"), *arguments) as (worker, _):
        worker.ask("alone", TURN_TOKENS)  # not counted
        for figures in found:
            alone_s = worker.ask("alone", figures["new_tokens"])["seconds"]
            peak = float(worker.ask("peak", 1)["float32_flops_per_s"])
            bound_s = alone_s + figures["attention_flops"] / peak
            figures |= {
                "pass_new_tokens_in_ram_s": alone_s, "float32_flops_per_s": peak,
                "attention_at_peak_s": figures["attention_flops"] / peak,
                "ttft_bound_ratio": figures["ttft_turn_s"] / bound_s,
                "prefix_bound_ratio": bound_s / figures["ttft_new_tokens_s"],
            }  # fmt: skip
            tell(f"passes of turn {TURNS}: {json.dumps(figures)}")


def kv_bytes_of_token(plan: dict[str, Any]) -> int:
    """Bytes of K and V of one token in all layers. `plan`: as JSON."""
    made = plans.loads(json.dumps(plan), "the server's plan")
    layers = made.target.spec.layers
    return sum(
        2 * layers[i].attention.kv_heads * home.format.kv_bytes(layers[i].attention.head_dim)
        for home in made.kv
        for i in range(*home.layers)
    )
