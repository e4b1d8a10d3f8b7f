"""The part `disk` of `bench.sparsity`: OPT-6.7B's shape within 2.4 GB, where what does not fit lies on the disk.

    off      all neurons stream
    exact    as the plan decides, of the model packed hot to cold by a profile of random tokens
    predict  of the model in records, with predictors of a stated size. They call other neurons active for each token,
             those at the first places most often (`bench.stated_predictors.state_by_rates`)
    ahead    the same, but each layer's predictor hears the layer before it, so that the disk has a layer's reads before
             attention is computed

They take turns in a process and a memory cgroup of their own, with an empty page cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.cgroup import whole_pages
from bench.offload_engines import started
from bench.peers import WorkerEnded
from bench.sparsity_models import CONTEXT, Models, tell

WARM_TOKENS, TOKENS = 4, 24
SPARSITY = {"ahead": "predict"}  # of those that are not named by it
KEYS = ("vs_dense", "share_of_bound", "disk_bytes_per_token")


def on_disk(models: Models, rounds: int, layouts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """After each turn: the keys of `ahead` on top, where predictors are wanted, else of `exact`; all under their
    names."""
    hot = models.hot_to_cold()
    folders = {"off": hot}
    if "exact" in layouts:
        folders["exact"] = hot
    if "predict" in layouts:
        folders["predict"], folders["ahead"] = models.with_rates(), models.with_rates(ahead=1)
    on_top = list(folders)[-1]
    for found in within_disk(models, folders, rounds):
        yield {**{key: found.get(on_top, {}).get(key) for key in KEYS}, **found}


def within_disk(models: Models, folders: dict[str, Path], rounds: int) -> Iterator[dict[str, Any]]:
    """After each turn the figures of each of the models `folders` by its name, "off" among them. `vs_dense`: beside
    off in the same round. Raises WorkerEnded in the end if a process did not live."""
    limit = whole_pages(models.limit_bytes)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
    failed: dict[str, str] = {}
    for i in range(rounds):
        for name in list(found)[:: 1 if i % 2 == 0 else -1]:
            if name in failed:
                continue
            try:
                found[name].append(_turn(models, folders[name], limit, SPARSITY.get(name, name)))
            except WorkerEnded as ended:
                failed[name] = f"{name}: {ended}"
                tell(f"disk, {failed[name]}")
                continue
            last = found[name][-1]
            tell(
                f"disk, {name}: {TOKENS / last['seconds']:.2f} tokens/s (predicted"
                f" {last['predicted_tokens_per_s']:.2f}), {last['disk_bytes'] / TOKENS / 1e6:.1f} MB a token (predicted"
                f" {last['predicted_disk_bytes'] / 1e6:.1f}), {last['bound_s'] / last['seconds']:.2f} of the bound"
            )
            yield {name: _figures(found["off"], mine) for name, mine in found.items() if mine}
    if failed:
        raise WorkerEnded("; ".join(failed.values()))
    said = {tuple(each["tokens"]) for name in ("exact", "off") for each in found.get(name, ())}
    assert len(said) == 1, "exact and off say different tokens"


def _turn(models: Models, model: Path, limit: int, sparsity: str) -> dict[str, Any]:
    arguments = (model, "--limit", limit, "--context", CONTEXT, "--sparsity", sparsity, "--cache", models.cache)
    with started(models.folder, "bench.peers.within", limit, *arguments) as (worker, cgroup):
        assert cgroup is not None
        worker.ask("decode", WARM_TOKENS)
        answer = worker.ask("decode", TOKENS)
        return {**worker.facts, **answer, "peak_cgroup_bytes": cgroup.peak_bytes()}


def _figures(off: list[dict[str, Any]], mine: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rounds of one sparsity, beside those of `off`. Bytes are those of a token."""
    beside = [b["seconds"] / a["seconds"] for a, b in zip(mine, off, strict=False)]
    rates = [TOKENS / each["seconds"] for each in mine]
    last = mine[-1]
    return {
        "vs_dense": statistics.median(beside) if beside else None,
        "share_of_bound": statistics.median(each["bound_s"] / each["seconds"] for each in mine),
        "disk_bytes_per_token": statistics.median(each["disk_bytes"] / TOKENS for each in mine),
        "bytes_exact": all(each["disk_bytes"] == each["told_bytes"] for each in mine),
        **{
            f"{kind}_bytes_per_token": last[f"{kind}_bytes"] / TOKENS
            for kind in ("asked", "records", "alignment", "hole")
        },
        "reads_per_token": last["reads"] / TOKENS,
        "tokens_per_s": rates,
        "predicted_tokens_per_s": last["predicted_tokens_per_s"],
        "predicted_over_measured": last["predicted_tokens_per_s"] / statistics.median(rates),
        "predicted_disk_bytes": last["predicted_disk_bytes"],
        "hole_limit_bytes": last["hole_limit_bytes"],
        "asks": last["asks"],
        "reasons": last["reasons"],
        "peak_cgroup_bytes": max(each["peak_cgroup_bytes"] for each in mine),
    }
