"""Plans as other systems would make them, whatever this machine's figures say: rivals of the plan that is chosen.

Each decides as little as its system does. What stays on the device is filled as for all plans (`ours/filling`), so that
families differ in who computes the rest alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice

from penstock.planner.candidate import Candidate
from penstock.planner.homes import all_there
from penstock.planner.sizes import usual_chunks
from penstock.planner.solve import llama_cpp
from penstock.planner.solve.ours import experts
from penstock.planner.solve.ours.filling import filled
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import device_skeleton
from penstock.spec.plan import Plan


def plan_of(family: str, problem: Problem) -> Plan | None:
    """The plan of a family for this problem. None where it has none: no device, a model with experts or without, too
    little memory, or nothing left outside the device to decide on. `family`: one of FAMILIES."""
    if not problem.has_device:
        return None
    return FAMILIES[family](problem)


def _lifted(share: float, problem: Problem) -> Plan | None:
    """Of each FFN's granules outside device memory the link lifts a fixed share, and the CPU computes the others.
    Attention is the device's."""
    if problem.spec.is_routed:
        return None
    for chunk_rows in usual_chunks(problem.ask):
        plan = filled(device_skeleton(problem, chunk_rows, problem.layers, lifted=share))
        if plan is not None:
            return None if all_there(plan) else plan
    return None


def _by_layers(problem: Problem) -> Plan | None:
    """Whole layers on the device, and the others on the CPU."""
    plan = None if problem.spec.is_routed else llama_cpp.plan_of(problem)
    return None if plan is None or all_there(plan) else plan


def _experts_with_cpu(problem: Problem) -> Plan | None:
    """What every token needs on the device; experts in RAM, where the CPU computes them (Fiddler)."""
    candidates: list[Candidate] = list(islice(experts.candidates(problem), 1)) if problem.spec.is_routed else []
    return next((each.plan for each in candidates if not each.plan.caches), None)


FAMILIES: Mapping[str, Callable[[Problem], Plan | None]] = {
    "layer-split": _by_layers,
    "all-cg": partial(_lifted, 1.0),
    "r-cg-0.25": partial(_lifted, 0.25),
    "r-cg-0.5": partial(_lifted, 0.5),
    "r-cg-0.75": partial(_lifted, 0.75),
    "experts-cpu": _experts_with_cpu,
}
