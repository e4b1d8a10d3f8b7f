"""Reads what a loaded model reads once more, to see how fast disk and RAM are in this very minute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from penstock import _native
from penstock.runtime.movers import DiskLoad, DiskReader, waited_for
from penstock.spec.parts import PAGE_BYTES
from penstock.units import MIB, round_up

_RAM_BYTES = 800 * MIB  # to read all in all: about 20 ms
_MOST_ROUNDS = 5


class Read(NamedTuple):
    """What was read, and the seconds that took."""

    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """0 where nothing was read."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


NOTHING = Read(0, 0.0)


def from_disk(
    reader: DiskReader, ranges: Sequence[tuple[str, int, int, int]], address: int, room_bytes: int, seconds: float
) -> Read:
    """Loads granule ranges (part, lo, hi, bytes) in turns, for about so long, to `room_bytes` of memory that nobody
    uses: as many in flight as it holds. Raises StorageFailed."""
    if not ranges:
        return NOTHING
    size = round_up(max(nbytes for *_, nbytes in ranges), PAGE_BYTES)
    slots = max(1, room_bytes // size)
    start_s = time.perf_counter()

    def loads() -> Iterator[DiskLoad]:
        for number, (part, lo, hi, _) in enumerate(cycle(ranges)):
            if number and time.perf_counter() - start_s > seconds:
                return
            yield reader.start(part, lo, hi, address + number % slots * size)

    return Read(sum(waited_for(loads(), slots - 1)), time.perf_counter() - start_s)


def from_ram(address: int, nbytes: int, threads: int) -> Read:
    """Reads memory with all threads, some times where it is short: one round, in the median time."""
    nbytes = min(nbytes, _RAM_BYTES)
    if nbytes <= 0:
        return NOTHING
    rounds = max(1, min(_MOST_ROUNDS, _RAM_BYTES // nbytes))
    return Read(nbytes, _native.ram_read_s(address, nbytes, threads, rounds))
