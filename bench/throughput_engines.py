"""How `bench.throughput` starts engines on blocks of prompts, and what it measures of one."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.ceilings import Ceilings, Reading
from bench.cgroup import Cgroup
from bench.offload_engines import Engines, started, tell
from bench.peers import Worker
from penstock import _native
from penstock.spec import plan as plans
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from penstock.store.synth import synth

Figures = dict[str, Any]

# Of the peak of int8 dot products in registers that products of many rows reach (`penstock bench ops`, docs/LOG.md).
INT8_SHARE = 0.58
IMPORT_S = 300  # at most, of a peer's modules
# What each peer imports.
MODULES = {
    "llamacpp": ("llama_cpp",), "accelerate": ("accelerate", "psutil", "torch", "transformers"),
    "scipy": ("scipy.sparse",), "torch": ("torch",), "matplotlib": ("matplotlib",),
}  # fmt: skip
PEAKS = 9  # readings of a peak, of which the median counts: one takes 16 ms, and halves where others have a core


def absent(peers: Iterable[str]) -> dict[str, str]:
    """Peers that cannot be imported here, and why. Each is tried in a process of its own."""
    why = {}
    for peer in MODULES.keys() & set(peers):
        code = f"import {', '.join(MODULES[peer])}"
        command = [sys.executable, "-P", "-c", code]  # -P: nothing from the folder that the user stands in
        try:
            tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IMPORT_S)
        except subprocess.TimeoutExpired:
            why[peer] = f"its import takes more than {IMPORT_S} s"
            continue
        if tried.returncode:
            why[peer] = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    return why


class BlockEngines(Engines):
    """Shapes 8b and 1b in int4, and 1b_bf16 as its checkpoint has it."""

    def packed(self, shape: str) -> Path:
        return self.folder / f"{self.small.stem}-int4" if shape == "1b" else super().packed(shape)

    def write(self, shape: str) -> None:
        """Makes what is missing; and of 8b the file that llama.cpp reads."""
        if shape == "1b" and not self.packed(shape).exists():
            tell(f"writing {self.packed(shape).name}")
            synth(self.small, self.packed(shape), parse_format("int4"))
        elif shape != "1b":
            super().write(shape)

    @contextmanager
    def block(self, shape: str, limit: int, ask: Ask, plan: Plan | None) -> Iterator[tuple[Worker, Cgroup | None]]:
        """Ours. `plan`: None for the one that the ask gets."""
        more: tuple[object, ...] = ()
        if plan is not None:
            file = self.folder / "plan.json"
            file.write_text(plans.dumps(plan))
            more = ("--plan", file)
        arguments = ("--cache", self.cache, "--ask", json.dumps(asdict(ask)), *more)
        with started(self.folder, "bench.peers.block", limit, self.packed(shape), *arguments) as ours:
            yield ours

    @contextmanager
    def llamacpp_block(self, limit: int, ask: Ask, sequences: int) -> Iterator[tuple[Worker, Cgroup | None]]:
        """llama.cpp with the file mapped and KV in Q4_0, with room for whole answers of each sequence."""
        room = sequences * (ask.prompt_tokens + ask.output_tokens)
        arguments = ("--config", self.config_file, "--threads", self.threads, "--context", room, "--mmap")
        more = ("--sequences", sequences, "--kv", "q4_0", "--prompt", ask.prompt_tokens)
        with started(self.folder, "bench.peers.llamacpp", limit, self.gguf, *arguments, *more) as peer:
            yield peer

    @contextmanager
    def accelerate_block(
        self, limit: int, ask: Ask, sequences: int, cpu_bytes: int
    ) -> Iterator[tuple[Worker, Cgroup | None]]:
        """accelerate's disk offload with KV in bfloat16, `cpu_bytes` of the weights mapped."""
        offload = self.folder / "offload"
        arguments = ("--offload", offload, "--threads", self.threads, "--cpu-bytes", cpu_bytes)
        more = ("--sequences", sequences, "--prompt", ask.prompt_tokens)
        with started(self.folder, "bench.peers.accelerate", limit, self.checkpoint, *arguments, *more) as peer:
            yield peer


def answered(
    engines: BlockEngines, ceilings: Ceilings, shape: str, limit: int, ask: Ask, plan: Plan | None = None,
    steps: int = 0,
) -> Figures:  # fmt: skip
    """One block of our answers: prompts, and then decoding between two readings of the ceilings. `steps`: only so many
    decode passes, behind prompts that nobody read; then prompts are taken to last as promised.

    `share_of_bound`: of a decode pass. It takes at least as long as the disk needs for weights that stream and KV that
    lies there, as the processor needs for the products (INT8_SHARE of int8's peak, float32's peak for weights in
    floats), and as RAM needs for the weights and KV, whichever is longest. `errors`: by how much each promise was
    off."""
    with engines.block(shape, limit, ask, plan) as (worker, cgroup):
        facts = worker.facts
        prompts = {"seconds": facts["predicted_prompts_s"]} if steps else worker.ask("prompts", 0)
        before, kind = _now(ceilings, engines.threads), "float32" if shape == "1b_bf16" else "int8"
        decode = worker.ask("steps", steps) if steps else worker.ask("decode", 0)
        after = _now(ceilings, engines.threads)
        peak = cgroup.peak_bytes() if cgroup else 0
    disk, ram, ops = (statistics.mean((before[name], after[name])) for name in ("disk", "ram", kind))
    ops *= INT8_SHARE if kind == "int8" else 1.0
    needs_s = bound_needs_s(facts, decode, disk, ram, ops)
    pass_s = decode["seconds"] / decode["passes"]
    decode_rate = decode["tokens"] / decode["seconds"]
    s_per_token = (prompts["seconds"] + pass_s * ask.output_tokens) / (facts["seqs"] * ask.output_tokens)
    return {
        "decode_tokens_per_s": decode_rate,
        "generation_tokens_per_s": 1 / s_per_token,
        "share_of_bound": max(needs_s.values()) / pass_s,
        "bound_by": max(needs_s, key=lambda name: needs_s[name]),
        "bound_needs_s": needs_s,
        "pass_s": pass_s,
        "prompts_s": prompts["seconds"],
        "s_per_token": s_per_token,
        "weights_once": decode["exact"],
        "read_bytes_per_pass": decode["read_bytes"] / decode["passes"],
        "peak_exact": facts["peak_exact"],
        "peak_host_bytes": decode["peak_host_bytes"],
        "peak_cgroup_bytes": peak,
        "errors": {
            "decode_tokens_per_s": abs(facts["predicted_decode_tokens_per_s"] / decode_rate - 1),
            "s_per_token": abs(facts["predicted_s_per_token"] / s_per_token - 1),
        },
        "ceilings": [before, after],
        "facts": facts,
    }


def bound_needs_s(facts: Figures, decode: Figures, disk: float, ram: float, ops: float) -> dict[str, float]:
    """Seconds that each lane needs for a decode pass of what a block decoded. `disk`, `ram`: bytes a second; `ops`:
    operations a second."""
    read, seen = (decode[name] / decode["passes"] for name in ("kv_read_bytes", "kv_seen_bytes"))
    return {
        "disk": (facts["pass_streamed_bytes"] + read) / disk,
        "ops": facts["pass_ops"] / ops,
        "ram": (facts["pass_weight_bytes"] + seen) / ram,
    }


def _now(ceilings: Ceilings, threads: int) -> dict[str, float]:
    """Bytes per second of disk and RAM, operations per second of int8 and float32 dot products in registers."""
    reading: Reading = ceilings.read()
    kinds = ("int8", "float32")
    peaks = {kind: statistics.median(_native.peak_per_s(kind, threads) for _ in range(PEAKS)) for kind in kinds}
    return {"disk": reading.disk_read_bytes_per_s, "ram": reading.ram_read_bytes_per_s, **peaks}


def line(figures: Figures) -> str:
    facts = figures["facts"]
    promised = facts["predicted_decode_tokens_per_s"]
    needs = ", ".join(f"{name} {seconds:.3f}" for name, seconds in figures["bound_needs_s"].items())
    return (
        f"decode {figures['decode_tokens_per_s']:.2f} tokens/s (promised {promised:.2f}), "
        f"a pass {figures['pass_s']:.3f} s, {figures['share_of_bound']:.1%} of the bound by {figures['bound_by']} "
        f"(needs s: {needs}); prompts {figures['prompts_s']:.1f} s (promised {facts['predicted_prompts_s']:.1f}); "
        f"{figures['generation_tokens_per_s']:.2f} tokens/s in all; {facts['seqs']} sequences, weights once: "
        f"{figures['weights_once']}, peak exact: {figures['peak_exact']}, {figures['peak_host_bytes'] / 1e9:.3f} GB"
    )
