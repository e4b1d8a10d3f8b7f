"""When each task ran: predicted by simulate, measured by run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.graph.tasks import Task


class Span(NamedTuple):
    """`label`: the ops of the task. Times are seconds since the timeline's start."""

    task: int
    lanes: tuple[str, ...]
    label: str
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]

    def busy_s(self) -> dict[str, float]:
        """Seconds in which each lane had a task."""
        total: dict[str, float] = {}
        for span in self.spans:
            for lane in span.lanes:
                total[lane] = total.get(lane, 0.0) + span.end_s - span.start_s
        return total


def label(task: Task) -> str:
    """'ffn 12' for one call, 'norm…head (98 calls)' for a fused task."""
    first, last = task.calls[0], task.calls[-1]
    if len(task.calls) == 1:
        return f"{first.op} {first.unit}" if first.unit >= 0 else first.op
    return f"{first.op}…{last.op} ({len(task.calls)} calls)"
