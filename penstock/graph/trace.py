"""Turns timelines into trace events for ui.perfetto.dev and chrome://tracing. Times in a trace are microseconds.

A trace has one track per lane, and one for the passes. A lane that has several tasks under way at once gets further
tracks ("disk0 (2)"), since events of one track may not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.graph.tasks import Pass
from penstock.graph.timeline import COMPUTE, Span, Timeline
from penstock.spec.places import Lane

# The first bytes of a trace file of ours. A file is taken for one of ours if it begins like this.
BEGINS = '{"displayTimeUnit":"ms","traceEvents":['
MOST_SPANS = 1_000_000  # some 250 MB of JSON, which is more than a viewer shows

_PROCESS, _PASSES = 1, 0  # ids: the process, and the track of the passes
_SAME_US = 5e-4  # times closer than this are equal: they are rounded to nanoseconds

Event = dict[str, Any]


class Trace:
    """Makes the events of each timeline as it comes. It keeps only the tracks' numbers and the ends of their events."""

    def __init__(self, title: str, most_spans: int = MOST_SPANS) -> None:
        self._title, self._most = title, most_spans
        self._tracks: dict[tuple[Lane, int], int] = {}  # (lane, number on the lane) → id of the track
        self._ends_us: dict[int, float] = {}
        self._last_s = 0.0  # when the timeline before ended
        self.passes = self.spans = self.left_out = 0

    def begin(self) -> Iterator[Event]:
        """The events that stand first: names of the process and of the passes' track."""
        yield _named("process_name", _PASSES, self._title)
        yield _named("thread_name", _PASSES, "passes")

    def add(self, timeline: Timeline, p: Pass | None) -> Iterator[Event]:
        """The events of one pass. `p` is None for tasks that ended after the last pass."""
        if p is not None:
            self.passes += 1
        room = max(0, self._most - self.spans)
        shown = sorted(timeline.spans, key=lambda span: span.start_s)[:room]
        self.left_out += len(timeline.spans) - len(shown)
        self.spans += len(shown)
        if p is not None and room:
            yield self._pass(timeline, p)
        for span in shown:
            for lane in span.lanes:
                yield from self._span(span, lane)
        if room:
            yield from self._rates(timeline)
        self._last_s = timeline.end_s

    def summary(self) -> dict[str, int]:
        return {"passes": self.passes, "tasks": self.spans, "tasks_left_out": self.left_out}

    def _pass(self, timeline: Timeline, p: Pass) -> Event:
        args = {
            "pass": self.passes,
            "rows": p.total_rows,
            "sequences": sum(len(batch.seqs) for batch in p.batches),
            "position": max(start for batch in p.batches for start in batch.start),
        }
        return _complete(f"{p.purpose} {self.passes}", "pass", _PASSES, timeline.start_s, timeline.end_s, args)

    def _span(self, span: Span, lane: Lane) -> Iterator[Event]:
        seconds = span.end_s - span.start_s
        args = {
            "bytes": span.bytes,
            "GB/s": round(span.bytes / seconds / 1e9, 3) if seconds > 0 else 0.0,
            "flops": span.flops,
            "ops": span.ops,
            "calls": span.calls,
            "pass": self.passes,
            "task": span.task,
        }
        number = 1
        while self._ends_us.get(self._tracks.get((lane, number), -1), 0.0) > _us(span.start_s) + _SAME_US:
            number += 1
        if (lane, number) not in self._tracks:
            track = self._tracks[lane, number] = len(self._tracks) + 1
            yield _named("thread_name", track, lane if number == 1 else f"{lane} ({number})")
        track = self._tracks[lane, number]
        self._ends_us[track] = _us(span.end_s)
        yield _complete(span.label, span.kind, track, span.start_s, span.end_s, args)

    def _rates(self, timeline: Timeline) -> Iterator[Event]:
        """Counter events: the GB/s of each lane that moves bytes, averaged since the end of the timeline before."""
        seconds = timeline.end_s - self._last_s
        moved: dict[Lane, int] = {}
        for span in timeline.spans:
            if span.kind != COMPUTE:
                for lane in span.lanes:
                    moved[lane] = moved.get(lane, 0) + span.bytes
        if seconds > 0:
            for lane, nbytes in moved.items():
                yield {
                    "name": f"{lane} GB/s", "ph": "C", "pid": _PROCESS, "tid": _PASSES, "ts": _us(self._last_s),
                    "args": {"GB/s": round(nbytes / seconds / 1e9, 3)},
                }  # fmt: skip


def _named(event_name: str, track: int, name: str) -> Event:
    return {"name": event_name, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _complete(name: str, kind: str, track: int, start_s: float, end_s: float, args: dict[str, Any]) -> Event:
    start_us = _us(start_s)
    duration_us = round(max(0.0, _us(end_s) - start_us), 3)
    return {
        "name": name, "cat": kind, "ph": "X", "pid": _PROCESS, "tid": track, "ts": start_us, "dur": duration_us,
        "args": args,
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
