"""Loads that read no packed file: granules are made of a checkpoint, in the memory that they stay in. They can be
copied out of there, to be written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, InternalError
from penstock.graph.arenas import Layout
from penstock.graph.tasks import Slot
from penstock.runtime.arena import Arenas
from penstock.spec.parts import Part
from penstock.spec.places import HOST
from penstock.spec.plan import Plan
from penstock.store.unpacked import PIECE_BYTES
from penstock.store.writer import Fill

# Granules to be copied wait so long for a moment without a pass, and look so often. A pass waits for one piece at most,
# 8 MiB or a granule: 1 to 2 ms.
_PATIENCE_S, _LOOK_S = 0.05, 0.005


class Made:
    """Granules that are being made. `nbytes`: of all of them. `made` returns when they are there, or raises."""

    def __init__(self, made: Callable[[], None] | None, nbytes: int) -> None:
        self._made, self._nbytes = made, nbytes

    @classmethod
    def begin(cls, fill: Fill, part: Part, lo: int, hi: int, out: NDArray[np.uint8]) -> Made:
        """Begins to make granules lo..hi of a part in `out`, uint8 [(hi - lo) * granule_bytes]."""
        return cls(fill(part, lo, hi, out), out.nbytes)

    def wait(self) -> int:
        """Returns the bytes when they are there. Raises BrokenModel, UnsupportedModel, StorageFailed."""
        if self._made is not None:
            self._made()
        return self._nbytes


def in_pieces(part: Part, lo: int, hi: int, slot: Slot) -> Iterator[tuple[str, int, int, Slot]]:
    """Cuts granules lo..hi, which lie in `slot`, into pieces that are made at once."""
    step = max(1, PIECE_BYTES // part.granule_bytes)
    for first in range(lo, hi, step):
        end = min(first + step, hi)
        begin, stop = ((granule - lo) * part.granule_bytes for granule in (first, end))
        yield part.key, first, end, Slot(slot.arena, slot.lo + begin, slot.lo + stop)


def copied(plan: Plan, layout: Layout, arenas: Arenas) -> Fill:
    """Gives granules out of the slots of units in RAM, each part's whole."""
    places: dict[str, list[tuple[int, int, Slot]]] = {}
    for number, slot in layout.weights.items():
        unit = plan.units[number]
        places.setdefault(unit.part, []).append((unit.lo, unit.hi, slot))

    def fill(part: Part, lo: int, hi: int, out: NDArray[np.uint8]) -> None:
        size, there = part.granule_bytes, 0
        for begin, end, slot in places[part.key]:
            first, last = max(lo, begin), min(hi, end)
            if first < last:
                out[(first - lo) * size : (last - lo) * size] = arenas.view(slot)[(first - begin) * size :][
                    : (last - first) * size
                ]
                there += last - first
        if there != hi - lo:
            raise InternalError(f"of granules {lo} to {hi} of {part.key} {there} are in RAM")

    return fill


def between_passes(fill: Fill, stepping: threading.Lock, closed: Callable[[], bool]) -> Fill:
    """`fill`, called while no pass holds `stepping`. It waits for a moment in which no pass runs; after 50 ms it
    waits for the end of the pass under way. Raises BadRequest when the model is `closed`."""

    def waiting(part: Part, lo: int, hi: int, out: NDArray[np.uint8]) -> Callable[[], None] | None:
        until_s = time.perf_counter() + _PATIENCE_S
        while stepping.locked() and time.perf_counter() < until_s:
            time.sleep(_LOOK_S)
        with stepping:
            if closed():
                raise BadRequest("this model was closed while its packed copy was written")
            return fill(part, lo, hi, out)

    return waiting


def stays_here(plan: Plan) -> bool:
    """Whether all weights stay in RAM and the CPU computes with them, none beside them, and nothing asks for more."""
    return not (plan.asks or plan.predictors) and all(
        unit.home == unit.decode == unit.prefill == HOST for unit in plan.units
    )
