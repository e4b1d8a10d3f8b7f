"""The part `disk` of `bench.sparsity`: OPT-6.7B's shape within 2.4 GB, where what does not fit lies on the disk.

The model is packed hot to cold by a profile of random tokens. `exact`, as the plan decides, and `off`, which streams
all neurons, take turns in a process and a memory cgroup of their own, with an empty page cache.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.cgroup import drop_page_cache, limited, whole_pages
from bench.peers import Worker

LIMIT_BYTES, CONTEXT, WARM_TOKENS, TOKENS = 2_400_000_000, 128, 4, 24
PROFILED_TOKENS = 2048


def hot_to_cold(model: Path) -> Path:
    """The same model, its neurons in the order of a profile that is made here."""
    target = model.with_name(f"{model.name}-hot")
    if not target.exists():
        text = model.with_name("profiled.txt")
        # The tokenizer of `synth` takes bytes, so this is a text of random printable ones.
        text.write_text("".join(chr(32 + i * i * 7919 % 95) for i in range(PROFILED_TOKENS)))
        _penstock("profile", model, text, "--tokens", PROFILED_TOKENS)
        _penstock("pack", model, target, "--profile", model / "profile.json")
    return target


def within_disk(model: Path, rounds: int) -> dict[str, Any]:
    """Figures of one round and more: `vs_dense`, `share_of_bound`, `disk_bytes_per_token` and what they follow from."""
    packed, limit = hot_to_cold(model), whole_pages(LIMIT_BYTES)
    found: dict[str, list[dict[str, Any]]] = {"exact": [], "off": []}
    for i in range(rounds):
        for sparsity in sorted(found, reverse=i % 2 == 1):
            drop_page_cache(packed.glob("*.safetensors"))
            with limited(limit) as cgroup:
                arguments = (packed, "--limit", limit, "--context", CONTEXT, "--sparsity", sparsity)
                worker = Worker("bench.peers.within", *arguments, cgroup=cgroup.folder)
                worker.ask("decode", WARM_TOKENS)
                answer = worker.ask("decode", TOKENS)
                found[sparsity].append({**worker.facts, **answer, "peak_cgroup_bytes": cgroup.peak_bytes()})
                worker.close()
            print(f"{sparsity}: {TOKENS / answer['seconds']:.2f} tokens/s,"
                  f" {answer['disk_bytes'] / TOKENS / 1e6:.1f} MB a token", flush=True)  # fmt: skip
    exact, off = found["exact"], found["off"]
    assert all(each["tokens"] == exact[0]["tokens"] for each in (*exact, *off)), "exact and off say different tokens"
    return {
        "vs_dense": statistics.median(b["seconds"] / a["seconds"] for a, b in zip(exact, off, strict=True)),
        "share_of_bound": statistics.median(each["bound_s"] / each["seconds"] for each in exact),
        "disk_bytes_per_token": exact[0]["disk_bytes"] / TOKENS,
        "tokens_per_s": {name: [TOKENS / each["seconds"] for each in by] for name, by in found.items()},
        "disk_bytes": {name: by[0]["disk_bytes"] / TOKENS for name, by in found.items()},
        "predicted": {name: by[0]["predicted_tokens_per_s"] for name, by in found.items()},
        "asks": exact[0]["asks"],
        "reasons": exact[0]["reasons"],
        "peak_cgroup_bytes": max(each["peak_cgroup_bytes"] for by in found.values() for each in by),
    }


def _penstock(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "penstock.cli", *map(str, arguments)], check=True)
