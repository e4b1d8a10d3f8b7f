"""When each task ran: predicted by simulate, measured by run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.graph.ops import Copy, KvMove
from penstock.graph.tasks import Call, Task
from penstock.spec.places import Lane
from penstock.spec.plan import Unit

COMPUTE = "compute"
# Op → kind of work (PIPO §3.1) of a task that consists of it. All other tasks are of the kind COMPUTE.
_KINDS = {
    "load": "weight load",
    "lift": "weight load",
    "fetch": "weight load",  # single embedding rows
    "kv_load": "KV load",
    "kv_save": "KV save",
    "copy": "activation copy",
}


class Span(NamedTuple):
    """A task that ran. `kind`: compute, weight load, KV load, KV save, activation copy. `ops`: its first and last op.
    `bytes`: as the op table counts them, for single embedding rows the most that may be read. Times are seconds from a
    start that all spans share."""

    task: int
    lanes: tuple[Lane, ...]
    label: str
    start_s: float
    end_s: float
    bytes: int
    kind: str = COMPUTE
    ops: str = ""
    calls: int = 1
    flops: int = 0


class Timeline(NamedTuple):
    """Tasks that ended since the timeline before. The pass itself went on from `start_s` to `end_s`. Loads for the next
    pass may begin in this pass and end in the next timeline."""

    spans: tuple[Span, ...]
    start_s: float = 0.0
    end_s: float = 0.0

    def busy_s(self) -> dict[Lane, float]:
        """Seconds in which each lane had a task."""
        total: dict[Lane, float] = {}
        for span in self.spans:
            for lane in span.lanes:
                total[lane] = total.get(lane, 0.0) + span.end_s - span.start_s
        return total


def span(task: Task, units: Sequence[Unit], start_s: float, end_s: float) -> Span:
    """The record of a task that ran. `units`: the plan's, for their names."""
    calls = task.calls
    first, last = calls[0].op, calls[-1].op
    ops = first if len(calls) == 1 else f"{first}…{last}"
    kind = _kind(calls)
    return Span(task.id, task.lanes, label(task, units), start_s, end_s, task.bytes, kind, ops, len(calls), task.flops)


def _kind(calls: Sequence[Call]) -> str:
    """The kind of work of a task. A device's copies among its other calls count as computing."""
    first = calls[0].op
    return _KINDS.get(first, COMPUTE) if all(call.op == first for call in calls) else COMPUTE


def label(task: Task, units: Sequence[Unit] = ()) -> str:
    """A name for viewers: 'load 7.ffn[0:12]', 'compute 3.attn[0:4]', 'compute 3.attn[0:4] to 4.ffn[0:9]'. A computing
    task without weights is named by its ops. Without `units`, a unit is named by its number."""
    calls = task.calls
    first = calls[0]
    if _kind(calls) != COMPUTE:
        details: list[str] = []
        if isinstance(first.operands, Copy):
            details = [first.operands.what]
        elif isinstance(first.operands, KvMove):
            details = [str(first.operands.layer), str(first.operands.ranges)]
        return " ".join([first.op, *([_name(first.unit, units)] if first.unit >= 0 else []), *details])
    first_unit = next((call.unit for call in calls if call.unit >= 0), -1)
    if first_unit < 0:
        return f"{COMPUTE} {first.op}" if len(calls) == 1 else f"{COMPUTE} {first.op}…{calls[-1].op}"
    last_unit = next(call.unit for call in reversed(calls) if call.unit >= 0)
    names = _name(first_unit, units), _name(last_unit, units)
    return f"{COMPUTE} {names[0]}" if first_unit == last_unit else f"{COMPUTE} {names[0]} to {names[1]}"


def _name(unit: int, units: Sequence[Unit]) -> str:
    if not units:
        return str(unit)
    named = units[unit]
    return f"{named.part}[{named.lo}:{named.hi}]"
