"""Weights that stay in a device's memory, on their way there when a model is loaded: disk, stage, device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.graph.arenas import Layout
from penstock.graph.tasks import Slot
from penstock.runtime.arena import Arenas
from penstock.runtime.device import Device
from penstock.runtime.movers import DiskLoad, DiskReader
from penstock.spec.places import GPU
from penstock.spec.plan import Plan
from penstock.units import MIB

_PIECE_BYTES = 16 * MIB  # of the stage at a time; two, so that the disk reads while the link copies

Piece = tuple[str, int, int, Slot]  # part, granules lo..hi, where they go


def lift_weights(plan: Plan, layout: Layout, reader: DiskReader, arenas: Arenas, device: Device) -> Iterator[int]:
    """Reads every unit that is at home on the device through the stage; yields bytes as they arrive. However it ends,
    no load is under way afterwards."""
    pieces = list(_pieces(plan, layout))
    if not pieces:
        return
    size = max(slot.nbytes for *_, slot in pieces)
    halves = [Slot("host.stage", i * size, (i + 1) * size) for i in range(2 if 2 * size <= plan.stage_bytes else 1)]
    begun: deque[tuple[DiskLoad, Slot, Slot]] = deque()

    def finish() -> int:
        load, half, target = begun[0]
        load.wait()
        begun.popleft()
        device.upload(target, arenas.view(half)[: target.nbytes]).wait()
        return target.nbytes

    try:
        for number, (part, lo, hi, target) in enumerate(pieces):
            if len(begun) == len(halves):
                yield finish()
            half = halves[number % len(halves)]
            begun.append((reader.start(part, lo, hi, arenas.address(half)), half, target))
        while begun:
            yield finish()
    finally:
        for load, _, _ in begun:
            with suppress(PenstockError):
                load.wait()


def _pieces(plan: Plan, layout: Layout) -> Iterator[Piece]:
    """Whole granules, as many as half of the stage holds."""
    for part, slots in layout.copied_norms.items():
        yield from ((part, 0, 1, slot) for slot in slots if slot.arena.startswith(f"{GPU.executor}."))
    for i, slot in layout.weights.items():
        unit = plan.units[i]
        if unit.home != GPU.executor:
            continue
        each = layout.parts[unit.part].granule_bytes
        count = max(1, min(plan.stage_bytes // 2, _PIECE_BYTES) // each)
        for lo in range(unit.lo, unit.hi, count):
            hi = min(lo + count, unit.hi)
            at = slot.lo + (lo - unit.lo) * each
            yield unit.part, lo, hi, Slot(slot.arena, at, at + (hi - lo) * each)
