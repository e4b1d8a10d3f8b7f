"""What routers are taken to say where none has run: a trace, recorded from a text or stated by a rule.

A simulated pass asks as a real one does, and gets the next tokens of the trace. So hits and misses of a plan's caches
are counted, not guessed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.graph.lower import Lowering
from penstock.graph.tasks import Call, Pass
from penstock.spec.answers import Answers
from penstock.spec.model import ModelSpec, Routed
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile

# Where nobody has counted, the r-th most wanted expert of a layer is drawn as often as r to this power says.
SKEW = -0.5
# Of a stated trace: tokens, more than a prediction asks for; layers, after which they come again: fewer where there are
# so many experts that drawing takes long.
_TOKENS, _LAYERS, _DRAWS = 160, 8, 1 << 19

Token = tuple[int, ...]  # the experts that it goes to, upwards


@dataclass(frozen=True)
class Trace:
    """By layer (dense ones have none) the tokens that came one after the other. `source`: where it is from."""

    layers: tuple[tuple[Token, ...], ...]
    source: str


def replayed(answers: Answers, where: str) -> Trace:
    """The trace of a run's answers."""
    return Trace(answers.layers, f"as recorded in {where}")


def recorded(profile: Profile, spec: ModelSpec) -> Trace:
    """The trace that a profile kept."""
    tokens = {each.layer: each.trace for each in profile.layers}
    return Trace(tuple(tokens.get(i, ()) for i in range(len(spec.layers))), profile.source)


class Replay:
    """Answers for routers of a plan out of a trace, round and round."""

    def __init__(self, plan: Plan, trace: Trace | None = None) -> None:
        spec = plan.target.spec
        self._plan = plan
        self._layers = (trace or stated(spec)).layers if spec.is_routed else ()
        self._at = [0] * len(self._layers)

    def answer(self, call: Call) -> Sequence[Token]:
        """The experts of each row of a router's call."""
        layer = getattr(call.operands, "layer", None)
        assert isinstance(layer, int) and call.batch is not None
        return self._next(layer, call.batch.total_rows)

    def warm(self, lowering: Lowering, p: Pass, passes: int) -> None:
        """As if so many passes like this one had come before."""
        rows = sum(batch.total_rows for batch in p.batches)
        for cache in self._plan.caches:
            for _ in range(passes):
                lowering.warm(cache.layer, [expert for row in self._next(cache.layer, rows) for expert in row])

    def _next(self, layer: int, rows: int) -> list[Token]:
        tokens = self._layers[layer]
        first = self._at[layer]
        self._at[layer] = (first + rows) % len(tokens)
        return [tokens[(first + i) % len(tokens)] for i in range(rows)]


def stated(spec: ModelSpec) -> Trace:
    """Tokens drawn one by one, each for itself, the more wanted experts more often (SKEW)."""
    most = max((layer.routed.experts for layer in spec.layers if layer.routed is not None), default=1)
    unlike = max(1, min(_LAYERS, _DRAWS // (_TOKENS * most)))
    return Trace(
        tuple(_drawn(i % unlike, each.routed) if each.routed is not None else () for i, each in enumerate(spec.layers)),
        f"assumed: each token draws its experts for itself, the r-th most wanted one by r^{SKEW:g}",
    )


@lru_cache(maxsize=256)
def _drawn(layer: int, routed: Routed) -> tuple[Token, ...]:
    """Weighted draws without replacement: the largest of log(u) / weight (Efraimidis and Spirakis 2006)."""
    draw = random.Random(layer)
    order = draw.sample(range(routed.experts), routed.experts)
    steepness = [(rank + 1) ** -SKEW for rank in range(routed.experts)]
    found = []
    for _ in range(_TOKENS):
        keys = [math.log(1 - draw.random()) * each for each in steepness]
        best = heapq.nlargest(routed.active, range(routed.experts), key=keys.__getitem__)
        found.append(tuple(sorted(order[rank] for rank in best)))
    return tuple(found)
