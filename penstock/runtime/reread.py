"""Measures the present speed of disk and RAM, by reading weights of a loaded model once more."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.graph.arenas import Layout
from penstock.graph.passes import DECODE
from penstock.runtime.movers import DiskLoad, DiskReader, waited_for
from penstock.spec.parts import PAGE_BYTES
from penstock.spec.places import HOST
from penstock.spec.plan import Plan
from penstock.units import MIB, round_up

_RAM_BYTES = 800 * MIB  # so much is read in all rounds together, in about 20 ms
_MOST_ROUNDS = 5
_PART_BYTES, _MOST_PART_BYTES = 32 * MIB, 64 * MIB  # reading is timed in parts of so many bytes
_HALT = 3  # a part that took so many times as long as most of them waited for something else than the disk
_QUARTERS, _LEAST_PARTS = 4, 2  # a reading's quarters are compared, each of so many parts at least
_PIECE_BYTES = 64 * MIB  # the smallest piece: twice a large L3 cache, so that no cache holds what is read next


GranuleRange = tuple[str, int, int, int]  # (part, first granule, end, bytes)


class Read(NamedTuple):
    """Bytes that were read, the seconds that this took, and by how many loads. RAM is read by none. `swing`: by how
    much its quarters differed in speed, as the standard deviation over the mean; 0 if nobody knows."""

    bytes: int
    seconds: float
    loads: int = 0
    swing: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second; 0 if nothing was read."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    def beside(self, other: Read) -> Read:
        """Both reads together, one after the other."""
        swing = max(self.swing, other.swing)
        return Read(self.bytes + other.bytes, self.seconds + other.seconds, self.loads + other.loads, swing)


NOTHING = Read(0, 0.0)


class End(NamedTuple):
    """The end of a load: its time (`time.perf_counter`), and the bytes that were read until then."""

    moment_s: float
    bytes: int


def at_usual_speed(ends: Sequence[End], in_flight: int) -> Read:
    """The bytes read between the first and the last of `ends`, and the seconds that they take without halts. So it does
    not count if something halts the machine for a moment: taking pages once took 0.9 s, and half a second of reading
    once had 0.83 of the speed of the seconds before and after it. `in_flight`: how many loads are under way at once.

    Loads that are under way together end in bursts, so a part is as long as all of them are, up to 64 MiB: readers
    have half of that in flight, and with longer parts a halt in a short reading would not stand out. The median of
    parts of 32 MiB with four loads of 9 MiB was 2.10 GB/s where the mean, and passes, had 2.35 (docs/LOG.md)."""
    if len(ends) < 2:
        return NOTHING
    together = in_flight * max(end.bytes - before.bytes for before, end in pairwise(ends))
    least = min(_MOST_PART_BYTES, max(_PART_BYTES, together))
    parts, last = list[Read](), ends[0]
    for end in ends[1:]:
        if end.bytes - last.bytes >= least:
            parts.append(Read(end.bytes - last.bytes, end.moment_s - last.moment_s))
            last = end
    whole = Read(ends[-1].bytes - ends[0].bytes, ends[-1].moment_s - ends[0].moment_s, len(ends) - 1)
    if not parts:
        return whole
    most_s_per_byte = _HALT * statistics.median(part.seconds / part.bytes for part in parts)
    steady = [part for part in parts if part.seconds <= most_s_per_byte * part.bytes]
    return whole._replace(seconds=whole.bytes * _s_per_byte(steady), swing=_swing(steady))


def _s_per_byte(parts: Sequence[Read]) -> float:
    return sum(part.seconds for part in parts) / sum(part.bytes for part in parts)


def _swing(parts: Sequence[Read]) -> float:
    """By how much the quarters of these parts differ in speed; 0 of too few parts, or where one took no time."""
    size = len(parts) // _QUARTERS
    if size < _LEAST_PARTS:
        return 0.0
    quarters = [_s_per_byte(parts[i * size : (i + 1) * size]) for i in range(_QUARTERS)]
    if not all(quarters):
        return 0.0
    speeds = [1 / s_per_byte for s_per_byte in quarters]
    return statistics.pstdev(speeds) / statistics.fmean(speeds)


def streamed_ranges(plan: Plan, layout: Layout) -> list[GranuleRange]:
    """What a decode pass of the CPU loads from disks: its units, and each expert that a cache may miss."""
    units = [u for u in plan.units if layout.streams(u, DECODE) and u.executor("decode") == HOST]
    ranges = [(unit.part, unit.lo, unit.hi, plan.unit_bytes(unit)) for unit in units]
    for part in (plan.parts[f"{cache.layer}.experts"] for cache in plan.caches if cache.executor == HOST):
        n = part.least_granules  # of an expert
        ranges += [(part.key, lo, lo + n, part.least_bytes) for lo in range(0, part.granules, n)]
    return ranges


def from_disk(reader: DiskReader, ranges: Sequence[GranuleRange], room: NDArray[np.uint8], seconds: float) -> Read:
    """Loads granule ranges, one after the other and again, for about so many `seconds`. They go to `room` [bytes] of
    uint8, memory that nobody uses meanwhile. As many loads are in flight as it has room for. Raises StorageFailed,
    DamagedModel."""
    if not ranges:
        return NOTHING
    size = round_up(max(nbytes for *_, nbytes in ranges), PAGE_BYTES)
    slots = max(1, len(room) // size)
    start_s = time.perf_counter()

    def loads() -> Iterator[DiskLoad]:
        for number, (part, lo, hi, _) in enumerate(cycle(ranges)):
            if number and time.perf_counter() - start_s > seconds:
                return
            yield reader.start(part, lo, hi, room.ctypes.data + number % slots * size)

    ends = [End(start_s, 0)]
    for nbytes in waited_for(loads(), slots - 1):
        ends.append(End(time.perf_counter(), ends[-1].bytes + nbytes))
    return at_usual_speed(ends, slots)


def from_ram(address: int, nbytes: int, threads: int) -> Read:
    """Reads `nbytes` of memory with all threads: a few pieces of it, or all of it several times if it is too small for
    pieces. Returns the read that took the median time, so that a moment in which another process had a core does not
    count."""
    nbytes = min(nbytes, _RAM_BYTES)
    if nbytes <= 0:
        return NOTHING
    pieces = nbytes // _PIECE_BYTES
    if pieces >= _MOST_ROUNDS:
        piece = nbytes // _MOST_ROUNDS // PAGE_BYTES * PAGE_BYTES
        starts = (address + i * piece for i in range(_MOST_ROUNDS))
        return Read(piece, statistics.median(_native.ram_read_s(start, piece, threads, 1) for start in starts))
    rounds = max(1, min(_MOST_ROUNDS, _RAM_BYTES // nbytes))
    return Read(nbytes, _native.ram_read_s(address, nbytes, threads, rounds))
