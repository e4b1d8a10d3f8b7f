"""Brings weights to their places when a model is loaded, if no read can put them there. Weights of a device go through
the stage to its memory. Units that are asked for go through the ring, and the bytes of them that stay in RAM are kept
(`graph.records`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.graph.arenas import Layout
from penstock.graph.records import Records
from penstock.graph.tasks import Slot
from penstock.runtime.arena import Arenas
from penstock.runtime.device import Device
from penstock.runtime.movers import DiskLoad, DiskReader
from penstock.spec.places import GPU, HOST
from penstock.spec.plan import Plan
from penstock.units import MIB

_PIECE_BYTES = 16 * MIB  # the stage holds two pieces, so that the disk reads one while the link copies the other

Look = Callable[[str, NDArray[np.uint8]], None]
Piece = tuple[str, int, int, Slot]  # part, granules lo..hi, their slot on the device


def lift_weights(
    plan: Plan, layout: Layout, reader: DiskReader, arenas: Arenas, device: Device, look: Look
) -> Iterator[int]:  # fmt: skip
    """Loads every unit that is at home on the device, and the device's predictors, through the stage. Yields the bytes
    of each piece as it arrives. `look(part, bytes)` is called with each piece in the stage. However this ends, no load
    is under way afterwards. Raises StorageFailed, DamagedModel, DeviceFailed, and what `look` raises."""
    pieces = list(_pieces(plan, layout))
    if not pieces:
        return
    size = max(slot.nbytes for *_, slot in pieces)
    halves = [Slot(f"{HOST}.stage", i * size, (i + 1) * size) for i in range(2 if 2 * size <= plan.stage_bytes else 1)]
    begun: deque[tuple[DiskLoad, Slot, Slot, str]] = deque()

    def finish() -> int:
        load, half, target, part = begun[0]
        load.wait()
        begun.popleft()
        here = arenas.view(half)[: target.nbytes]
        look(part, here)
        device.upload(target, here).wait()
        return target.nbytes

    try:
        for number, (part, lo, hi, target) in enumerate(pieces):
            if len(begun) == len(halves):
                yield finish()
            half = halves[number % len(halves)]
            begun.append((reader.start(part, lo, hi, arenas.address(half)), half, target, part))
        while begun:
            yield finish()
    finally:
        for load, *_ in begun:
            with suppress(PenstockError):
                load.wait()


def keep_asked(plan: Plan, layout: Layout, reader: DiskReader, arenas: Arenas) -> Iterator[int]:
    """Reads every unit that is asked for, and yields the number of its bytes. So all its records have been compared
    with their checksums before single ones are read. Raises StorageFailed, DamagedModel."""
    for u, slot in layout.kept.items():
        unit = plan.units[u]
        part = layout.parts[unit.part]
        records, kept = Records.of(part), arenas.view(slot).reshape(unit.hi - unit.lo, -1)
        ring = arenas.whole(f"{HOST}.ring")
        step = max(1, min(len(ring), _PIECE_BYTES) // part.granule_bytes)
        for lo in range(unit.lo, unit.hi, step):
            hi = min(lo + step, unit.hi)
            yield reader.start(unit.part, lo, hi, ring.ctypes.data).wait()
            granules = ring[: (hi - lo) * part.granule_bytes].reshape(hi - lo, -1)
            kept[lo - unit.lo : hi - unit.lo, : records.head] = granules[:, : records.head]
            kept[lo - unit.lo : hi - unit.lo, records.head :] = granules[:, records.tail :]


def _pieces(plan: Plan, layout: Layout) -> Iterator[Piece]:
    """The pieces of all units on the device: each has whole granules, as many as half of the stage holds."""
    for part, slots in layout.copied_norms.items():
        yield from ((part, 0, 1, slot) for slot in slots if slot.arena.startswith(f"{GPU.executor}."))
    for layer, slot in layout.predictors.items():
        if slot.arena.startswith(f"{GPU.executor}."):
            yield f"{layer}.predictor", 0, 1, slot
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
