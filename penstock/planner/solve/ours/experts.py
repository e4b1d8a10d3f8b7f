"""Plans beside a device for models with experts: the device has what every token needs, the CPU most experts.

A token goes to few of a layer's experts, and lifting one over the link takes longer than reading it in RAM. So the CPU
computes routers and experts where they lie: in RAM, or streamed from the disk, or in caches for some of each layer's.
Device memory is filled as for other models (`ours/device`): the head, attention with its KV, then shared experts and
dense FFNs. Where these do not fit, the link lifts the rest for each token, or the CPU computes it: both are simulated.
What is left of device memory holds routers and all experts of the first so many layers, or caches for experts of every
layer that are at home in RAM. If RAM has no room for them all, they are at home on the disk, and RAM has caches of its
own beneath those of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.graph import ops
from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.candidate import WHOLE, Candidate
from penstock.planner.homes import reads_weights
from penstock.planner.reasons import layers_there
from penstock.planner.shares import share_slots
from penstock.planner.sizes import CHUNK_ROWS, chunk_options
from penstock.planner.solve.ours import device, filling
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import Skeleton, device_skeleton, smallest
from penstock.spec.parts import Part
from penstock.spec.places import CPU, GPU, HOST
from penstock.spec.plan import Cache, Plan

_EXPERTS = ", experts with the CPU"
NAME = WHOLE + _EXPERTS
_MOST_POWER = 12  # of 2: rows of a pass that asks are fewer
# Who computes shared experts and dense FFNs that are not on the device, as words of a plan's name.
_LINK, _CPU = "", ", shared experts and dense FFNs too"


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Plans that fit into both memories; none if not even the smallest one does."""
    sizes = [
        device_skeleton(problem, rows, problem.layers, lifted=1.0, prompts=False) for rows in chunk_options(problem.ask)
    ]
    for skeleton in [*sizes, replace(smallest(problem), prompts=False)]:
        any_fits = False
        for mode in device.modes(skeleton):
            for candidate in (*_of_mode(mode, experts_there=False), *_of_mode(mode, experts_there=True)):
                # Longer chunks save reading from the disk.
                if skeleton.chunk_rows <= CHUNK_ROWS or reads_weights(candidate.plan):
                    yield candidate
                    any_fits = True
        if any_fits and skeleton.chunk_rows <= CHUNK_ROWS:
            return


def _of_mode(skeleton: Skeleton, experts_there: bool) -> Iterator[Candidate]:
    """The candidates of one mode. All weights outside the device are in RAM, if they fit. Else there is a plan in which
    a part of them streams, and one in which experts have caches. `experts_there`: plans with all experts of some layers
    on the device."""
    problem = skeleton.problem
    for who, lifted in {_LINK: skeleton.lifted, _CPU: (0.0,) * problem.layers}.items():
        whole = replace(skeleton, lifted=lifted)
        plans = {"": filling.filled(whole, filling.in_ram, experts_there)}
        if plans[""] is None or reads_weights(plans[""]):
            plans = {", streamed": plans[""], ", in caches": filling.filled(whole, filling.caching, experts_there)}
        fitting = {where: plan for where, plan in plans.items() if plan is not None}
        for where, plan in fitting.items():
            if bool(layers_there(plan)) == experts_there:
                yield _candidate(plan, where, who, whole)
        if not any(map(_ffn_elsewhere, fitting.values())):
            break
    cached = _cached_there(skeleton) if experts_there else None
    if cached is not None:
        where = " and in RAM" if reads_weights(cached) else ""
        yield _candidate(cached, f", in caches on the device{where}", _LINK, skeleton)


def _cached_there(skeleton: Skeleton) -> Plan | None:
    """The plan with a cache for experts on the device, in the room that all other weights leave there. Every expert is
    in RAM, or RAM has caches over the disk. None if that does not fit, or if the device's cache would hold all
    experts."""
    problem = skeleton.problem
    experts = problem.of_kind("experts")
    if problem.may_stay is not None:
        return None
    rows = [_lifted_rows(problem, part) for part in experts]
    on_device = filling.computed_there(skeleton, experts=False)

    def caches(slots: Sequence[int]) -> tuple[Cache, ...]:
        each = zip(experts, slots, rows, strict=True)
        return tuple(Cache(part.layer, GPU.executor, n, filling.POLICY, lifted) for part, n, lifted in each)

    def plan(slots: Sequence[int]) -> Plan:
        return skeleton.plan(on_device, None, caches(slots))

    budget = problem.spare_bytes(plan([1] * len(experts)), GPU.executor)
    if budget is None:
        return None
    slots = share_slots(experts, budget - 2 * ARENA_ALIGN)
    if min(slots) == max(part.experts for part in experts):
        return None
    whole = plan(slots)
    if problem.fits(whole, HOST):
        return whole if problem.fits(whole) else None
    return filling.caching(skeleton, on_device, caches(slots))


def _lifted_rows(problem: Problem, part: Part) -> int:
    """The fewest rows for which lifting an expert and computing it on the device takes no longer than the CPU takes."""
    cost, fmt = problem.cost, part.kinds(ops.FFN_BLOCKS)
    lift_s = cost.call_s(GPU.to_device, "lift", fmt, nbytes=part.least_bytes)
    for rows in (1 << power for power in range(_MOST_POWER)):
        nbytes, flops = ops.matrix_cost(part, 0, part.expert_granules, ops.FFN_BLOCKS, rows)
        there_s, cpu_s = (cost.call_s(lane, "experts", fmt, rows, nbytes, flops) for lane in (GPU.kernels, CPU))
        if lift_s + there_s <= cpu_s:
            return rows
    return 1 << _MOST_POWER


def _ffn_elsewhere(plan: Plan) -> bool:
    """Whether some shared expert or dense FFN is not at home on the device."""
    parts = plan.parts
    return any(unit.home != GPU.executor and parts[unit.part].kind in ("ffn", "shared") for unit in plan.units)


def _candidate(plan: Plan, where: str, who: str, skeleton: Skeleton) -> Candidate:
    """The candidate of a filled skeleton. `where`: words of its name about where the CPU's experts are. `who`: words
    about who computes shared experts and dense FFNs outside device memory."""
    layers = ", those of some layers on the device" if layers_there(plan) else ""
    return device.candidate(plan, f"{_EXPERTS}{where}{layers}{who}", skeleton)
