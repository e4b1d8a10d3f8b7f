"""Loads the weights that stay in memory, when a model is loaded: reads them, or has them made of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.graph.arenas import Layout
from penstock.runtime.ahead import Arrived
from penstock.runtime.arena import Arenas
from penstock.runtime.device import Device
from penstock.runtime.host import Progress
from penstock.runtime.made import Made, in_pieces
from penstock.runtime.movers import BegunLoad, DiskReader, waited_for
from penstock.runtime.reread import NOTHING, End, Read, at_usual_speed
from penstock.runtime.uploads import keep_asked, lift_weights
from penstock.spec.places import HOST, tier_of
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from penstock.store.unpacked import PIECES_AHEAD
from penstock.store.verify import require_finite
from penstock.store.writer import Fill

_LOADS_AHEAD = 8  # loads of weights that are begun beyond the one waited for


class FirstLoads(NamedTuple):
    """How long loading took.

    bytes   of all weights that stay
    timed   the loads that were timed, with the seconds that they take without halts

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
    fill: Fill | None = None,
) -> FirstLoads:
    """Loads every unit that stays in memory to its place. `arrived`: says in which order, and is told how many loads
    are done, from when all pages of the arenas are taken. Whoever computes before that takes the processor from those
    who take pages. `fill`: makes the granules of units, which then are not read; nothing of the plan may be at home
    elsewhere, and no load is timed. Raises StorageFailed, DamagedModel, DeviceFailed, BrokenModel (predictors that are
    not finite), and what `fill` raises."""
    units = plan.units
    copied = [slot for slots in layout.copied_norms.values() for slot in slots]
    asked = [units[u] for u in layout.asked]
    placed = (*layout.weights.values(), *layout.predictors.values(), *copied)
    total = sum(slot.nbytes for slot in placed) + sum(map(plan.unit_bytes, asked))
    weights = [(units[i].part, units[i].lo, units[i].hi, slot) for i, slot in layout.weights.items()]
    predictors = [(f"{layer}.predictor", 0, 1, slot) for layer, slot in layout.predictors.items()]
    copies = [(part, 0, 1, slot) for part, slots in layout.copied_norms.items() for slot in slots]
    loads = [load for load in (*weights, *predictors, *copies) if tier_of(load[3].arena) == HOST]
    if fill is not None:
        loads = [piece for load in loads for piece in in_pieces(plan.parts[load[0]], *load[1:])]
    if arrived is not None:
        loads = [loads[i] for i in arrived.order([slot for *_, slot in loads])]
    begun: Iterator[BegunLoad]
    if fill is None:
        begun = (reader.start(part, lo, hi, arenas.address(slot)) for part, lo, hi, slot in loads)
    else:
        begun = (Made.begin(fill, plan.parts[part], lo, hi, arenas.view(slot)) for part, lo, hi, slot in loads)
    predicting = {part.key: part for part in (each.part(plan.target.spec) for each in plan.predictors)}

    def look(key: str, here: NDArray[np.uint8]) -> None:
        """NaN in a predictor would leave neurons out, and nothing would show it."""
        if key in predicting:
            require_finite(packed.locate(key, 0, 0)[0], predicting[key], 0, here.reshape(1, -1))

    uploads = lift_weights(plan, layout, reader, arenas, device, look) if device else ()
    kept = keep_asked(plan, layout, reader, arenas)
    ahead = _LOADS_AHEAD if fill is None else PIECES_AHEAD
    done, told_s, ends = 0, time.perf_counter(), list[End]()
    for number, nbytes in enumerate(chain(waited_for(begun, ahead), kept, uploads), 1):
        done += nbytes
        if arenas.taking_s is not None:
            ends.append(End(time.perf_counter(), done))
            if arrived is not None:
                arrived.note(number)
        if on_progress and (done == total or time.perf_counter() - told_s > 0.1):
            told_s = time.perf_counter()
            on_progress("loading weights", done, total)
    timed = at_usual_speed(ends, ahead + 1) if fill is None else NOTHING
    loaded = FirstLoads(reader.bytes_read if fill is None else done, timed)
    for layer, slot in layout.predictors.items():
        if tier_of(slot.arena) == HOST:
            look(f"{layer}.predictor", arenas.view(slot))
    return loaded
