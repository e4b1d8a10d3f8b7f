"""Families of kernels one after the other for `bench.cpu`: each forced on this processor, beside the peak of its own
instructions; and attention over long contexts by the format of the KV cache.

RAM that others use too is slow for minutes and fast for others. What depends on it is told by spell: `slow` where RAM
was read at 50 GB/s or less right before and after, `fast` at 70 GB/s or more. A spell that was not met is null.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from bench.peers import Answer, Worker
from bench.peers.ours import ATTENDED
from penstock.kernels import cpu

AVX2_PEER = (
    Path(__file__).parent.parent / "build" / "llamacpp-avx2"
)  # llama.cpp without AVX-512 (the Makefile builds it)
SLOW_BYTES_PER_S, FAST_BYTES_PER_S = 50e9, 70e9
FOUR_SHARE_OF_PEAK = 0.45  # of the int8 peak: what four rows are expected to reach where RAM would allow more
Figures = dict[str, Any]


class Reads(Protocol):
    """What `bench.cpu` measures between turns."""

    threads: int

    def ram(self) -> float: ...
    def peak(self, name: str, kind: str, isa: str | None = None) -> float: ...


def families(
    model: Path, gguf: Path, config_file: Path, context: int, tokens: int, rounds: int, reads: Reads
) -> Figures:
    """By family: medians over `rounds` of prompts of 512 tokens, decodes of `tokens` tokens, and four sequences."""
    found: Figures = {}
    if not AVX2_PEER.is_dir():
        print(f"there is no {AVX2_PEER}, which `make bench-cpu` builds: prefill_vs_llamacpp_avx2 is null", flush=True)
    for isa in (isa for isa in cpu.available() if isa != "portable"):
        same = ("--threads", reads.threads, "--context", context)
        ours = Worker("bench.peers.ours", model, *same, "--isa", isa)
        peer = None
        if isa == "avx2" and AVX2_PEER.is_dir():
            peer = Worker("bench.peers.llamacpp", gguf, "--config", config_file, *same, path=AVX2_PEER)
        found[isa] = _family(isa, ours, peer, tokens, rounds, reads)
        ours.close()
        if peer is not None:
            found[isa]["llamacpp_system"] = peer.facts["system"]
            peer.close()
        print(f"{isa}: {_shown(found[isa])}", flush=True)
    return found


def attention(model: Path, tokens: int, context: int, rounds: int, reads: Reads) -> Figures:
    """By format of the KV cache: shares of the RAM's speed, of one row over `tokens` positions."""
    ours = Worker("bench.peers.ours", model, "--threads", reads.threads, "--context", context)
    found: Figures = {}
    for kv in ATTENDED:
        ours.ask(f"attend_{kv}", tokens)  # not counted
        turns = [_below_ram(reads, lambda kv=kv: ours.ask(f"attend_{kv}", tokens)) for _ in range(rounds)]  # type: ignore[misc]
        shares = [(answer["bytes"] / answer["seconds"] / ram, ram) for answer, ram in turns]
        found[kv] = _by_spell(shares)
        print(f"attention over {tokens}, {kv}: {_shown(found[kv])}", flush=True)
    ours.close()
    return found


def _family(isa: str, ours: Worker, peer: Worker | None, tokens: int, rounds: int, reads: Reads) -> Figures:
    for command in ("prefill", "linear"):
        ours.ask(command, 64)  # not counted
    shares: dict[str, list[tuple[float, float]]] = {"decode": [], "four": []}
    prefill, linear, beside, per_s = [], [], [], []
    for _ in range(rounds):
        peak = reads.peak(f"{isa}_int8_ops_per_s", "int8", isa)
        one, ram = _below_ram(reads, lambda: ours.ask("decode", tokens))
        shares["decode"].append((one["bytes"] / one["seconds"] / ram, ram))
        four, ram = _below_ram(reads, lambda: ours.ask("decode_four", tokens))
        # The bytes of a step are read once for all sequences.
        bound_s = max(four["bytes"] / ram, four["flops"] / (FOUR_SHARE_OF_PEAK * peak))
        shares["four"].append((bound_s / four["seconds"], ram))
        prompt = ours.ask("prefill", 512)
        prefill.append(prompt["flops"] / prompt["seconds"] / peak)
        per_s.append(512 / prompt["seconds"])
        products = ours.ask("linear", 512)
        linear.append(products["flops"] / products["seconds"] / peak)
        if peer is not None:
            beside.append(peer.ask("prefill", 512)["seconds"] / prompt["seconds"])
    found: Figures = {
        "prefill_share_of_int8_peak": statistics.median(prefill),
        "linear_share_of_int8_peak": statistics.median(linear),
        "prefill_tokens_per_s": statistics.median(per_s),
        "decode_share_of_ram_bandwidth": _by_spell(shares["decode"]),
        "four_sequences_share": _by_spell(shares["four"]),
    }
    if isa == "avx2":
        found["prefill_vs_llamacpp_avx2"] = statistics.median(beside) if beside else None
    return found


def _below_ram(reads: Reads, turn: Callable[[], Answer]) -> tuple[Answer, float]:
    """(the turn's answer, the mean of the RAM's speeds right before and right after it)."""
    before = reads.ram()
    answer = turn()
    return answer, (before + reads.ram()) / 2


def _by_spell(shares: list[tuple[float, float]]) -> Figures:
    """Medians of (share, RAM bytes/s): of all, and of the rounds that fell into a spell."""
    slow = [share for share, ram in shares if ram <= SLOW_BYTES_PER_S]
    fast = [share for share, ram in shares if ram >= FAST_BYTES_PER_S]
    return {
        "all": statistics.median(share for share, _ in shares),
        "slow": statistics.median(slow) if slow else None,
        "fast": statistics.median(fast) if fast else None,
        "ram_bytes_per_s": statistics.median(ram for _, ram in shares),
    }


def _shown(figures: Figures) -> str:
    def number(value: Any) -> str:
        if isinstance(value, dict):
            return f"{value['all']:.2f} (RAM {value['ram_bytes_per_s'] / 1e9:.0f} GB/s)"
        return f"{value / 1e9:.0f}e9" if isinstance(value, float) and value > 1e6 else f"{value:.3g}" if value else "-"

    return ", ".join(f"{name} {number(value)}" for name, value in figures.items() if not isinstance(value, str))
