"""Finds the earlier tasks that a task must come after: the last writer of each byte range, and its readers since.

Each arena is kept as disjoint segments, sorted by address. A read of a segment depends on its last writer. A write
depends on the readers since then, or on the last writer if nobody has read. Only the latest reader of each lane is
kept, since to wait for a task is to wait for all earlier tasks of its lane too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from penstock.graph.ops.operand import Slot
from penstock.spec.places import Lane

Mark = tuple[Lane, int]  # a task, by its lane and its id


class Segment:
    """A byte range [lo, hi) with its last writer, and the latest reader on each lane since."""

    __slots__ = ("hi", "lo", "readers", "writer")

    def __init__(self, lo: int, hi: int, writer: Mark | None, readers: dict[Lane, int]) -> None:
        self.lo, self.hi, self.writer, self.readers = lo, hi, writer, readers

    def before(self, write: bool) -> Iterable[Mark]:
        """Tasks that a read (or write) of all of it must come after."""
        if write and self.readers:
            return self.readers.items()
        return (self.writer,) if self.writer is not None else ()

    def note(self, write: bool, mark: Mark) -> None:
        """The task `mark` reads (or writes) all of it."""
        if write:
            self.writer, self.readers = mark, {}
        else:
            self.readers[mark[0]] = mark[1]


class Hazards:
    """The last writer of every byte range touched so far, and the readers since that write."""

    def __init__(self) -> None:
        self._arenas: dict[str, tuple[list[int], list[Segment]]] = {}
        # Arena → slot → its segment, as `exactly` gave it since the arena's last `record`. Rings are recorded all the
        # time, so one dictionary of all arenas would forget the activations at every load.
        self._exact: dict[str, dict[Slot, Segment]] = {}

    def exactly(self, slot: Slot) -> Segment | None:
        """The segment of exactly these bytes, if there is one. Nearly always there is, since the same operands come
        again. The segment is to be used before the next `record`, which may split it."""
        arena, lo, hi = slot
        exact = self._exact.get(arena)
        if exact is None:
            return None
        segment = exact.get(slot)
        if segment is not None:
            return segment
        starts, segments = self._arenas[arena]
        i = bisect_right(starts, lo) - 1
        if i >= 0:
            segment = segments[i]
            if segment.lo == lo and segment.hi == hi:
                exact[slot] = segment
                return segment
        return None

    def conflicts(self, arena: str, lo: int, hi: int, write: bool) -> list[Mark]:
        """Tasks that a read (or write) of [lo, hi) must come after."""
        earlier: list[Mark] = []
        arena_segments = self._arenas.get(arena)
        if arena_segments is None:
            return earlier
        starts, segments = arena_segments
        i = bisect_right(starts, lo) - 1
        i = max(i, 0)
        while i < len(segments) and segments[i].lo < hi:
            segment = segments[i]
            if segment.hi > lo:
                earlier.extend(segment.before(write))
            i += 1
        return earlier

    def record(self, arena: str, lo: int, hi: int, write: bool, mark: Mark) -> None:
        """Notes that the task `mark` reads (or writes) [lo, hi)."""
        arena_segments = self._arenas.get(arena)
        if arena_segments is None:
            arena_segments = self._arenas[arena] = ([], [])
        self._exact[arena] = {}
        starts, segments = arena_segments
        self._split(starts, segments, lo)
        self._split(starts, segments, hi)
        first = bisect_right(starts, lo - 1)
        last = bisect_right(starts, hi - 1)
        if write:
            starts[first:last] = [lo]
            segments[first:last] = [Segment(lo, hi, mark, {})]
            return
        lane, task = mark
        cursor, fresh = lo, []
        for segment in segments[first:last]:
            if segment.lo > cursor:
                fresh.append(Segment(cursor, segment.lo, None, {lane: task}))
            segment.readers[lane] = task
            fresh.append(segment)
            cursor = segment.hi
        if cursor < hi:
            fresh.append(Segment(cursor, hi, None, {lane: task}))
        starts[first:last] = [segment.lo for segment in fresh]
        segments[first:last] = fresh

    def shift(self, base: int, by: int) -> None:
        """Tasks from id `base` on have ids that are larger by `by` now."""
        for _, segments in self._arenas.values():
            for segment in segments:
                if segment.writer is not None and segment.writer[1] >= base:
                    segment.writer = (segment.writer[0], segment.writer[1] + by)
                for lane, task in segment.readers.items():
                    if task >= base:
                        segment.readers[lane] = task + by

    @staticmethod
    def _split(starts: list[int], segments: list[Segment], byte: int) -> None:
        """Makes `byte` the beginning of a segment, if it lies inside one."""
        i = bisect_right(starts, byte) - 1
        if i >= 0 and segments[i].lo < byte < segments[i].hi:
            old = segments[i]
            starts.insert(i + 1, byte)
            segments.insert(i + 1, Segment(byte, old.hi, old.writer, dict(old.readers)))
            old.hi = byte
