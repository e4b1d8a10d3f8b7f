"""Plans and predicts a model of many layers as a model of a few of them, where one prediction is wanted quickly and the
plan itself is not. Even to make one plan of OPT-175B takes a fifth of a second, and its units are tens of thousands.

The few layers get as much RAM as they would have beside the others. What does not grow with layers has its room first:
the embedding, the ring, buffers. Seconds and bytes are then a line through the plan of the few and the plan of half of
them, as those of short plans are (`shorten`). The layers that both differ by are as the whole model's are in the mean:
as many of their neurons fire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import DoesNotFit
from penstock.graph.arenas import Layout, with_arenas
from penstock.planner.bound import least_score_s
from penstock.planner.predict import Prediction, predict
from penstock.planner.shorten import further_on, shortened
from penstock.planner.solve.problem import Problem
from penstock.spec.format import Mixed
from penstock.spec.places import HOST
from penstock.spec.plan import Plan

_ATTEMPTS = 5  # to give the few layers their share of the memory
_MORE = 1.08  # a share that no plan fits into was too small a guess by so much: buffers take room too
_FEW, _FEWEST = 8, 4  # layers of the few: of a model whose layers have so many units or more, the latter
_MANY_UNITS = 24
_SEEN = 16  # one neuron of so many tells a layer's mean rate, hot ones in front or not
_CLOSE = 0.005  # means of rates, and memory, this close to those of all layers are as good as these


def few_layers(problem: Problem, units: int) -> tuple[list[int], list[int]] | None:
    """(half of the few layers that stand for a model, the other half), each ascending. `units`: of a plan of all
    layers. None where layers differ, or are few themselves."""
    count, trace = problem.layers, problem.trace
    half = (_FEW if units < _MANY_UNITS * count else _FEWEST) // 2
    alike = all(layer == problem.spec.layers[0] for layer in problem.spec.layers)
    if not alike or isinstance(problem.weights, Mixed) or count < 4 * half:
        return None
    rates = [1.0] * count
    if trace is not None and trace.fires:
        rates = [sum(memoryview(each).cast("f")[::_SEEN]) for each in trace.fires]
    added = _like_all(rates, half, ())
    return sorted(_like_all(rates, half, added)), sorted(added)


def _like_all(rates: Sequence[float], wanted: int, but: Sequence[int]) -> list[int]:
    """So many evenly spread layers whose mean rate comes near to that of all. `but`: none of these layers."""
    mean = sum(rates) / len(rates)
    best, best_error = list[int](), float("inf")
    for step in range((len(rates) - 1) // max(1, wanted - 1), 0, -1):  # the most spread ones first
        for start in range(len(rates) - step * (wanted - 1)):
            chosen = range(start, start + step * wanted, step)
            error = abs(sum(rates[i] for i in chosen) / wanted - mean)
            if error < best_error and not any(i in chosen for i in but):
                best, best_error = list(chosen), error
        if best_error <= _CLOSE * mean:
            break
    return best


def of_layers(problem: Problem, layers: Sequence[int]) -> Problem:
    """The problem of a model with these layers alone, with as much memory. `layers`: ascending."""
    number = {layer: i for i, layer in enumerate(layers)}
    firing = problem.firing
    if firing is not None and firing.foretold is not None:
        predictors = tuple(
            replace(each, layer=number[each.layer]) for each in firing.foretold.predictors if each.layer in number
        )
        firing = replace(firing, foretold=replace(firing.foretold, predictors=predictors))
    trace = None if problem.trace is None else problem.trace.of_layers(layers)
    spec = replace(problem.spec, layers=tuple(problem.spec.layers[i] for i in layers))
    return replace(problem, spec=spec, trace=trace, firing=firing)


def _filled_bytes(plan: Plan) -> int:
    """What a plan takes of RAM, but for the unfilled ends of arenas: a line through these would tell many times a huge
    page."""
    layout = Layout(plan)
    return plan.process_bytes + sum(layout.filled_bytes(each.name) for each in layout.arenas() if each.tier == HOST)


def best_of_few(
    problem: Problem, few: tuple[list[int], list[int]], ring_bytes: int,
    candidates: Callable[[Problem], Sequence[Plan]],
) -> Prediction | None:  # fmt: skip
    """The prediction of the plan with the least bound, as its plan of few layers tells it; None if there is no plan.

    few             as `few_layers` names them
    ring_bytes      about what rings take
    candidates      the plans of a problem, which may raise DoesNotFit
    """
    layers, count, ask = sorted(few[0] + few[1]), problem.layers, problem.ask
    short, near = of_layers(problem, layers), [i for i, layer in enumerate(layers) if layer in few[0]]
    fixed = sum(part.nbytes for part in short.parts.values() if part.layer < 0)
    fixed += problem.machine.process_bytes + ring_bytes
    limit = fixed + max(0, problem.host_bytes - fixed) * len(layers) // count
    share = (count - len(near)) / (len(layers) - len(near))
    found: tuple[float, Plan, Plan, int] | None = None  # (bytes beyond the memory, the plan, of half of it, its limit)
    for _ in range(_ATTEMPTS):
        try:
            plans = candidates(short.asking(host_memory_bytes=limit))
        except DoesNotFit:
            plans = ()
        if not plans:  # some page more or less, and a kind of plan does not fit
            limit = round(_MORE * limit) if found is None else (limit + found[3]) // 2
            continue
        best = min(plans, key=lambda plan: least_score_s(plan, ask, problem.cost))
        half = with_arenas(shortened(best, near))
        used, of_half = _filled_bytes(best), _filled_bytes(half)
        over = of_half + share * (used - of_half) - problem.host_bytes
        if found is None or abs(over) < abs(found[0]):
            found = over, best, half, limit
        if abs(over) <= _CLOSE * problem.host_bytes:
            break
        limit -= round(over * len(layers) / count)  # so much of what is not as it was taken to be falls to the few
    if found is None or found[0] > 2 * _CLOSE * problem.host_bytes:
        return None
    _, best, half, _ = found
    trace = short.trace
    far_told = predict(best, ask, problem.machine, False, trace)
    near_told = predict(half, ask, problem.machine, False, trace and trace.of_layers(near))
    return further_on(near_told, [(share, far_told)], None, ask)
