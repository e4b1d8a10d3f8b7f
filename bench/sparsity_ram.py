"""The part `ram` of `bench.sparsity`: OPT-6.7B's shape in int4, all in memory, beside all of its neurons computed.

    exact     of neurons one by one, those that fire: 3 %
    predict   of records, those that stated predictors of 7 % of the parameters (Table 6) call active: 5 %
    granules  in tiles, where 64 neurons that lie together do not fire

Each takes turns with `off` of tiles, in processes of their own, two at a time: with KV for 32 sequences they have 6 GB
each. Batches of 1 to 32 (Figure 14), and a prompt. The bound is that of the bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.offload_engines import started
from bench.peers import Worker, WorkerEnded
from bench.peers.ours import BATCHES
from bench.sparsity_models import CONTEXT, Models, parts_of, tell
from penstock.planner.solve import solve
from penstock.serve.planning import firing_of
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.store.packed import open_packed
from penstock.store.predictors import with_predictors

TOKENS, PROMPT_TOKENS = 24, 96
LAYOUTS = {
    "off": ("int4", "off"), "exact": ("int4-neurons", "exact"), "predict": ("int4-records", "predict"),
    "granules": ("int4", "exact"),
}  # fmt: skip

Figures = dict[str, float]


def in_ram(
    models: Models, machine: MachineSpec, rounds: int, threads: int, layouts: Sequence[str]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """What is known after each round. Raises WorkerEnded in the end if a layout's processes did not live."""
    tiles = sum(
        part.granules * part.block("down").nbytes for part in parts_of(models.config(), "int4") if part.kind == "ffn"
    )
    found: dict[str, list[Figures]] = {}
    shares: dict[int, float] = {}
    failed: list[str] = []
    off = models.make(LAYOUTS["off"][0])
    predicted = {f"off_{n}": _promised(off, "off", machine, n) for n in BATCHES}
    for name in (name for name in LAYOUTS if name in layouts and name != "off"):
        weights, sparsity = LAYOUTS[name]
        model = models.make(weights)
        predicted |= {f"{name}_{n}": _promised(model, sparsity, machine, n) for n in BATCHES}
        found[name] = []
        same = ("--threads", threads, "--context", CONTEXT, "--sequences", BATCHES[-1])
        try:
            with (
                started(models.folder, "bench.peers.ours", None, off, *same, "--sparsity", "off") as (dense, _),
                started(models.folder, "bench.peers.ours", None, model, *same, "--sparsity", sparsity) as (sparse, _),
            ):
                if name == "exact":
                    shares = {n: sparse.ask(f"fired_{n}", 8)["share"] for n in BATCHES}
                for worker in (dense, sparse):
                    worker.ask("decode", 2)
                for i in range(rounds):
                    found[name].append(_round({"off": dense, name: sparse}, backwards=i % 2 == 1))
                    shown = {k: round(v, 2) for k, v in found[name][-1].items() if "bytes" not in k}
                    tell(f"ram, {name}, round {i + 1}: {shown}")
                    yield _figures(found, shares, tiles, predicted)
        except WorkerEnded as ended:
            failed.append(f"{name}: {ended}")
            tell(f"ram, {failed[-1]}")
    if failed:
        raise WorkerEnded("; ".join(failed))


def _round(workers: dict[str, Worker], backwards: bool) -> Figures:
    """Tokens a second of each worker and batch, and of a prompt, and the bytes that a step reads."""
    figures: Figures = {}
    for name in list(workers)[:: -1 if backwards else 1]:
        for n in BATCHES:
            steps = TOKENS if n < 8 else TOKENS // 4
            answer = workers[name].ask(f"decode_{n}", steps)
            figures[f"{name}_{n}"] = n * steps / answer["seconds"]
            figures[f"{name}_{n}_bytes"] = answer["bytes"] / steps
        figures[f"{name}_prefill"] = PROMPT_TOKENS / workers[name].ask("prefill", PROMPT_TOKENS)["seconds"]
    if "predict" in workers:  # Figure 17
        alone_s = workers["predict"].ask("predictors", TOKENS)["seconds"] / TOKENS
        figures["predictors_share"] = alone_s * figures["predict_1"]
    return figures


def _figures(
    found: dict[str, list[Figures]], shares: dict[int, float], tiles: int, predicted: Figures
) -> dict[str, Any]:  # fmt: skip
    """`shares`: of the neurons that fire, by batch. `tiles`: bytes of what is activated multiplies."""
    measured = {name: rounds for name, rounds in found.items() if rounds}
    gains = {
        f"{name}_{n}": statistics.median(f[f"{name}_{n}"] / f[f"off_{n}"] for f in rounds)
        for name, rounds in measured.items()
        for n in (*BATCHES, "prefill")
    }
    by_name: dict[str, list[float]] = {}
    for rounds in measured.values():
        for figures in rounds:
            for key in predicted.keys() & figures.keys():
                by_name.setdefault(key, []).append(figures[key])
    # Layouts have as many bytes. What does not fire is read no further than what is activated.
    off_bytes = next((rounds[0]["off_1_bytes"] for rounds in measured.values()), 0.0)
    bound = {n: off_bytes / (off_bytes - (1 - share) * tiles) for n, share in shares.items()}
    of_predict = measured.get("predict", [])
    return {
        "exact_vs_off": gains.get("exact_1"),
        "predict_vs_off": gains.get("predict_1"),
        "share_of_bound": gains["exact_1"] / bound[1] if shares and "exact_1" in gains else None,
        "predict_bound": off_bytes / of_predict[0]["predict_1_bytes"] if of_predict else None,
        "predictors_share": statistics.median(f["predictors_share"] for f in of_predict) if of_predict else None,
        "predicted_over_measured": {
            key: predicted[key] / statistics.median(rates) for key, rates in sorted(by_name.items())
        },
        "fired": shares,
        "bounds": bound,
        "gains": gains,
        "by_round": found,
    }


def _promised(model: Path, sparsity: str, machine: MachineSpec, sequences: int) -> float:
    """Tokens a second that a plan promises of so many sequences at once."""
    packed = open_packed(model)
    if sparsity == "predict":
        packed = with_predictors(packed)
    half = CONTEXT // 2
    ask = Ask(batch=sequences, context=CONTEXT, prompt_tokens=half, output_tokens=half, sparsity=sparsity)
    firing = firing_of(model, packed.spec, sparsity)
    return solve(ask, packed.spec, packed.weights, machine, firing=firing).prediction.decode_tokens_per_s
