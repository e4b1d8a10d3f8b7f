"""The ops of FFNs with experts in numpy float32: route, experts, combine and gate.

Shapes: T rows of the batch, X experts, A experts that a row goes to, D d_model. h and partial are float32 [T, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.reference.dense import FfnSum, ffn
from penstock.kernels.reference.matrix import Bytes, Float32, Scratch, multiply, vector
from penstock.spec.model import Routed, Router
from penstock.spec.parts import Part

_SMALLEST_SUM = np.float32(1e-20)  # is added to the sum that scores are divided by, as Glm4MoeTopkRouter does


class Routes(NamedTuple):
    """A router's answer: the experts that each row goes to in rising order, the factors of their outputs, and the
    factor of the shared expert's output."""

    ids: NDArray[np.int32]  # [T, A]
    factors: Float32  # [T, A]
    shared: Float32  # [T]


def route(weights: Bytes, part: Part, routed: Routed, h: Float32, routes: Routes, scratch: Scratch) -> None:
    """Fills `routes` for h float32 [T, D]. `weights` uint8 [granule_bytes] is the router's granule. A row with a score
    that is no finite number goes to the first experts, with factors NaN. So damage shows in the logits, as it does
    elsewhere."""
    t, start = h.shape[0], scratch.mark()
    scores = scratch.take((t, routed.experts))
    multiply(h, weights, part.block("scores"), scores, scratch)
    bias = vector(weights, part.block("bias")) if routed.router.bias else None
    if bias is not None and routed.router.bias_scored:
        scores += bias
        bias = None
    damaged = ~np.isfinite(scores).all(axis=1)
    scores[damaged] = 0
    with np.errstate(over="ignore"):
        if routed.router.score == "softmax":
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=1, keepdims=True)
        else:
            scores[...] = 1 / (1 + np.exp(-scores))
        _choose(scores, bias, routed, routes)
        routes.shared[...] = 1
        if routed.shared_gate:
            gate = scratch.take((t, 1))
            multiply(h, weights, part.block("shared_gate"), gate, scratch)
            routes.shared[...] = 1 / (1 + np.exp(-gate[:, 0]))
    routes.factors[damaged] = np.nan
    scratch.rewind(start)


def _choose(scores: Float32, bias: Float32 | None, routed: Routed, routes: Routes) -> None:
    router, active = routed.router, routed.active
    ranked = scores if bias is None else scores + bias
    if router.groups > 1:
        ranked = _kept_groups(ranked, router)
    # The highest scores are chosen, of equal ones the lowest ids. Then ids rise: that is the order of the sum.
    ids = np.sort(np.argsort(-ranked, axis=1, kind="stable")[:, :active], axis=1)
    chosen = np.take_along_axis(scores, ids, axis=1)
    if router.normalised:
        chosen = chosen / (chosen.sum(axis=1, keepdims=True) + _SMALLEST_SUM)
    routes.ids[...] = ids
    routes.factors[...] = chosen * np.float32(router.scale)


def _kept_groups(ranked: Float32, router: Router) -> Float32:
    """The scores float32 [T, X], but -inf outside of the groups that are kept."""
    grouped = ranked.reshape(len(ranked), router.groups, -1)
    two_best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    kept = np.argsort(-two_best, axis=1, kind="stable")[:, : router.groups_kept]
    only_kept = np.full_like(grouped, -np.inf)
    np.put_along_axis(only_kept, kept[:, :, None], np.take_along_axis(grouped, kept[:, :, None], axis=1), axis=1)
    return only_kept.reshape(ranked.shape)


def experts(
    weights: Sequence[Bytes], ids: Sequence[int], part: Part, routed: Routed, h: Float32, routes: Routes,
    partial: Float32, outputs: Float32 | None, starts_sum: bool, scratch: Scratch,
) -> None:  # fmt: skip
    """partial [T, D] (+)= Σ weight · FFN of h [T, D] over the experts `ids`. Each has weights uint8 [granules,
    granule_bytes]. With `outputs` float32 [T, A, D] the FFNs' outputs are stored there instead."""
    if starts_sum and outputs is None:
        partial[...] = 0
    start = scratch.mark()
    for expert, granules in zip(ids, weights, strict=True):
        rows, rank = np.nonzero(routes.ids == expert)
        if not len(rows):
            continue
        scratch.rewind(start)
        x, y, pending = (scratch.take((len(rows), h.shape[1])) for _ in range(3))
        np.take(h, rows, axis=0, out=x)
        ffn(granules, part, 0, routed.expert, x, FfnSum(y, pending, True, False, False), scratch)
        if outputs is not None:
            outputs[rows, rank] = y
            continue
        y *= routes.factors[rows, rank][:, None]
        partial[rows] += y
    scratch.rewind(start)


def combine(routes: Routes, outputs: Float32, partial: Float32, starts_sum: bool) -> None:
    """partial [T, D] (+)= Σ weight · outputs float32 [T, A, D], experts in rising order."""
    if starts_sum:
        partial[...] = 0
    for rank in range(outputs.shape[1]):
        partial += outputs[:, rank] * routes.factors[:, rank, None]


def gate(routes: Routes, partial: Float32) -> None:
    """partial float32 [T, D] = partial times the shared expert's weight of each row."""
    partial *= routes.shared[:, None]
