"""What another machine or another format would give: one more GiB of RAM, int4 instead of bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.errors import DoesNotFit
from penstock.planner.predict import Prediction
from penstock.planner.shorten import quick
from penstock.planner.solve import Solved, residency, settle_context
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.units import GIB, MIB

_USUAL_RING_BYTES = 64 * MIB  # among equals the solver takes the plan that reads least, so a small ring


@dataclass(frozen=True)
class WhatIf:
    """`one_more_gib`: of RAM; None where everything stays in memory already. `other_formats`: those that fit."""

    one_more_gib: Prediction | None = None
    other_formats: tuple[tuple[Format, Prediction], ...] = ()


def what_if(solved: Solved, ask: Ask, machine: MachineSpec) -> WhatIf:
    """Both, for a plan that `solve` made of this ask on this machine."""
    model = solved.plan.target
    ring_bytes = sum(solved.plan.ring_bytes.values())
    more = more_memory(ask, model.spec, model.weights, machine, ring_bytes=ring_bytes) if ring_bytes else None
    return WhatIf(more, tuple(other_formats(ask, model.spec, model.weights, machine, ring_bytes)))


def more_memory(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, extra_bytes: int = GIB, ring_bytes: int = 0
) -> Prediction | None:
    """With `extra_bytes` more of host memory; None where without them everything stays in memory already.

    `ring_bytes`: of the plan to compare with; so the two differ in nothing but what stays.
    """
    ask = settle_context(ask, spec)
    if not ring_bytes and all_stays(ask, spec, weights, machine):
        return None
    limit = machine.tier("host").bytes if ask.host_memory_bytes is None else ask.host_memory_bytes
    return _one(replace(ask, host_memory_bytes=limit + extra_bytes), spec, weights, machine, ring_bytes)


def other_formats(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, ring_bytes: int = 0
) -> list[tuple[Format, Prediction]]:
    """int4, int8 and the checkpoint's own format, without the one in use and those that do not fit."""
    ask = settle_context(ask, spec)
    wanted = dict.fromkeys((parse_format("int4"), parse_format("int8"), Format(spec.dtype)))
    found = []
    for fmt in wanted:
        if fmt.kind != weights.kind:
            prediction = _one(ask, spec, fmt, machine, ring_bytes)
            if prediction is not None:
                found.append((fmt, prediction))
    return found


def all_stays(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> bool:
    """Whether the solver keeps everything in memory."""
    plan = next(residency.candidates(ask, spec, weights, machine)).plan
    return not plan.ring_bytes and all(home.home == plan.main for home in plan.kv)


def _one(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, ring_bytes: int) -> Prediction | None:
    """What the solver's plan gives whose ring is nearest to `ring_bytes` (one simulation, not one for every ring), or
    None where nothing fits."""
    wanted, nearest = ring_bytes or _USUAL_RING_BYTES, None
    try:
        for _, plan, _ in residency.candidates(ask, spec, weights, machine):  # small rings first
            ring = sum(plan.ring_bytes.values())
            if nearest is None or abs(ring - wanted) <= abs(sum(nearest.ring_bytes.values()) - wanted):
                nearest = plan
            if ring >= wanted:
                break
    except DoesNotFit:
        return None
    return None if nearest is None else quick(nearest, ask, machine)
