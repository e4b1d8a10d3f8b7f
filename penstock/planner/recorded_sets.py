"""What the neurons that a run recorded (`spec.live_sets`) say of a model: how often each fires, how many fire together,
and which do for each token."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.errors import BadRequest
from penstock.planner.firing import Firing, expected, foretold_of
from penstock.planner.routing import RouterTrace
from penstock.spec.answers import RouterAnswers
from penstock.spec.live_sets import numbers, shares_together
from penstock.spec.model import ModelSpec
from penstock.spec.profile import FIRED_TOGETHER

_TOKENS = 256  # so many of a record are taken, which is more than a prediction asks for
# So many neurons of them in all layers, which take 1.8 s, or 3.1 s in another order, and 32 MiB; at least one token.
_NEURONS = 1 << 23


def require_kind(answers: RouterAnswers, sparsity: str, where: str) -> None:
    """Raises BadRequest where a plan of this sparsity (as asked) goes by other neurons than those that were
    recorded."""
    if answers.live and answers.foretold != (sparsity == "predict"):
        has, wants = "which neurons fired", "which neurons predictors call active (`run --sparsity predict --record`)"
        if answers.foretold:
            has, wants = "which neurons predictors called active", "which neurons fire: record a run without predictors"
        raise BadRequest(f"{where} says {has}; this plan goes by {wants}")


def trace_of(answers: RouterAnswers, orders: Mapping[int, Sequence[int]], where: str) -> RouterTrace:
    """The trace of recorded neurons. `orders`: the orders of the layers' neurons in the packed model (`spec.order`); a
    layer without one has the checkpoint's order. `where`: names the record."""
    fires, live = [], []
    rows_of = [each.rows()[:_TOKENS] for each in answers.live]
    tokens = _taken(rows_of)
    for each, rows in zip(answers.live, (rows[:tokens] for rows in rows_of), strict=True):
        order = orders.get(each.layer)
        places = None if order is None else sorted(range(each.neurons), key=order.__getitem__)
        rates, sets = array("f", bytes(4 * each.neurons)), []
        for row in rows:
            of_row = numbers(row) if places is None else array("I", sorted(places[n] for n in numbers(row)))
            for place in of_row:
                rates[place] += 1 / len(rows)
            sets.append(of_row.tobytes())
        fires.append(array("f", (min(1.0, rate) for rate in rates)).tobytes())
        live.append(tuple(sets))
    return RouterTrace(answers.layers, f"as recorded in {where}", fires=tuple(fires), live=tuple(live))


def _taken(rows_of: Sequence[Sequence[bytes]]) -> int:
    """How many tokens of a record are taken, the same of each layer. `rows_of`: of each layer, the bits of each
    token."""
    left = _NEURONS
    for token, of_token in enumerate(zip(*rows_of, strict=True)):
        left -= sum(int.from_bytes(row, "little").bit_count() for row in of_token)
        if left < 0:
            return max(token, 1)
    return _TOKENS


def firing_of(answers: RouterAnswers, spec: ModelSpec, known: Firing | None, where: str) -> Firing:
    """How many neurons count, by recorded ones. `known`: what is known otherwise, as of predictors."""
    total = sum(each.neurons for each in answers.live)
    each = [
        [share * layer.neurons for share in shares_together(layer.rows()[:_TOKENS], layer.neurons, FIRED_TOGETHER)]
        for layer in answers.live
    ]
    shares, source = tuple(sum(column) / total for column in zip(*each, strict=True)), f"as recorded in {where}"
    if not answers.foretold:
        return Firing(shares, source)
    told = foretold_of(spec, known)
    assert told is not None, "a run had predictors"
    return replace(known or expected(spec), foretold=replace(told, shares=shares, source=source))
