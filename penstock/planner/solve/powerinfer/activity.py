"""How often neurons are active, where nobody has measured it: PowerInfer's published figures as curves.

Two of them fix a layer's curve: the share of its neurons that a token needs (1 less the sparsity of Table 3), and the
share that makes 80 % of all activations (Figure 4). Between them the frequency of the neuron at rank u (0: hottest) is
a power law that no neuron's exceeds 1:

    f(u) = min(1, (edge / u) ** steepness),   mean(f) over u in 0..1 = active,   its sum up to u = hot is 0.8 · active

Layers differ: over the whole model a smaller share makes the 80 % than in one layer. That spread is a geometric series
of the layers' means, rising with depth (the paper: the first 24 of OPT-30B's 48 layers have less than 1 % active).

Only models with a ReLU are known to be sparse; of SiLU's nothing is claimed. The figures are of some sizes; other sizes
take those of the nearest. Section 8.2's 20 % of OPT-30B contradict Table 3's 3 %: the table is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import exp, log

from penstock.spec.model import ModelSpec
from penstock.spec.parts import GRANULE_ROWS

HOT_SHARE = 0.8  # of all activations, by the neurons that the paper calls hot
_RELU = ("relu", "relu2")

# Table 3, as 1 - sparsity. OPT's are 96 % to 98 % over all sizes: the middle. With a gate, by d_model: 7B, 13B, 70B.
_PLAIN_ACTIVE = 0.03
_GATED_ACTIVE = {4096: 0.30, 5120: 0.22, 8192: 0.18}
# Figure 4: neurons that make 80 % of the activations, in one FFN and over the model: OPT-30B, LLaMA2(ReGLU)-70B.
_PLAIN_HOT, _GATED_HOT = (0.26, 0.17), (0.43, 0.26)
# Table 6: a predictor of the size that it gives for all layers has a hidden layer of so many times d_model: OPT-13B
# 0.168 and OPT-66B 0.119 (here their mean), LLaMA(ReGLU)-70B 0.234. Between and beyond, by the layer's activity, as
# Figure 9 has it: the more neurons are active, the larger.
_RANKS = ((0.03, 0.1435), (0.18, 0.234))
_RANK_STEP = 16

_LEAST_ACTIVE = 1e-6
_MOST_STEEP = 8.0  # beyond, hardly a neuron would be active now and then
_STEPS = 26  # of a bisection: to some 1e-5 of what is looked for
_SLOPE_STEPS, _SLOPE_LAYERS = 10, 16  # of the one over the spread of layers, by so many of them: no better known


@dataclass(frozen=True, slots=True)
class Curve:
    """f(u) = min(1, (edge / u) ** steepness)."""

    edge: float
    steepness: float

    def total(self, u: float) -> float:
        """The integral from 0 to u."""
        if u <= self.edge:
            return u
        a = 1 - self.steepness
        return self.edge + self.edge * (log(u / self.edge) if abs(a) < 1e-9 else ((u / self.edge) ** a - 1) / a)

    def mean(self, lo: float, hi: float) -> float:
        return min(1.0, max(0.0, (self.total(hi) - self.total(lo)) / (hi - lo)))


@dataclass(frozen=True, slots=True)
class Profile:
    """`layers`: of each layer, how often a neuron of each granule is active in decoding a token, hottest granule first.
    The granules are those of the FFN part, its neurons sorted by activity. `source`: who says so."""

    layers: tuple[tuple[float, ...], ...]
    source: str

    @property
    def mean(self) -> float:
        """Share of all neurons that a token needs."""
        return sum(sum(layer) for layer in self.layers) / sum(len(layer) for layer in self.layers)

    def active(self, layer: int, lo: int, hi: int, batch: int) -> float:
        """Share of the neurons in granules lo..hi that a batch of tokens needs: each alone, 1 - (1 - f)^batch."""
        return sum(1 - (1 - f) ** batch for f in self.layers[layer][lo:hi]) / (hi - lo)


def fit(active: float, hot: float) -> Curve:
    """The curve of mean `active` whose hottest `hot` neurons make HOT_SHARE of it. Where no curve does both, the mean
    holds: a plateau where `hot` is too small, no slope where it is too large."""
    active = min(1.0, max(_LEAST_ACTIVE, active))
    if active >= 1:
        return Curve(1.0, 0.0)
    lo, hi = 0.0, _MOST_STEEP
    for _ in range(_STEPS):
        steep = (lo + hi) / 2
        share = _of_mean(active, steep).total(min(1.0, hot)) / active
        lo, hi = (steep, hi) if share < HOT_SHARE else (lo, steep)
    return _of_mean(active, hi)


def _of_mean(active: float, steepness: float) -> Curve:
    """The mean is above the edge, since up to it f is 1; so the edge is found on a scale of its logarithm."""
    lo, hi = -690.0, log(active)
    for _ in range(_STEPS):
        edge = (lo + hi) / 2
        lo, hi = (edge, hi) if Curve(exp(edge), steepness).total(1.0) < active else (lo, edge)
    return Curve(exp(hi), steepness)


def synthetic(spec: ModelSpec, active: float, hot: float, hot_of_all: float, source: str) -> Profile:
    """A profile with a mean share of `active`; `hot` of a layer's neurons, and `hot_of_all` of the model's, make
    HOT_SHARE of the activations. Where layers alike make more than `hot_of_all`, they stay alike."""
    neurons = tuple(layer.ffns[0].neurons for layer in spec.layers)
    return Profile(_spread(neurons, active, hot, hot_of_all), source)


@lru_cache(maxsize=64)
def _spread(neurons: tuple[int, ...], active: float, hot: float, hot_of_all: float) -> tuple[tuple[float, ...], ...]:
    """Layers' frequencies, the means rising from layer to layer as steeply as `hot_of_all` asks."""
    lo, hi = 0.0, 8.0
    some = neurons[:: -(-len(neurons) // _SLOPE_LAYERS)]
    for _ in range(_SLOPE_STEPS):
        slope = (lo + hi) / 2
        found = _layers(some, active, hot, slope)
        lo, hi = (slope, hi) if hottest(found, HOT_SHARE) > hot_of_all else (lo, slope)
    return _layers(neurons, active, hot, lo)


def _layers(neurons: Sequence[int], active: float, hot: float, slope: float) -> tuple[tuple[float, ...], ...]:
    count = len(neurons)
    weights = [exp(slope * (i + 0.5) / count) for i in range(count)]
    lo, hi = 0.0, count / min(weights)
    for _ in range(2 * _STEPS):  # no layer has more than all of its neurons active
        per = (lo + hi) / 2
        lo, hi = (per, hi) if sum(min(1.0, per * weight) for weight in weights) < active * count else (lo, per)
    return tuple(_granules(n, fit(hi * weight, hot)) for n, weight in zip(neurons, weights, strict=True))


def _granules(neurons: int, curve: Curve) -> tuple[float, ...]:
    edges = [min(neurons, at) / neurons for at in range(0, neurons + GRANULE_ROWS, GRANULE_ROWS)]
    found = (curve.mean(lo, hi) for lo, hi in pairwise(edges) if hi > lo)
    return tuple(sorted(found, reverse=True))  # which they are, but for rounding


def hottest(layers: Sequence[Sequence[float]], share: float) -> float:
    """The share of all granules, the hottest, that makes `share` of the activations."""
    ordered = sorted((f for layer in layers for f in layer), reverse=True)
    sums = list(accumulate(ordered))
    return bisect_right(sums, share * sums[-1]) / len(ordered)


def published(spec: ModelSpec) -> Profile | None:
    """By PowerInfer's figures; None where it has none for the model's activation, or layers differ in it."""
    ffns = {(ffn.activation, ffn.gated) for layer in spec.layers for ffn in layer.ffns}
    if len(ffns) != 1:
        return None
    activation, gated = ffns.pop()
    if activation not in _RELU:
        return None
    active, hots = _PLAIN_ACTIVE, _PLAIN_HOT
    if gated:
        active, hots = _GATED_ACTIVE[min(_GATED_ACTIVE, key=lambda d: abs(d - spec.d_model))], _GATED_HOT
    return synthetic(spec, active, *hots, "as PowerInfer publishes of such models, not measured")


def predictor_rank(d_model: int, active: float) -> int:
    """Hidden neurons of a layer's predictor, at a mean activity of the layer."""
    (x0, y0), (x1, y1) = _RANKS
    share = y0 + (active - x0) * (y1 - y0) / (x1 - x0)
    return max(1, round(share * d_model / _RANK_STEP)) * _RANK_STEP
