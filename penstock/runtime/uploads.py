"""Brings the weights that stay in a device's memory there, when a model is loaded: from disk by the stage."""

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

_PIECE_BYTES = 16 * MIB  # of the stage; it holds two pieces, so that the disk reads one while the link copies the other

Piece = tuple[str, int, int, Slot]  # part, granules lo..hi, their slot on the device


def lift_weights(plan: Plan, layout: Layout, reader: DiskReader, arenas: Arenas, device: Device) -> Iterator[int]:
    """Loads every unit that is at home on the device through the stage, and yields the bytes of each piece as it
    arrives. However this ends, no load is under way afterwards. Raises StorageFailed, DamagedModel, DeviceFailed."""
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
    """The pieces of all units on the device: each has whole granules, as many as half of the stage holds."""
    for part, slots in layout.copied_norms.items():
        yield from ((part, 0, 1, slot) for slot in slots if slot.arena.startswith(f"{GPU.executor}."))
    for i, slot in layout.weights.items():
        unit = plan.units[i]
        if unit.home != GPU.executor:
            continue
        granule_bytes = layout.parts[unit.part].granule_bytes
        count = max(1, min(plan.stage_bytes // 2, _PIECE_BYTES) // granule_bytes)
        for lo in range(unit.lo, unit.hi, count):
            hi = min(lo + count, unit.hi)
            offset = slot.lo + (lo - unit.lo) * granule_bytes
            yield unit.part, lo, hi, Slot(slot.arena, offset, offset + (hi - lo) * granule_bytes)
