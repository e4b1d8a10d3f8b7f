"""Trains predictors of who fires (PowerInfer §5.1) for `penstock train-predictors`: hears a packed model read a text,
and fits a predictor for each layer.

Tokens are taken in runs of RUN_TOKENS. Of each eight runs six are trained on, one sets the threshold, and one measures
what is told of the predictor. A layer's rank begins where PowerInfer publishes it for such activity. It grows or
shrinks while that lowers the bytes that a token reads in all: those of the neurons that are called active, at the
recall that was asked for, and the predictor's own.

Predictors one layer ahead learn from the FFN's input of the layer before theirs, which is much like their own: the
residual stream changes little from layer to layer. The first layer's learns from its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from penstock.errors import BadRequest
from penstock.graph.records import may_be_asked
from penstock.planner.activity import predictor_rank
from penstock.runtime.host import Progress, usable_threads
from penstock.serve.engine import Engine
from penstock.serve.fitting import Fitted, Heard, fit, granule_of, rounded, with_recall
from penstock.serve.profiling import Fired, read
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.part_keys import parts_by_key
from penstock.spec.places import is_disk
from penstock.spec.plan import Plan
from penstock.spec.predictors import (
    MOST_AHEAD,
    MOST_RANK,
    RANK_STEP,
    LayerPredictor,
    Predictors,
    part_of,
    predicted_layers,
)
from penstock.store.packed import Packed
from penstock.store.predictors import model_sha256
from penstock.units import MIB, round_up

RUN_TOKENS = 128
_RUNS, _SETS_THRESHOLD, _MEASURES = 8, 6, 7
USUAL_TOKENS = 32768
LEAST_TOKENS = 2 * _RUNS * RUN_TOKENS
HEARD_BYTES = 256 * MIB  # that are kept of a text at a time: as many layers as fit are heard in one reading
_FIT_BYTES = 48 * MIB  # of fitting one layer, beside its weights: scores of some thousand tokens
MOST_SHARE = 0.1  # of the model's weights, for all predictors together

Uint8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Trained:
    """What training found: what is known of the predictors, and each one's granule."""

    predictors: Predictors
    granules: tuple[Uint8, ...]


def train(
    engine: Engine, text: str, name: str, *, recall: float, seed: int = 0, most_tokens: int | None = None,
    ahead: int = 0, on_progress: Progress | None = None,
) -> Trained:  # fmt: skip
    """Reads at most `most_tokens` of the text, None: as many as are heard, and trains a predictor for each dense layer.
    `ahead`: how many layers before its own a predictor hears, 0 or 1.

    Raises BadRequest for a model without ReLU, and for a text of fewer than LEAST_TOKENS tokens, or more than
    `most_tokens_of` the model."""
    require_relu(engine.packed.spec, str(engine.packed.folder))
    if most_tokens is None:
        most_tokens = min(USUAL_TOKENS, most_tokens_of(engine.packed.spec))
    ids = engine.tokenizer.encode(text)[:most_tokens]
    return train_ids(engine, ids, name, hashlib.sha256(text.encode()).hexdigest(), recall, seed, ahead, on_progress)


def train_ids(
    engine: Engine, ids: Sequence[int], name: str, text_sha256: str, recall: float, seed: int = 0,
    ahead: int = 0, on_progress: Progress | None = None,
) -> Trained:  # fmt: skip
    """As `train`, of tokens. Raises BadRequest for a recall, a number of tokens, or an `ahead`, that training cannot
    take."""
    packed = engine.packed
    if ahead not in range(MOST_AHEAD + 1):
        raise BadRequest(f"predictors hear at most {MOST_AHEAD} layer before their own, not {ahead}")
    require_relu(packed.spec, str(packed.folder))
    require_recall(recall)
    if len(ids) > (most := most_tokens_of(packed.spec)):
        raise BadRequest(f"the text has {len(ids)} tokens; of this model at most {most} are heard (--tokens {most})")
    if len(ids) < LEAST_TOKENS:
        raise BadRequest(f"the text has {len(ids)} tokens; training takes {LEAST_TOKENS} at least")
    layers = predicted_layers(packed.spec)
    trained: list[tuple[LayerPredictor, Uint8]] = []
    for group in _groups(packed.spec, layers, len(ids)):
        heard = _hear(engine, group, ids, ahead, on_progress)
        jobs = [partial(_layer, packed, layer, heard[layer], recall, seed) for layer in group]
        for done in _in_threads(jobs):
            trained.append(done)
            if on_progress:
                on_progress("training predictors of layers", len(trained), len(layers))
    told = Predictors(
        model_sha256(packed.folder), name, text_sha256, len(ids), seed, recall, tuple(each for each, _ in trained),
        ("0" * 16,) * len(trained), ahead,
    )  # fmt: skip
    return Trained(told, tuple(granule for _, granule in trained))


def beside_bytes(spec: ModelSpec, weights: Format) -> int:
    """Bytes that training takes of the process beside the model. Each thread fits a layer: float32 weights of the
    largest rank, their gradients, Adam's two means, and what other ranks came to."""
    rank = max(most_rank(spec, weights, layer) for layer in predicted_layers(spec))
    numbers = rank * (spec.d_model + max(spec.layers[i].ffns[0].neurons for i in predicted_layers(spec)))
    return HEARD_BYTES + usable_threads(None) * (6 * 4 * numbers + _FIT_BYTES)


def most_tokens_of(spec: ModelSpec) -> int:
    """The most tokens of which one layer is heard within HEARD_BYTES."""
    return HEARD_BYTES // max(_heard_bytes(spec, layer) for layer in predicted_layers(spec))


def _heard_bytes(spec: ModelSpec, layer: int) -> int:
    """Bytes that are kept of a token: float16 inputs, and a bit for each neuron."""
    return 2 * spec.d_model + -(-spec.layers[layer].ffns[0].neurons // 8)


def require_relu(spec: ModelSpec, where: str) -> None:
    """Raises BadRequest for a model whose neurons all fire, or that has no dense FFN in some layer."""
    if not spec.fires:
        raise BadRequest(f"{where} has no ReLU: all of its neurons fire, and there is nothing to foretell")
    if len(predicted_layers(spec)) < len(spec.layers):
        raise BadRequest(f"{where} has experts: predictors are for dense FFNs")


def is_for_disk(plan: Plan) -> bool:
    """Whether neurons lie on a disk in this plan, each as one record, so that one with predictors may ask for them. The
    plan is that of training. With --resident no plan asks, and nothing is gained.
    Predictors one layer ahead decode 1.2 times as fast then (docs/LOG.md, "Predictors one layer ahead")."""
    ffns = {part.key: part for part in plan.parts.values() if part.kind == "ffn"}
    on_disk = any(unit.part in ffns and is_disk(unit.home) for unit in plan.units)
    return on_disk and all(may_be_asked(part, "predict") for part in ffns.values())


def require_recall(recall: float) -> None:
    """Raises BadRequest for a recall that training cannot be asked for."""
    if not 0.5 <= recall < 1:
        raise BadRequest(f"a recall of {recall:g} should be from 0.5 to less than 1")


def _groups(spec: ModelSpec, layers: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Layers that are heard in one reading."""
    together = max(1, HEARD_BYTES // (tokens * max(_heard_bytes(spec, layer) for layer in layers)))
    for lo in range(0, len(layers), together):
        yield list(layers[lo : lo + together])


def _hear(
    engine: Engine, layers: Sequence[int], ids: Sequence[int], ahead: int, on_progress: Progress | None
) -> dict[int, Heard]:
    """Reads the tokens, and keeps what is heard of these layers: who fires, and the input `ahead` layers before."""
    spec, n = engine.packed.spec, len(ids)
    kept = {
        layer: Heard(np.empty((n, spec.d_model), np.float16), np.empty((n, -(-neurons // 8)), np.uint8), neurons)
        for layer in layers
        for neurons in (spec.layers[layer].ffns[0].neurons,)
    }
    hearing = {layer: [each for each in layers if max(0, each - ahead) == layer] for layer in range(len(spec.layers))}
    written = dict.fromkeys(hearing, 0)

    def heard(layer: int, h: NDArray[np.float32], fired: Uint8) -> None:
        rows = slice(written[layer], written[layer] + len(h))
        for each in hearing[layer]:
            with np.errstate(over="ignore"):
                kept[each].h[rows] = h
        if layer in kept:
            kept[layer].fired[rows] = np.packbits(fired, axis=1)
        written[layer] = rows.stop

    with engine.session.hearing.neurons(heard, by_place=True):
        for _ in read(engine, ids, on_progress):
            pass
    for layer in layers:
        if not np.isfinite(kept[layer].h).all():
            of = max(0, layer - ahead)
            raise BadRequest(f"the input of layer {of}'s FFN leaves the range of float16: it cannot be learnt from")
    return kept


def _in_threads(jobs: Sequence[Callable[[], tuple[LayerPredictor, Uint8]]]) -> Iterator[tuple[LayerPredictor, Uint8]]:
    """The results in order. Each job's products run in one thread, so that they add up in one order."""
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(usable_threads(None), "penstock-train") as pool:
        begun = [pool.submit(job) for job in jobs]
        try:
            for each in begun:
                yield each.result()
        finally:
            for each in begun:
                each.cancel()


def _layer(packed: Packed, layer: int, heard: Heard, recall: float, seed: int) -> tuple[LayerPredictor, Uint8]:
    """The best predictor of a layer, and its granule."""
    spec, part = packed.spec, parts_by_key(packed.spec, packed.weights)[f"{layer}.ffn"]
    runs = np.arange(len(heard.h)) // RUN_TOKENS % _RUNS
    train_on, sets, measures = (
        np.flatnonzero(which) for which in (runs < _SETS_THRESHOLD, runs == _SETS_THRESHOLD, runs == _MEASURES)
    )
    tried: dict[int, tuple[float, LayerPredictor, Fitted]] = {}

    def bytes_with(rank: int) -> float:
        """Bytes that a token reads of the layer with a predictor of this rank."""
        if rank not in tried:
            own = part_of(spec, layer, rank)
            fitted = rounded(fit(heard, train_on, rank, seed), own)
            fitted = with_recall(fitted, heard, sets, recall)
            told = _measured(fitted, heard, measures, layer, rank)
            tried[rank] = (told.active[0] * part.nbytes + own.nbytes, told, fitted)
        return tried[rank][0]

    most = most_rank(spec, packed.weights, layer)
    fires = float(np.unpackbits(heard.fired[::_RUNS], axis=1, count=heard.neurons).mean())
    rank = min(most, round_up(predictor_rank(spec.d_model, fires), RANK_STEP))
    best = bytes_with(rank)
    for step in (0.5, 2.0):
        here = rank
        while True:
            other = min(most, max(RANK_STEP, round_up(round(here * step), RANK_STEP)))
            if other == here or bytes_with(other) >= best:
                break
            best, here = bytes_with(other), other
        if here != rank:
            break
    _, told, fitted = min(tried.values(), key=lambda each: each[0])
    return told, granule_of(fitted, part_of(spec, layer, told.rank))


def most_rank(spec: ModelSpec, weights: Format, layer: int) -> int:
    """The largest rank with which all predictors have at most MOST_SHARE of the model's weights, or RANK_STEP where
    there is none."""
    whole = sum(part.weights_of(0, part.granules) for part in parts_by_key(spec, weights).values())
    each = MOST_SHARE * whole / len(spec.layers) / (spec.d_model + spec.layers[layer].ffns[0].neurons)
    return min(MOST_RANK, max(RANK_STEP, int(each) // RANK_STEP * RANK_STEP))


def _measured(fitted: Fitted, heard: Heard, chosen: NDArray[np.intp], layer: int, rank: int) -> LayerPredictor:
    """What a predictor does on the tokens `chosen`, which come in whole runs."""
    counted, fires, hits, called = Fired(heard.neurons), 0, 0, 0
    for lo in range(0, len(chosen), RUN_TOKENS):
        h, fired = heard.rows(chosen[lo : lo + RUN_TOKENS])
        active = (fitted.scores(h) > 0).astype(np.uint8)
        counted.rows(active)
        fires, called = fires + int(fired.sum(dtype=np.int64)), called + int(active.sum(dtype=np.int64))
        hits += int((fired & active).sum(dtype=np.int64))
    shares = counted.shares()
    return LayerPredictor(
        layer, rank, hits / fires if fires else 1.0, 1 - hits / called if called else 0.0,
        fires / (len(chosen) * heard.neurons), shares,
    )  # fmt: skip
