"""The part `disk` of `bench.sparsity`: OPT-6.7B's shape within 2.4 GB, where what does not fit lies on the disk.

    off      all neurons stream
    exact    as the plan decides, of the model packed hot to cold by a profile of random tokens
    predict  of the model in records, with predictors of a stated size. They call other neurons active for each token,
             those at the first places most often (`bench.stated_predictors.state_by_rates`)

They take turns in a process and a memory cgroup of their own, with an empty page cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.cgroup import drop_page_cache, limited, whole_pages
from bench.peers import Worker
from bench.stated_predictors import state_by_rates
from penstock.store.predictors import FILE as PREDICTORS

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


def with_rates(model: Path, active: float, share: float, steepness: float) -> Path:
    """The same model with predictors that call each neuron active at a rate of its own. Its weights are linked."""
    target = model.with_name(f"{model.name}-rates")
    if not (target / PREDICTORS).exists():
        target.mkdir(exist_ok=True)
        for file in (file for file in model.iterdir() if file.name != PREDICTORS):
            (target / file.name).unlink(missing_ok=True)
            os.link(file, target / file.name)
        state_by_rates(target, active, share, steepness)
    return target


def within_disk(models: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Figures of each of the `models` by its sparsity, "off" among them. `vs_dense`: beside off in the same round."""
    limit = whole_pages(LIMIT_BYTES)
    found: dict[str, list[dict[str, Any]]] = {sparsity: [] for sparsity in models}
    for i in range(rounds):
        for sparsity in list(found)[:: 1 if i % 2 == 0 else -1]:
            drop_page_cache(models[sparsity].glob("*.safetensors"))
            with limited(limit) as cgroup:
                arguments = (models[sparsity], "--limit", limit, "--context", CONTEXT, "--sparsity", sparsity)
                worker = Worker("bench.peers.within", *arguments, cgroup=cgroup.folder)
                worker.ask("decode", WARM_TOKENS)
                answer = worker.ask("decode", TOKENS)
                found[sparsity].append({**worker.facts, **answer, "peak_cgroup_bytes": cgroup.peak_bytes()})
                worker.close()
            last = found[sparsity][-1]
            print(f"{sparsity}: {TOKENS / last['seconds']:.2f} tokens/s (predicted"
                  f" {last['predicted_tokens_per_s']:.2f}), {last['disk_bytes'] / TOKENS / 1e6:.1f} MB a token,"
                  f" {last['bound_s'] / last['seconds']:.2f} of the bound", flush=True)  # fmt: skip
    said = {tuple(each["tokens"]) for name in ("exact", "off") for each in found.get(name, ())}
    assert len(said) == 1, "exact and off say different tokens"
    return {name: _figures(found["off"], mine) for name, mine in found.items()}


def _figures(off: list[dict[str, Any]], mine: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rounds of one sparsity, beside those of `off`."""
    return {
        "vs_dense": statistics.median(b["seconds"] / a["seconds"] for a, b in zip(mine, off, strict=True)),
        "share_of_bound": statistics.median(each["bound_s"] / each["seconds"] for each in mine),
        "disk_bytes_per_token": statistics.median(each["disk_bytes"] / TOKENS for each in mine),
        "asked_bytes_per_token": mine[0]["asked_bytes"] / TOKENS,
        "records_bytes_per_token": mine[0]["records_bytes"] / TOKENS,
        "tokens_per_s": [TOKENS / each["seconds"] for each in mine],
        "predicted_tokens_per_s": mine[0]["predicted_tokens_per_s"],
        "predicted_disk_bytes": mine[0]["predicted_disk_bytes"],
        "asks": mine[0]["asks"],
        "reasons": mine[0]["reasons"],
        "peak_cgroup_bytes": max(each["peak_cgroup_bytes"] for each in mine),
    }


def _penstock(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "penstock.cli", *map(str, arguments)], check=True)
