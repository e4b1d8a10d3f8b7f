"""Answers for routers in simulated passes, out of a trace that was recorded from a text or that a rule states.

A simulated pass asks its routers as a real pass does, and gets the next tokens of the trace. So the hits and misses of
a plan's caches are counted, not guessed.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from penstock.graph.arenas import neurons_of
from penstock.graph.lower import Lowering
from penstock.graph.ops import Fire, Predict, Route
from penstock.graph.tasks import Call, Pass
from penstock.planner.activity import published
from penstock.spec.answers import RouterAnswers
from penstock.spec.model import ModelSpec, Routed
from penstock.spec.parts import GRANULE_ROWS
from penstock.spec.plan import Plan
from penstock.spec.predictors import Predictors
from penstock.spec.profile import Profile

# In a stated trace, the r-th most popular expert of a layer is drawn with a weight of r to this power.
SKEW = -0.5
# A stated trace has 160 tokens, which is more than a prediction asks for, and 8 different layers, after which the
# layers repeat. Models with many experts have fewer different layers, so that at most 2^19 numbers are drawn.
_TOKENS, _LAYERS, _DRAWS = 160, 8, 1 << 19
# Rates are brought to a given mean in at most so many steps, and to within this distance of it. One step is not enough,
# since rates that would exceed 1 are cut to 1.
_SCALINGS, _CLOSE = 16, 1e-3
# Of a granule with a neuron of a higher rate each neuron is drawn by itself: that takes less time than to skip those
# that do not fire (OPT-6.7B, neurons in no order: 0.54 of it).
_OFTEN = 0.1
_TOKENS_DRAWN = 16  # for so many different tokens it is drawn which neurons fire

Token = tuple[int, ...]  # the experts that a token goes to, ascending


@dataclass(frozen=True)
class RouterTrace:
    """The answers of routers, and how often neurons fire.

    layers   for each layer, the experts of each token, in the order of the tokens; empty for a dense layer
    source   where the trace is from
    guesses  for each layer, its router's answers to the input of the FFN one layer before, for the same tokens, the
             likeliest expert first; empty if they were not recorded
    fires    for each layer, float32 [neurons]: the share of tokens in which a neuron fires, in the packed model's
             order; empty if that is not known
    live     for each layer and token, uint32 [neurons that fire]: their places in the packed model, in rising order;
             empty if no run recorded them
    """

    layers: tuple[tuple[Token, ...], ...]
    source: str
    guesses: tuple[tuple[Token, ...], ...] = ()
    fires: tuple[bytes, ...] = ()
    live: tuple[tuple[bytes, ...], ...] = ()

    def of_layers(self, layers: Sequence[int]) -> RouterTrace:
        """The trace of these layers alone."""
        guesses = tuple(self.guesses[i] for i in layers) if self.guesses else ()
        fires = tuple(self.fires[i] for i in layers) if self.fires else ()
        live = tuple(self.live[i] for i in layers) if self.live else ()
        of_these = tuple(self.layers[i] for i in layers)
        return replace(self, layers=of_these, guesses=guesses, fires=fires, live=live)


def replayed(answers: RouterAnswers, where: str) -> RouterTrace:
    """The trace of a run's answers."""
    return RouterTrace(answers.layers, f"as recorded in {where}", answers.guesses)


def recorded(profile: Profile, spec: ModelSpec) -> RouterTrace:
    """The trace that a model's profile has."""
    tokens = {each.layer: each.trace for each in profile.layers}
    guesses = {each.layer: each.guesses for each in profile.layers}
    layers = range(len(spec.layers))
    return RouterTrace(
        tuple(tokens.get(i, ()) for i in layers), profile.source, tuple(guesses.get(i, ()) for i in layers)
    )  # fmt: skip


def firing(profile: Profile, orders: Mapping[int, Sequence[int]]) -> RouterTrace:
    """The rates at which neurons fire, by a model's profile. `orders`: the orders of the layers' neurons in the packed
    model (`spec.order`). A layer without one has the checkpoint's order."""
    fires = []
    for each in profile.neurons:
        counts = each.counted()
        places = orders.get(each.layer, range(len(counts)))
        fires.append(array("f", (counts[n] / profile.tokens for n in places)).tobytes())
    return RouterTrace(((),) * len(fires), profile.source, fires=tuple(fires))


def called(spec: ModelSpec, predictors: Predictors, known: RouterTrace | None) -> RouterTrace:
    """The rates at which a model's predictors call neurons active. The rates of a layer add up to the number of neurons
    that its predictor is known to call active. `known`: the rates at which neurons fire, by a profile. With it, the
    rates are in the ratios of these; without it, all rates of a layer are equal."""
    fires = []
    for i, each in enumerate(predictors.layers):
        count, share = neurons_of(spec.layers[each.layer]), each.active[0]
        rates = memoryview(known.fires[i]).cast("f") if known is not None else array("f", [share]) * count
        fires.append(_scaled(rates, share).tobytes())
    source = predictors.source if known is None else known.source
    return RouterTrace(((),) * len(fires), source, fires=tuple(fires))


@lru_cache(maxsize=8)
def stated_firing(spec: ModelSpec) -> RouterTrace | None:
    """The rates at which PowerInfer's figures say that neurons of such models fire, of neurons in no order. None if it
    publishes nothing of such models."""
    known = published(spec)
    if known is None:
        return None
    orders = dict[int, list[int]]()
    fires = []
    for layer, granules in zip(spec.layers, known.layers, strict=True):
        neurons = layer.ffns[0].neurons
        if neurons not in orders:
            order = random.Random(neurons).sample(range(neurons), neurons)
            orders[neurons] = [i // GRANULE_ROWS for i in order]  # of the published curve a granule is a point
        # Millions of neurons are looked up.
        fires.append(array("f", map(granules.__getitem__, orders[neurons])).tobytes())
    return RouterTrace(((),) * len(fires), known.source, fires=tuple(fires))


def _scaled(rates: Sequence[float], share: float) -> array[float]:
    """Rates of at most 1 whose mean is `share`, in the ratios of `rates` as far as these do not exceed 1."""
    factor, wanted = 1.0, share * len(rates)
    for _ in range(_SCALINGS):
        total = sum(min(1.0, rate * factor) for rate in rates)
        if total == 0 or abs(total - wanted) <= _CLOSE * wanted:
            break
        factor *= wanted / total
    return array("f", (min(1.0, rate * factor) for rate in rates))


class Replay:
    """Answers in place of a plan's routers, out of a trace. It also says which neurons fire, or which neurons
    predictors call active: as recorded, or drawn by the trace's rates. After its last token the trace begins again.
    `trace`: None means `stated`."""

    def __init__(self, plan: Plan, trace: RouterTrace | None = None) -> None:
        spec = plan.target.spec
        self._plan = plan
        self._fires = trace.fires if trace is not None else ()
        self._live = trace.live if trace is not None else ()
        self._tokens: Counter[tuple[int, int]] = Counter()  # (who asks, batch) → rows that were drawn
        trace = (trace or stated(spec)) if spec.is_routed else RouterTrace((), "")
        self._layers, self._guesses = trace.layers, trace.guesses
        self._at = [0] * len(self._layers)

    def answer(self, call: Call) -> Sequence[Sequence[int]]:
        """The experts of each row of a router's call. A guess is about the tokens about which the layer will be asked
        next."""
        route = call.operands
        if isinstance(route, Fire):
            return self._drawn(call, route.layer, call.unit, *self._plan.unit_rows(self._plan.units[call.unit]))
        if isinstance(route, Predict):
            neurons = neurons_of(self._plan.target.spec.layers[route.layer])
            return self._drawn(call, route.layer, ~route.layer, 0, neurons)
        assert isinstance(route, Route) and call.batch is not None
        if route.guesses:
            return self._guess(route.layer, call.batch.total_rows)
        return self._next(route.layer, call.batch.total_rows)

    def _drawn(self, call: Call, layer: int, asker: int, lo: int, hi: int) -> list[Sequence[int]]:
        """For each row, the neurons among lo..hi of a layer that fire, or are active: those of the next recorded
        tokens. Where none are recorded, rows are drawn independently of each other, and after _TOKENS_DRAWN rows the
        same ones come again. If no rates are known, all neurons fire."""
        batch = call.batch
        assert batch is not None
        if self._live:
            known, first = self._live[layer], self._tokens[asker, 0]
            self._tokens[asker, 0] += batch.total_rows
            rows = [array("I", known[(first + i) % len(known)]) for i in range(batch.total_rows)]
            return [row[bisect_left(row, lo) : bisect_left(row, hi)] for row in rows]
        if not self._fires:
            return [range(lo, hi)] * batch.total_rows
        first = self._tokens[asker, batch.id]
        self._tokens[asker, batch.id] += batch.total_rows
        rates = self._fires[layer]
        drawn = (_live(rates, (first + 7 * batch.id + i) % _TOKENS_DRAWN) for i in range(batch.total_rows))
        return [row[bisect_left(row, lo) : bisect_left(row, hi)] for row in drawn]

    def warm(self, lowering: Lowering, p: Pass, passes: int) -> None:
        """Fills the caches as if `passes` passes like `p` had come before, and the slots for records as if many passes
        had."""
        for u in lowering.layout.recent:
            unit = self._plan.units[u]
            lo, hi = self._plan.unit_rows(unit)
            layer = self._plan.parts[unit.part].layer
            known = memoryview(self._fires[layer]).cast("f") if self._fires else array("f", [1.0]) * hi
            lowering.warm_records(u, known[lo:hi])
        rows = p.total_rows
        for layer in dict.fromkeys(cache.layer for cache in self._plan.caches):
            for _ in range(passes):
                lowering.warm(layer, [expert for row in self._next(layer, rows) for expert in row])

    def _guess(self, layer: int, rows: int) -> list[Token]:
        known = self._guesses[layer] if self._guesses else ()
        tokens = [(self._at[layer] + i) % len(self._layers[layer]) for i in range(rows)]
        return [known[i] if i < len(known) else () for i in tokens]

    def _next(self, layer: int, rows: int) -> list[Token]:
        tokens = self._layers[layer]
        first = self._at[layer]
        self._at[layer] = (first + rows) % len(tokens)
        return [tokens[(first + i) % len(tokens)] for i in range(rows)]


@lru_cache(maxsize=1024)
def _live(packed: bytes, seed: int) -> array[int]:
    """The places of the neurons that fire for one token, in rising order. Each fires at its rate, independently of the
    others."""
    draw, live, rates = random.Random(seed), array("I"), memoryview(packed).cast("f")
    random_of = draw.random
    for begin in range(0, len(rates), GRANULE_ROWS):
        some = rates[begin : begin + GRANULE_ROWS]
        most, i = max(some), -1
        if most > _OFTEN:
            live.extend([begin + at for at, rate in enumerate(some) if random_of() < rate])
            continue
        # Neurons are drawn as if all had the highest rate. Then each drawn neuron stays by its own rate.
        while most > 0:
            i += 1 + int(math.log(1 - random_of()) / math.log(1 - most))
            if i >= len(some):
                break
            if random_of() * most < some[i]:
                live.append(begin + i)
    return live


def stated(spec: ModelSpec) -> RouterTrace:
    """A trace for a model of which no trace was recorded. Each token draws its experts independently of the others, and
    popular experts more often (SKEW)."""
    most = max((layer.routed.experts for layer in spec.layers if layer.routed is not None), default=1)
    unlike = max(1, min(_LAYERS, _DRAWS // (_TOKENS * most)))
    return RouterTrace(
        tuple(_drawn(i % unlike, each.routed) if each.routed is not None else () for i, each in enumerate(spec.layers)),
        f"assumed: each token draws its experts for itself, the r-th most wanted one by r^{SKEW:g}",
    )


@lru_cache(maxsize=256)
def _drawn(layer: int, routed: Routed) -> tuple[Token, ...]:
    """The tokens of a stated trace in one layer. `layer` seeds the draws. Experts are drawn with weights and without
    replacement, by the largest log(u) / weight (Efraimidis and Spirakis 2006)."""
    draw = random.Random(layer)
    order = draw.sample(range(routed.experts), routed.experts)
    steepness = [(rank + 1) ** -SKEW for rank in range(routed.experts)]
    tokens = []
    for _ in range(_TOKENS):
        keys = [math.log(1 - draw.random()) * each for each in steepness]
        best = heapq.nlargest(routed.active, range(routed.experts), key=keys.__getitem__)
        tokens.append(tuple(sorted(order[rank] for rank in best)))
    return tuple(tokens)
