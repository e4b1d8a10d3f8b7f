"""Refuses an ask for which no solver has a plan: the error names the least memory with which one has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.planner.firing import Firing
from penstock.planner.solve.ours import ram
from penstock.planner.solve.problem import Problem, too_little
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.model import ModelSpec
from penstock.spec.places import CPU, DISK, GPU, HOST
from penstock.spec.plan import Plan
from penstock.units import MIB, format_mib_up


def refuse(problem: Problem) -> None:
    """Raises DoesNotFit, for an ask of which no plan was found. The error names device memory where the ask wants a
    device, or limits its memory, and that is too little for any plan; otherwise RAM."""
    ask, device_need = problem.ask, _least_device_bytes(problem)
    if device_need > problem.device_bytes and (ask.use_device or ask.device_memory_bytes is not None):
        hint = f"--device-memory {format_mib_up(device_need)}, or --device none"
        raise too_little("device memory", "", GPU.executor, device_need, problem.device_bytes, hint)
    if ask.use_device and problem.has_device:
        need = min(_beside_device(problem))
        hint = f"--host-memory {format_mib_up(need)}, or --device none"
        raise too_little("host memory", " beside a device", HOST, need, problem.host_bytes, hint)
    _refuse_host(problem, problem.host_bytes)


def require_minimum(
    ask: Ask, spec: ModelSpec, weights: Format, process_bytes: int, limit: int, firing: Firing | None = None
) -> None:
    """Raises DoesNotFit if not even the smallest plan without a device fits into `limit` bytes. It needs no machine's
    figures, so it can be asked before a probe. `process_bytes`: RAM that the process takes beside its arenas. `firing`:
    how many neurons are known to fire, and the predictors' sizes."""
    machine = replace(_NOT_PROBED, process_bytes=process_bytes)
    problem = Problem(ask, spec, weights, machine, firing=firing)
    if ram.minimum_bytes(problem) > limit:
        _refuse_host(problem, limit)


_NOT_PROBED = MachineSpec(
    "not probed",
    (Capacity(HOST, 1), Capacity(DISK.tier, 1)),
    tuple(Rate(lane, "*", "*", 1.0, 0.0) for lane in (CPU, DISK.reads)),
    1,
)


def limits_too_much(problem: Problem) -> bool:
    """Whether the user limits device memory to less than any plan with the device takes."""
    asked = problem.ask.device_memory_bytes
    return asked is not None and _least_device_bytes(problem) > asked


def _refuse_host(problem: Problem, limit: int) -> None:
    """Raises DoesNotFit if no plan takes as little RAM as `limit` bytes, and says what a shorter context would save."""
    minimum, ask = _least_host_bytes(problem), problem.ask
    if minimum <= limit:
        return
    half = problem.asking(context=max(ask.sequence_tokens, (ask.context or 1) // 4))
    shorter = _least_host_bytes(half)
    hint = f"; with --context {half.ask.context} too, {format_mib_up(shorter)}" if shorter < minimum - 8 * MIB else ""
    raise too_little("host memory", "", HOST, minimum, limit, f"--host-memory {format_mib_up(minimum)}{hint}")


def _least_host_bytes(problem: Problem) -> int:
    """The bytes of RAM that the smallest plan takes, with a device or without."""
    beside = _beside_device(problem) if problem.has_device else (p.tier_bytes()[HOST] for p in _in_blocks(problem))
    return min((ram.minimum_bytes(problem), *beside))


def _beside_device(problem: Problem) -> Iterator[int]:
    """The bytes of RAM that the smallest plans beside a device take which its memory has room for. With KV in memory
    GLM-4.5-Air takes 1.35 GB of RAM beside a device of 48 GB, and 1.83 without. With weights on the device a plan of
    ours took 2 % less."""
    from penstock.planner.solve.ours import device

    if device.minimum_bytes(problem) <= problem.device_bytes:
        yield device.least_host_bytes(problem)
    yield from (plan.tier_bytes()[HOST] for plan in _in_blocks(problem) if problem.fits(plan, GPU.executor))


def _least_device_bytes(problem: Problem) -> int:
    """The bytes of device memory that the smallest plan with the device takes; 0 without one."""
    if not problem.has_device:
        return 0
    from penstock.planner.solve.ours import device

    return min((device.minimum_bytes(problem), *(plan.tier_bytes()[GPU.executor] for plan in _in_blocks(problem))))


def _in_blocks(problem: Problem) -> Iterator[Plan]:
    """FlexGen's plans of least memory, where blocks are wanted."""
    if problem.wants_blocks:
        from penstock.planner.solve.flexgen.least import least

        yield from (plan for _, plan in least(problem))
