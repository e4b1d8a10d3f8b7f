"""Completes a plan with the disks that its units lie on, and with how they are read: the block size, the number of
blocks in flight and the engine that the machine's probe measured as fastest (PIPO appendix A)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.spec.machine import MachineSpec, Reads, experts_in_flight
from penstock.spec.places import DISK, Tier, is_disk
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_rate


def on_disks(plan: Plan, disks: Mapping[str, Tier]) -> Plan:
    """The plan with each unit that is at home on a disk moved to the disk of its part. `disks`: part key → disk. Parts
    that are not in `disks` stay on disk0."""
    units = (replace(unit, home=disks.get(unit.part, unit.home)) if is_disk(unit.home) else unit for unit in plan.units)
    return replace(plan, units=tuple(units)) if set(disks.values()) - {DISK.tier} else plan


def with_reads(plan: Plan, machine: MachineSpec) -> tuple[Plan, str]:
    """(the plan with its reads set, the reason). Reads are chosen for the largest unit that the plan loads."""
    largest = max((plan.unit_bytes(unit) for unit in plan.units if is_disk(unit.home)), default=0)
    best = machine.reads_of(DISK.reads, largest or 2**62)  # a plan that streams nothing loads large units
    together = 0
    if plan.caches:
        largest_expert = max(plan.parts[f"{cache.layer}.experts"].least_bytes for cache in plan.caches)
        together = experts_in_flight(largest_expert, best.block_bytes)
        best = _one_after_the_other(best, together)
    plan = replace(plan, io_block_bytes=best.block_bytes, io_depth=best.depth, io_engine=best.engine)
    speed = f" ({format_rate(best.bytes_per_s)})" if best.bytes_per_s else ""
    size = f" of at most {format_bytes(best.most_bytes)}" if best.most_bytes else ""
    if not plan.caches:
        return plan, f"reads{size} {best.reason}{speed}"
    asked = f"by an io_uring where there is one, {max(best.depth, together)} blocks in flight"
    return plan, f"reads{size} {best.reason}{speed}; experts that native code asks for come {asked}"


def _one_after_the_other(reads: Reads, depth: int) -> Reads:
    """With caches a layer waits for a few loads, of one expert each: with no more blocks than these in flight."""
    if reads.depth <= depth:
        return reads
    return replace(
        reads, depth=depth, reason=f"{reads.reason}; few experts in flight, so that one ends after the other"
    )
