"""How often neurons are active in models that nobody has measured: curves through PowerInfer's published figures.

A layer's neurons are sorted by how often they are active. The neuron at rank u (0 the hottest, 1 the coldest) is active
in a share f(u) of the tokens. Two figures fix the curve f: `active`, the share of neurons that a token needs (1 less
the sparsity of Table 3), and `hot`, the share of neurons that makes 80 % of all activations (Figure 4). The curve is a
power law, cut off at 1:

    f(u) = min(1, (edge / u) ** steepness)
    the integral of f over 0..1   is active
    the integral of f over 0..hot is 0.8 · active

Layers differ: of the whole model, a smaller share makes the 80 % than of one layer. So the layers' means are taken to
form a geometric series that rises with depth. In the paper too, the first 24 of OPT-30B's 48 layers have less than 1 %
active.

Only models with a ReLU are known to be sparse, so others have no figures here. Figures are published for some sizes of
model. Other sizes take those of the nearest. Of OPT-30B, section 8.2 says 20 % and Table 3 says 3 %: the table is
taken.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import exp, log

from penstock.spec.model import ModelSpec
from penstock.spec.parts import GRANULE_ROWS, Part
from penstock.spec.plan import Plan, Unit

HOT_SHARE = 0.8  # hot neurons make this share of all activations
_RELU = ("relu", "relu2")

# Shares of active neurons: 1 - sparsity of Table 3. OPT's sparsity is 96 % to 98 % over all sizes; the middle is taken.
# Models with a gate differ by d_model: 4096 is 7B, 5120 is 13B, 8192 is 70B.
_PLAIN_ACTIVE = 0.03
_GATED_ACTIVE = {4096: 0.30, 5120: 0.22, 8192: 0.18}
# Figure 4: the share of neurons that makes 80 % of the activations, (of one FFN, of the whole model). The first pair is
# of OPT-30B, the second of LLaMA2(ReGLU)-70B.
_PLAIN_HOT, _GATED_HOT = (0.26, 0.17), (0.43, 0.26)
# (share of active neurons, hidden neurons of a predictor / d_model), from the predictors' sizes in Table 6. The first
# pair is the mean of OPT-13B (0.168) and OPT-66B (0.119), the second is LLaMA(ReGLU)-70B. Other layers are on the line
# through these points: in Figure 9 too, predictors grow with the layer's activity.
_RANKS = ((0.03, 0.1435), (0.18, 0.234))
_RANK_STEP = 16

_LEAST_ACTIVE = 1e-6
_MOST_STEEP = 8.0  # with a steeper curve hardly any neuron would be active in some tokens and inactive in others
_STEPS = 26  # of a bisection, which is then exact to some 1e-5
# The bisection over the layers' spread takes 10 steps, each with at most 16 layers. The published figures have two
# digits, so more would be no better.
_SLOPE_STEPS, _SLOPE_LAYERS = 10, 16


@dataclass(frozen=True, slots=True)
class Curve:
    """f(u) = min(1, (edge / u) ** steepness), for ranks u in 0..1."""

    edge: float
    steepness: float

    def total(self, u: float) -> float:
        """The integral of f from 0 to u."""
        if u <= self.edge:
            return u
        a = 1 - self.steepness
        return self.edge + self.edge * (log(u / self.edge) if abs(a) < 1e-9 else ((u / self.edge) ** a - 1) / a)

    def mean(self, lo: float, hi: float) -> float:
        return min(1.0, max(0.0, (self.total(hi) - self.total(lo)) / (hi - lo)))


@dataclass(frozen=True, slots=True)
class NeuronProfile:
    """How often the neurons of a model are active. `layers`: for each layer and granule, the share of decoded tokens in
    which a neuron of the granule is active, the hottest granule first. Granules are those of the FFN part, whose
    neurons are sorted by activity. `source`: who says so."""

    layers: tuple[tuple[float, ...], ...]
    source: str

    @property
    def mean(self) -> float:
        """The share of all neurons that a token needs."""
        return sum(sum(layer) for layer in self.layers) / sum(len(layer) for layer in self.layers)

    def active(self, layer: int, lo: int, hi: int, batch: int) -> float:
        """The share of the neurons in granules lo..hi that a batch of tokens needs. Tokens are taken to be independent:
        a neuron is needed with probability 1 - (1 - f)^batch."""
        return sum(1 - (1 - f) ** batch for f in self.layers[layer][lo:hi]) / (hi - lo)

    def shuffled(self) -> NeuronProfile:
        """The same neurons in no order."""
        draw = random.Random(0)
        return replace(self, layers=tuple(tuple(draw.sample(layer, len(layer))) for layer in self.layers))


def fit(active: float, hot: float) -> Curve:
    """The curve of mean `active` whose hottest neurons, a share `hot`, make HOT_SHARE of it. If no curve does both, the
    mean is kept: for too small a `hot` the curve is a plateau of 1, for too large a `hot` it is flat."""
    active = min(1.0, max(_LEAST_ACTIVE, active))
    if active >= 1:
        return Curve(1.0, 0.0)

    def too_flat(steepness: float) -> bool:
        return of_mean(active, steepness).total(min(1.0, hot)) / active < HOT_SHARE

    return of_mean(active, _bisected(0.0, _MOST_STEEP, _STEPS, too_flat)[1])


def of_mean(active: float, steepness: float) -> Curve:
    """The curve of this mean and steepness, by a bisection over the logarithm of the edge. The edge is less than the
    mean, because f is 1 up to the edge. exp(-690) is nearly the smallest float."""
    _, edge = _bisected(-690.0, log(active), _STEPS, lambda at: Curve(exp(at), steepness).total(1.0) < active)
    return Curve(exp(edge), steepness)


def _bisected(lo: float, hi: float, steps: int, is_below: Callable[[float], bool]) -> tuple[float, float]:
    """(lo, hi) after `steps` halvings, in which `is_below` held at every new lo and at no new hi."""
    for _ in range(steps):
        middle = (lo + hi) / 2
        lo, hi = (middle, hi) if is_below(middle) else (lo, middle)
    return lo, hi


def synthetic(spec: ModelSpec, active: float, hot: float, hot_of_all: float, source: str) -> NeuronProfile:
    """A profile with a mean share of `active`. A share `hot` of a layer's neurons makes HOT_SHARE of its activations,
    and a share `hot_of_all` of the model's neurons makes HOT_SHARE of all. If equal layers need less than `hot_of_all`,
    they stay equal."""
    neurons = tuple(layer.ffns[0].neurons for layer in spec.layers)
    return NeuronProfile(_spread(neurons, active, hot, hot_of_all), source)


@lru_cache(maxsize=64)
def _spread(neurons: tuple[int, ...], active: float, hot: float, hot_of_all: float) -> tuple[tuple[float, ...], ...]:
    """The layers of a profile. Their means rise from layer to layer, as steeply as `hot_of_all` demands."""
    some = neurons[:: -(-len(neurons) // _SLOPE_LAYERS)]

    def too_flat(slope: float) -> bool:
        return hottest(_layers(some, active, hot, slope), HOT_SHARE) > hot_of_all

    return _layers(neurons, active, hot, _bisected(0.0, 8.0, _SLOPE_STEPS, too_flat)[0])


def _layers(neurons: Sequence[int], active: float, hot: float, slope: float) -> tuple[tuple[float, ...], ...]:
    count = len(neurons)
    weights = [exp(slope * (i + 0.5) / count) for i in range(count)]

    def too_few(per: float) -> bool:  # no layer's mean is more than 1
        return sum(min(1.0, per * weight) for weight in weights) < active * count

    _, per = _bisected(0.0, count / min(weights), 2 * _STEPS, too_few)
    return tuple(_granules(n, fit(per * weight, hot)) for n, weight in zip(neurons, weights, strict=True))


def _granules(neurons: int, curve: Curve) -> tuple[float, ...]:
    edges = [min(neurons, row) / neurons for row in range(0, neurons + GRANULE_ROWS, GRANULE_ROWS)]
    means = (curve.mean(lo, hi) for lo, hi in pairwise(edges) if hi > lo)
    return tuple(sorted(means, reverse=True))  # they are sorted already, but for rounding


def hottest(layers: Sequence[Sequence[float]], share: float) -> float:
    """How large a share of all granules makes `share` of the activations, if they are the hottest."""
    ordered = sorted((f for layer in layers for f in layer), reverse=True)
    sums = list(accumulate(ordered))
    return bisect_right(sums, share * sums[-1]) / len(ordered)


def published(spec: ModelSpec) -> NeuronProfile | None:
    """The profile of a model by PowerInfer's figures. None if these have nothing about the model's activation function,
    or if its layers have different ones."""
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
    """Hidden neurons of the predictor of a layer, a share `active` of whose neurons a token needs on average."""
    (x0, y0), (x1, y1) = _RANKS
    share = y0 + (active - x0) * (y1 - y0) / (x1 - x0)
    return max(1, round(share * d_model / _RANK_STEP)) * _RANK_STEP


def measured(ffns: Sequence[Part], fires: Sequence[bytes], source: str) -> NeuronProfile:
    """The profile of a model whose neurons' rates are known. `ffns`: its parts; `fires`: of each layer float32 [N], the
    rate of each neuron in packed order."""

    def shares(part: Part) -> tuple[float, ...]:
        rates = memoryview(fires[part.layer]).cast("f")
        each = (rates[i : i + part.granule_rows] for i in range(0, len(rates), part.granule_rows))
        return tuple(sum(some) / len(some) for some in each)

    return NeuronProfile(tuple(map(shares, ffns)), source)


def with_activity(plan: Plan, profile: NeuronProfile) -> Plan:
    """The plan with the share of each unit's neurons that decoding a batch needs (`Unit.active`). Nothing moves."""
    layer_of = {key: part.layer for key, part in plan.parts.items() if part.kind == "ffn"}

    def with_share(unit: Unit) -> Unit:
        if unit.part not in layer_of:
            return unit
        return replace(unit, active=profile.active(layer_of[unit.part], unit.lo, unit.hi, plan.batch_seqs))

    return replace(plan, units=tuple(map(with_share, plan.units)))
