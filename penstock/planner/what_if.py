"""Predicts what another machine or another number format would give: one more GiB of RAM, a faster disk, int4 instead
of bfloat16.

Solvers for a device are imported only if there is one. Importing them takes longer than everything else here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import ModuleType

from penstock.errors import DoesNotFit
from penstock.graph.records import may_be_asked
from penstock.planner.bound import least_score_s, score_s
from penstock.planner.candidate import WHOLE, Candidate
from penstock.planner.few_layers import best_of_few, few_layers
from penstock.planner.firing import Firing, expected, foretold_of
from penstock.planner.predict import Prediction
from penstock.planner.routing import RouterTrace, stated_firing
from penstock.planner.shorten import quick, streamed
from penstock.planner.solve import Solved, settle_context
from penstock.planner.solve.ours import ram
from penstock.planner.solve.ours.asking import may_ask
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.places import GPU, Lane, is_disk, is_link
from penstock.spec.plan import Plan
from penstock.units import GIB

_AS_PUBLISHED = "if as few neurons fire as PowerInfer publishes of such models"
_LOOKED_AT = 2  # so many candidates of a solver are planned. The best come first, and each takes some 40 ms
_MOST_LOOKED_AT = 4  # the same for a model with experts, whose homes make more kinds of plans


@dataclass(frozen=True)
class WhatIf:
    """Predictions with one thing changed.

    one_more_gib, one_more_device_gib  with one more GiB of RAM, or of device memory; None if it would hold nothing more
    other_formats   (number format, prediction) of the other formats that fit
    faster_disk, faster_link  with the disk or the link twice as fast, both ways; None if the plan does not use it
    commands        (command, on what condition, prediction) of what commands of ours would make known of neurons on
                    the disk. The condition is empty where nothing is taken for granted
    """

    one_more_gib: Prediction | None = None
    one_more_device_gib: Prediction | None = None
    other_formats: tuple[tuple[Format, Prediction], ...] = ()
    faster_disk: Prediction | None = None
    faster_link: Prediction | None = None
    commands: tuple[tuple[str, str, Prediction], ...] = ()


def what_if(
    solved: Solved, ask: Ask, machine: MachineSpec, trace: RouterTrace | None = None, firing: Firing | None = None
) -> WhatIf:
    """What other machines and formats would give, beside a plan that `solve` made of this ask on this machine.

    With more memory or in another format, a new plan of the same strategy is predicted. With a faster disk or link, the
    given plan itself is predicted. `trace`: the answers of routers; None: `routing.stated`. `firing`: how many neurons
    fire; None: `firing.expected`."""
    plan = solved.plan
    spec = plan.target.spec
    problem = Problem(settle_context(ask, spec), spec, plan.target.weights, machine, trace, firing)
    ring_bytes = sum(plan.ring_bytes.values())
    like = solved.strategy if GPU.executor in plan.tier_bytes() or plan.batches_per_pass > 1 else None
    formats = tuple(other_formats(problem, ring_bytes, like))
    disk, link = (with_faster(solved, problem.ask, machine, which, trace) for which in (is_disk, is_link))
    if like is None:
        more = more_memory(problem, ring_bytes=ring_bytes) if ring_bytes else None
        return WhatIf(_no_slower(more, solved), None, formats, disk, link, tuple(with_more_known(solved, problem)))
    from penstock.planner.solve import pipo

    more = more_device = None
    if plan.caches or any(streamed(plan, from_disk=True).values()):
        more = _one(problem.asking(host_memory_bytes=problem.host_bytes + GIB), ring_bytes, like)
    if like != WHOLE:
        limit = problem.device_bytes + GIB
        tiers = tuple(replace(tier, bytes=limit) if tier.name == GPU.executor else tier for tier in machine.tiers)
        roomy = replace(problem.asking(device_memory_bytes=limit), machine=replace(machine, tiers=tiers))
        # PIPO with all weights outside device memory has no use for more of it. With a part of them there it has.
        more_like = like + pipo.PARTIAL if like in pipo.NAMES.values() else like
        more_device = _one(roomy, ring_bytes, more_like)
    return WhatIf(_no_slower(more, solved), _no_slower(more_device, solved), formats, disk, link)


def _no_slower(more: Prediction | None, solved: Solved) -> Prediction | None:
    """What more memory gives: the prediction of the plan that was tried, or of the given plan, which fits there too.
    Of all plans one alone is tried, and it may be a bad one: 32 sequences in blocks that stream were told 0.6 of their
    speed with one more GiB of RAM."""
    slower = more is not None and more.decode_tokens_per_s < solved.prediction.decode_tokens_per_s
    return solved.prediction if slower else more


def with_faster(
    solved: Solved, ask: Ask, machine: MachineSpec, which: Callable[[Lane], bool], trace: RouterTrace | None
) -> Prediction | None:
    """The prediction of the plan if some lanes move bytes twice as fast. None if the plan uses none of them.
    `which`: whether a lane is faster. The fixed costs of tasks stay the same, and so do the factors of lanes that slow
    each other."""
    if not any(map(which, solved.prediction.lane_share)):
        return None
    return quick(solved.plan, ask, machine.faster(which, 2), spread=False, trace=trace, kept=solved.tasks)


def with_more_known(solved: Solved, problem: Problem) -> Iterator[tuple[str, str, Prediction]]:
    """What commands of ours would make known of neurons on the disk, on what condition, and the prediction of the plan
    that it would allow: a profile, so that the disk is asked for the neurons that fire; predictors that hear the layer
    before theirs, so that the disk need not wait for them."""
    on_disk = any(is_disk(unit.home) and unit.part.endswith(".ffn") for unit in solved.plan.units)
    if not on_disk or not all(may_be_asked(part, problem.sparsity) for part in problem.of_kind("ffn")):
        return
    known = problem.trace if problem.trace is not None and any(problem.trace.fires) else None
    trace, firing, alike = known or stated_firing(problem.spec), problem.firing, "" if known else _AS_PUBLISHED
    if trace is None:
        return
    if problem.sparsity == "exact" and known is None:
        what = "penstock profile MODEL FILE"
    elif problem.sparsity == "predict" and not any(each.ahead for each in problem.predictors):
        what = "penstock train-predictors MODEL --text FILE --ahead"
        foretold = foretold_of(problem.spec, firing)
        assert foretold is not None, "check_sparsity has seen it"
        later = tuple(replace(each, ahead=1) for each in foretold.predictors)
        firing = replace(firing or expected(problem.spec), foretold=replace(foretold, predictors=later))
    else:
        return
    knowing = replace(problem, trace=trace, firing=firing or expected(problem.spec))
    if not may_ask(knowing):  # as where the ask limits what stays
        return
    try:
        prediction = _best_that_asks(knowing, solved.plan)
    except DoesNotFit:  # what would be known takes memory
        return
    if prediction is not None:
        yield what, alike, prediction


def _best_that_asks(problem: Problem, like: Plan) -> Prediction | None:
    """The prediction of the plan with the least bound that asks a disk for neurons, None if no plan does. `like`: the
    plan of the same model to compare with, whose ring it has. A model of many layers is planned as one of few. Raises
    DoesNotFit."""
    ring_bytes = sum(like.ring_bytes.values()) or ram.USUAL_RING_BYTES

    def asking(problem: Problem) -> list[Plan]:
        every = (each.plan for each in ram.candidates(problem, ring_bytes))
        return [plan for plan in every if any(unit.asked for unit in plan.units)]

    few = few_layers(problem, len(like.units))
    if few is not None:
        return best_of_few(problem, few, ring_bytes, asking)
    plans = asking(problem)
    best = min(plans, key=lambda plan: least_score_s(plan, problem.ask, problem.cost), default=None)
    return None if best is None else quick(best, problem.ask, problem.machine, False, problem.trace)


def more_memory(problem: Problem, ring_bytes: int = 0) -> Prediction | None:
    """The prediction without a device and with one GiB more RAM. None if everything stays in memory without it.

    `ring_bytes`: the ring of the plan to compare with. The new plan's ring is the nearest to it, so that the two plans
    differ in nothing but the weights that stay."""
    if not ring_bytes and all_stays(problem):
        return None
    return _one(problem.asking(host_memory_bytes=problem.host_bytes + GIB), ring_bytes)


def other_formats(problem: Problem, ring_bytes: int = 0, like: str | None = None) -> list[tuple[Format, Prediction]]:
    """(format, prediction) in int4, in int8 and in the checkpoint's own format, without the format in use and without
    formats that do not fit. If neurons lie one by one, also in tiles, with all neurons computed: that may be faster for
    many rows. Empty for a file that was quantised by others, whose numbers stay. `ring_bytes`: the ring of the plan to
    compare with; `like`: its strategy, if it has a device."""
    if problem.weights.from_file:
        return []
    wanted = dict.fromkeys((parse_format("int4"), parse_format("int8"), Format(problem.spec.dtype)))
    predictions = {
        fmt: _one(replace(problem, weights=fmt), ring_bytes, like) for fmt in wanted if fmt.kind != problem.weights.kind
    }
    if problem.weights.neurons:
        tiles = replace(problem.asking(sparsity="off"), weights=problem.weights.in_tiles)
        predictions = {problem.weights.in_tiles: _one(tiles, ring_bytes, like), **predictions}
    return [(fmt, prediction) for fmt, prediction in predictions.items() if prediction is not None]


def all_stays(problem: Problem) -> bool:
    """Whether everything stays in RAM without a device: all weights and all KV."""
    plan = next(ram.candidates(problem)).plan
    return not plan.ring_bytes and all(home.home == plan.main for home in plan.kv)


def _one(problem: Problem, ring_bytes: int, like: str | None = None) -> Prediction | None:
    """The prediction of one plan, or None if no plan fits. It is the plan of the strategy `like`. If that is None, it
    is the plan without a device whose ring is nearest to `ring_bytes`. Only this plan is simulated, not every
    candidate."""
    try:
        if like is not None:
            every = chain.from_iterable(solver.candidates(problem) for solver in _solvers(like, problem))
            alike = _alike((each for each in every if not problem.moves_chosen_values(each.plan)), like)
            plans = [] if alike is None else [alike]
        else:
            without = ram.candidates(problem, ring_bytes or ram.USUAL_RING_BYTES)
            # A model with experts has a plan in which they stream, and one in which they have caches.
            plans = [candidate.plan for candidate in islice(without, 2 if problem.spec.is_routed else 1)]
    except DoesNotFit:
        return None
    best, best_s = None, float("inf")
    bounded = sorted((least_score_s(plan, problem.ask, problem.cost), i) for i, plan in enumerate(plans))
    for least_s, i in bounded:
        if least_s < best_s:
            prediction = quick(plans[i], problem.ask, problem.machine, False, problem.trace)
            seconds = score_s(prediction, plans[i], problem.ask)
            best, best_s = (prediction, seconds) if seconds < best_s else (best, best_s)
    return best


def _solvers(strategy: str, problem: Problem) -> tuple[ModuleType, ...]:
    """The solvers whose candidates a plan of this strategy, which uses a device, is compared with. There are none for
    FlexGen's blocks of many batches, whose search takes seconds each time."""
    from penstock.planner.solve import llama_cpp, pipo, scheinfer
    from penstock.planner.solve.ours import device, experts

    if problem.spec.is_routed:
        return (experts,)
    if strategy.startswith(tuple(pipo.NAMES.values())):
        return (pipo,)
    if strategy == scheinfer.NAME:
        return (scheinfer, device)
    if strategy == llama_cpp.NAME:
        return (llama_cpp, device)
    return (device,) if strategy.startswith(WHOLE) else ()


def _alike(candidates: Iterable[Candidate], strategy: str) -> Plan | None:
    """The plan of the same strategy, or the plan with all weights in device memory. If neither is among the first
    candidates, the very first one is taken, which is the most promising. None if there are no candidates."""
    from penstock.planner.solve import llama_cpp, scheinfer
    from penstock.planner.solve.ours import experts

    first = None
    # These two solvers have one candidate each, which comes first. The next one is another solver's.
    alone = strategy in (scheinfer.NAME, llama_cpp.NAME)
    looked_at = _MOST_LOOKED_AT if strategy.startswith(experts.NAME) else _LOOKED_AT
    for candidate in islice(candidates, 1 if alone else looked_at):
        if candidate.strategy in (strategy, WHOLE):
            return candidate.plan
        first = first or candidate
    return None if first is None else first.plan
