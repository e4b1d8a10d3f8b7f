"""How busy lanes were over many passes, and how much of the loading went on while something computed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from penstock.graph.timeline import COMPUTE, Timeline
from penstock.spec.places import Lane


class LaneUse(NamedTuple):
    """`busy_s`: seconds in which the lane had at least one task. `bytes`: sum over the tasks that ended."""

    busy_s: float
    bytes: int


class Occupancy:
    """Adds timelines up. It keeps 16 bytes per task: start and end as float64."""

    def __init__(self) -> None:
        # (lane, whether it computes) → start, end, start, end, …
        self._busy: dict[tuple[Lane, bool], array[float]] = {}
        self._bytes: dict[Lane, int] = {}

    def add(self, timeline: Timeline) -> None:
        for span in timeline.spans:
            for lane in span.lanes:
                self._busy.setdefault((lane, span.kind == COMPUTE), array("d")).extend((span.start_s, span.end_s))
                self._bytes[lane] = self._bytes.get(lane, 0) + span.bytes

    def lanes(self, start_s: float, end_s: float) -> dict[Lane, LaneUse]:
        """How busy each lane was from `start_s` to `end_s`. The bytes are those of all timelines, not of that time."""
        uses = {}
        for lane in sorted({lane for lane, _ in self._busy}):
            intervals = self._merged([key for key in self._busy if key[0] == lane], start_s, end_s)
            uses[lane] = LaneUse(sum(end - start for start, end in intervals), self._bytes[lane])
        return uses

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """Seconds, from `start_s` to `end_s`, in which some lane computed while some lane moved bytes."""
        computing = self._merged([key for key in self._busy if key[1]], start_s, end_s)
        moving = self._merged([key for key in self._busy if not key[1]], start_s, end_s)
        return sum(end - start for start, end in _common(computing, moving))

    def _merged(self, keys: list[tuple[Lane, bool]], start_s: float, end_s: float) -> list[tuple[float, float]]:
        """The union of these lanes' busy intervals, cut to `start_s`..`end_s`, in order."""
        merged: list[tuple[float, float]] = []
        pairs = (pair for key in keys for pair in zip(self._busy[key][0::2], self._busy[key][1::2], strict=True))
        for start, end in sorted((max(start, start_s), min(end, end_s)) for start, end in pairs):
            if end <= start:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        return merged


def _common(ones: list[tuple[float, float]], others: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The intersection of two ordered lists of disjoint intervals."""
    i = j = 0
    while i < len(ones) and j < len(others):
        start, end = max(ones[i][0], others[j][0]), min(ones[i][1], others[j][1])
        if start < end:
            yield start, end
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
