"""What another machine or another format would give: one more GiB of RAM, a faster disk, int4 instead of bfloat16.

Solvers for a device are imported where there is one: without, to wait for them would take longer than to use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import ModuleType

from penstock.errors import DoesNotFit
from penstock.planner.predict import Prediction
from penstock.planner.routing import Trace
from penstock.planner.shorten import quick, streamed
from penstock.planner.solve import Solved, settle_context
from penstock.planner.solve.bound import least_score_s, score_s
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.ours import ram
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.places import GPU, Lane, is_disk, is_link
from penstock.spec.plan import Plan
from penstock.units import GIB, MIB

_LOOKED_AT = 2  # candidates: the best come first, and each takes some 40 ms to plan
_MOST_LOOKED_AT = 4  # of models with experts, whose homes make more kinds of plans
_USUAL_RING_BYTES = 64 * MIB  # among equals the solver takes the plan that reads least, so a small ring


@dataclass(frozen=True)
class WhatIf:
    """`one_more_gib`: of RAM, `one_more_device_gib`: of device memory; None where it would hold nothing more.
    `other_formats`: those that fit. `faster_disk`, `faster_link`: twice as fast, both ways; None where the plan has no
    use for it."""

    one_more_gib: Prediction | None = None
    one_more_device_gib: Prediction | None = None
    other_formats: tuple[tuple[Format, Prediction], ...] = ()
    faster_disk: Prediction | None = None
    faster_link: Prediction | None = None


def what_if(solved: Solved, ask: Ask, machine: MachineSpec, trace: Trace | None = None) -> WhatIf:
    """All of it, for a plan that `solve` made of this ask on this machine, and of what routers say. Compared are plans
    of the same strategy; with a faster disk or link, this very plan."""
    plan = solved.plan
    problem = Problem(settle_context(ask, plan.target.spec), plan.target.spec, plan.target.weights, machine, trace)
    ring_bytes = sum(plan.ring_bytes.values())
    like = solved.strategy if GPU.executor in plan.tier_bytes() or plan.batches_per_pass > 1 else None
    formats = tuple(other_formats(problem, ring_bytes, like))
    disk, link = (with_faster(solved, problem.ask, machine, which, trace=trace) for which in (is_disk, is_link))
    if like is None:
        more = more_memory(problem, ring_bytes=ring_bytes) if ring_bytes else None
        return WhatIf(more, None, formats, disk, link)
    from penstock.planner.solve import pipo
    from penstock.planner.solve.ours import device

    more = more_device = None
    if plan.caches or any(streamed(plan, from_disk=True).values()):
        more = _one(problem.asking(host_memory_bytes=problem.host_bytes + GIB), ring_bytes, like)
    if like != device.WHOLE:
        limit = problem.device_bytes + GIB
        tiers = tuple(replace(tier, bytes=limit) if tier.name == GPU.executor else tier for tier in machine.tiers)
        roomy = replace(problem.asking(device_memory_bytes=limit), machine=replace(machine, tiers=tiers))
        # PIPO with all weights elsewhere has no use for it; with a part of them there it has.
        more_like = like + pipo.PARTIAL if like in pipo.NAMES.values() else like
        more_device = _one(roomy, ring_bytes, more_like)
    return WhatIf(more, more_device, formats, disk, link)


def with_faster(
    solved: Solved, ask: Ask, machine: MachineSpec, which: Callable[[Lane], bool], times: float = 2,
    trace: Trace | None = None,
) -> Prediction | None:  # fmt: skip
    """The same plan where `which` lanes move bytes so many times as fast; None where it uses none of them. What a task
    costs beside its bytes stays, and so does what lanes take from each other."""
    if not any(map(which, solved.prediction.lane_share)):
        return None
    return quick(solved.plan, ask, machine.faster(which, times), spread=False, trace=trace)


def more_memory(problem: Problem, extra_bytes: int = GIB, ring_bytes: int = 0) -> Prediction | None:
    """With `extra_bytes` more of host memory, no device; None where without them everything stays in memory already.

    `ring_bytes`: of the plan to compare with; so the two differ in nothing but what stays.
    """
    if not ring_bytes and all_stays(problem):
        return None
    return _one(problem.asking(host_memory_bytes=problem.host_bytes + extra_bytes), ring_bytes)


def other_formats(problem: Problem, ring_bytes: int = 0, like: str | None = None) -> list[tuple[Format, Prediction]]:
    """int4, int8 and the checkpoint's own format, without the one in use and those that do not fit. `like`: the
    strategy to compare with, where it has a device."""
    wanted = dict.fromkeys((parse_format("int4"), parse_format("int8"), Format(problem.spec.dtype)))
    predictions = {
        fmt: _one(replace(problem, weights=fmt), ring_bytes, like) for fmt in wanted if fmt.kind != problem.weights.kind
    }
    return [(fmt, prediction) for fmt, prediction in predictions.items() if prediction is not None]


def all_stays(problem: Problem) -> bool:
    """Whether the solver keeps everything in RAM, without a device."""
    plan = next(ram.candidates(problem)).plan
    return not plan.ring_bytes and all(home.home == plan.main for home in plan.kv)


def _one(problem: Problem, ring_bytes: int, like: str | None = None) -> Prediction | None:
    """What one plan gives, or None where nothing fits: of the strategy `like`, or without a device the one whose ring
    is nearest to `ring_bytes`. One simulation, not one for every candidate."""
    try:
        if like is not None:
            alike = _alike(chain.from_iterable(solver.candidates(problem) for solver in _solvers(like, problem)), like)
            plans = [] if alike is None else [alike]
        else:
            every = ram.candidates(problem, ring_bytes or _USUAL_RING_BYTES)
            # Experts may stream, or have caches.
            plans = [candidate.plan for candidate in islice(every, 2 if problem.spec.is_routed else 1)]
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
    """Whose candidates a plan beside a device is compared with; none for blocks of many batches, whose search takes
    seconds each time."""
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
    return (device,) if strategy.startswith(device.WHOLE) else ()


def _alike(candidates: Iterable[Candidate], strategy: str) -> Plan | None:
    """The plan of the same strategy, or the one that leaves nothing to choose; else the first, the most promising."""
    from penstock.planner.solve import llama_cpp, scheinfer
    from penstock.planner.solve.ours import device, experts

    first = None
    alone = strategy in (scheinfer.NAME, llama_cpp.NAME)  # the first, or none of those that follow is alike
    looked_at = _MOST_LOOKED_AT if strategy.startswith(experts.NAME) else _LOOKED_AT
    for candidate in islice(candidates, 1 if alone else looked_at):
        if candidate.strategy in (strategy, device.WHOLE):
            return candidate.plan
        first = first or candidate
    return None if first is None else first.plan
