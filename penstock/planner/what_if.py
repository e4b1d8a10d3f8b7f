"""What another machine or another format would give: one more GiB of RAM, a faster disk, int4 instead of bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import ModuleType

from penstock.errors import DoesNotFit
from penstock.planner.predict import Prediction
from penstock.planner.shorten import quick, streamed
from penstock.planner.solve import Solved, device, layers, pipo, residency, settle_context, slicing_plan
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.limits import device_limit_bytes, host_limit_bytes
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.plan import DEVICE, Plan
from penstock.units import GIB, MIB

DISK_LANES, LINK_LANES = ("disk",), ("h2d", "d2h")
_LOOKED_AT = 2  # candidates: the best come first, and each takes some 40 ms to plan
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


def what_if(solved: Solved, ask: Ask, machine: MachineSpec) -> WhatIf:
    """All of it, for a plan that `solve` made of this ask on this machine. Compared are plans of the same strategy;
    with a faster disk or link, this very plan."""
    plan = solved.plan
    model, ask = plan.target, settle_context(ask, plan.target.spec)
    ring_bytes = sum(plan.ring_bytes.values())
    like = solved.strategy if DEVICE in plan.tier_bytes() or plan.batches_per_pass > 1 else None
    compared = (model.spec, model.weights)
    formats = tuple(other_formats(ask, *compared, machine, ring_bytes, like))
    disk, link = (with_faster(solved, ask, machine, lanes) for lanes in (DISK_LANES, LINK_LANES))
    if like is None:
        more = more_memory(ask, *compared, machine, ring_bytes=ring_bytes) if ring_bytes else None
        return WhatIf(more, None, formats, disk, link)
    more = more_device = None
    if any(streamed(plan, from_disk=True).values()):
        limit = host_limit_bytes(ask, machine) + GIB
        more = _one(replace(ask, host_memory_bytes=limit), *compared, machine, ring_bytes, like)
    if like != device.WHOLE:
        limit = device_limit_bytes(ask, machine) + GIB
        tiers = tuple(replace(tier, bytes=limit) if tier.name == DEVICE else tier for tier in machine.tiers)
        roomy, ask = replace(machine, tiers=tiers), replace(ask, device_memory_bytes=limit)
        # PIPO with all weights elsewhere has no use for it; with a part of them there it has.
        more_like = like + pipo.PARTIAL if like in pipo.NAMES.values() else like
        more_device = _one(ask, *compared, roomy, ring_bytes, more_like)
    return WhatIf(more, more_device, formats, disk, link)


def with_faster(
    solved: Solved, ask: Ask, machine: MachineSpec, lanes: tuple[str, ...], times: float = 2
) -> Prediction | None:
    """The same plan where these lanes (the beginnings of their names) move bytes so many times as fast; None where it
    does not use them. What a task costs beside its bytes stays, and so does what lanes take from each other."""
    if not any(lane.startswith(lanes) for lane in solved.prediction.lane_share):
        return None
    rates = tuple(
        replace(rate, s_per_byte=rate.s_per_byte / times) if rate.lane.startswith(lanes) else rate
        for rate in machine.rates
    )
    return quick(solved.plan, settle_context(ask, solved.plan.target.spec), replace(machine, rates=rates), spread=False)


def more_memory(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, extra_bytes: int = GIB, ring_bytes: int = 0
) -> Prediction | None:
    """With `extra_bytes` more of host memory, no device; None where without them everything stays in memory already.

    `ring_bytes`: of the plan to compare with; so the two differ in nothing but what stays.
    """
    ask = settle_context(ask, spec)
    if not ring_bytes and all_stays(ask, spec, weights, machine):
        return None
    limit = host_limit_bytes(ask, machine)
    return _one(replace(ask, host_memory_bytes=limit + extra_bytes), spec, weights, machine, ring_bytes)


def other_formats(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, ring_bytes: int = 0, like: str | None = None
) -> list[tuple[Format, Prediction]]:
    """int4, int8 and the checkpoint's own format, without the one in use and those that do not fit. `like`: the
    strategy to compare with, where it has a device."""
    ask = settle_context(ask, spec)
    wanted = dict.fromkeys((parse_format("int4"), parse_format("int8"), Format(spec.dtype)))
    found = []
    for fmt in wanted:
        if fmt.kind != weights.kind:
            prediction = _one(ask, spec, fmt, machine, ring_bytes, like)
            if prediction is not None:
                found.append((fmt, prediction))
    return found


def all_stays(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> bool:
    """Whether the solver keeps everything in RAM, without a device."""
    plan = next(residency.candidates(ask, spec, weights, machine)).plan
    return not plan.ring_bytes and all(home.home == plan.main for home in plan.kv)


def _one(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, ring_bytes: int, like: str | None = None
) -> Prediction | None:
    """What one plan gives, or None where nothing fits: of the strategy `like`, or without a device the one whose ring
    is nearest to `ring_bytes`. One simulation, not one for every candidate."""
    try:
        if like is not None:
            solvers = _solvers(like)
            plan = _alike(chain.from_iterable(each.candidates(ask, spec, weights, machine) for each in solvers), like)
        else:
            ring = ring_bytes or _USUAL_RING_BYTES
            plan = next(residency.candidates(ask, spec, weights, machine, ring)).plan
    except DoesNotFit:
        return None
    return None if plan is None else quick(plan, ask, machine, spread=False)


def _solvers(strategy: str) -> tuple[ModuleType, ...]:
    """Whose candidates a plan beside a device is compared with; none for blocks of many batches, whose search takes
    seconds each time."""
    if strategy.startswith(tuple(pipo.NAMES.values())):
        return (pipo,)
    if strategy == slicing_plan.NAME:
        return (slicing_plan, device)
    if strategy == layers.NAME:
        return (layers, device)
    return (device,) if strategy.startswith(device.WHOLE) else ()


def _alike(candidates: Iterable[Candidate], strategy: str) -> Plan | None:
    """The plan of the same strategy, or the one that leaves nothing to choose; else the first, the most promising."""
    first = None
    for candidate in islice(candidates, _LOOKED_AT):
        if candidate.strategy in (strategy, device.WHOLE):
            return candidate.plan
        first = first or candidate
    return None if first is None else first.plan
