"""Loads the weights that stay in memory, when a model is loaded."""

from __future__ import annotations

import time
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.graph.arenas import Layout
from penstock.runtime.ahead import WEIGHTS, Arrived
from penstock.runtime.arena import Arenas
from penstock.runtime.device import Device
from penstock.runtime.host import Progress
from penstock.runtime.movers import DiskReader, waited_for
from penstock.runtime.reread import End, Read, at_median
from penstock.runtime.uploads import keep_asked, lift_weights
from penstock.spec.places import HOST, tier_of
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from penstock.store.verify import require_finite

_LOADS_AHEAD = 8  # loads of weights that are begun beyond the one waited for


class FirstLoads(NamedTuple):
    """How long loading took.

    bytes   of all weights that stay
    timed   the loads that were timed, with the seconds that they take at their median speed

    While pages of the arenas are still being taken, a load waits for memory and not for the disk. Such loads are not
    timed, nor is the first one that ends after that.
    """

    bytes: int
    timed: Read


def load_weights(
    plan: Plan,
    layout: Layout,
    packed: Packed,
    reader: DiskReader,
    arenas: Arenas,
    device: Device | None,
    on_progress: Progress | None,
    arrived: Arrived | None = None,
) -> FirstLoads:
    """Loads every unit that stays in memory to its place. `arrived`: is told how far the weights in RAM are there, from
    when all pages of the arenas are taken. Whoever computes before that takes the processor from those who take pages.
    Raises StorageFailed, DamagedModel, DeviceFailed, BrokenModel (predictors that are not finite)."""
    units = plan.units
    copied = [slot for slots in layout.copied_norms.values() for slot in slots]
    asked = [units[u] for u in layout.asked]
    placed = (*layout.weights.values(), *layout.predictors.values(), *copied)
    total = sum(slot.nbytes for slot in placed) + sum(map(plan.unit_bytes, asked))
    weights = (
        reader.start(units[i].part, units[i].lo, units[i].hi, arenas.address(slot))
        for i, slot in layout.weights.items()
        if units[i].home == HOST
    )
    predictors = (
        reader.start(f"{layer}.predictor", 0, 1, arenas.address(slot))
        for layer, slot in layout.predictors.items()
        if tier_of(slot.arena) == HOST
    )
    copies = (
        reader.start(part, 0, 1, arenas.address(slot))
        for part, slots in layout.copied_norms.items()
        for slot in slots
        if tier_of(slot.arena) == HOST
    )
    predicting = {part.key: part for part in (each.part(plan.target.spec) for each in plan.predictors)}

    def look(key: str, here: NDArray[np.uint8]) -> None:
        """NaN in a predictor would leave neurons out, and nothing would show it."""
        if key in predicting:
            require_finite(packed.locate(key, 0, 0)[0], predicting[key], 0, here.reshape(1, -1))

    uploads = lift_weights(plan, layout, reader, arenas, device, look) if device else ()
    kept = keep_asked(plan, layout, reader, arenas)
    in_order = (slot.hi for slot in placed if slot.arena == WEIGHTS)  # as they are loaded
    done, told_s, ends = 0, time.perf_counter(), list[End]()
    for nbytes in chain(waited_for(chain(weights, predictors, copies), _LOADS_AHEAD), kept, uploads):
        done, end = done + nbytes, next(in_order, None)
        if arenas.taking_s is not None:
            ends.append(End(time.perf_counter(), done))
            if arrived is not None and end is not None:
                arrived.note(end)
        if on_progress and (done == total or time.perf_counter() - told_s > 0.1):
            told_s = time.perf_counter()
            on_progress("loading weights", done, total)
    loaded = FirstLoads(reader.bytes_read, at_median(ends))
    for layer, slot in layout.predictors.items():
        if tier_of(slot.arena) == HOST:
            look(f"{layer}.predictor", arenas.view(slot))
    return loaded
