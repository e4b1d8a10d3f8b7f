"""Writes a task list as text, one line per task, which golden tests compare."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.graph import ops
from penstock.graph.tasks import Call, Task
from penstock.spec.plan import Plan


def dump(tasks: Iterable[Task], plan: Plan) -> str:
    """One line per task: its id, lanes and calls, and `after` with the ids that it waits for. A call is written as its
    op, the unit's part and granules, the batch, and the byte ranges of weights in a ring or a cache."""
    lines = []
    for task in tasks:
        after = f"  after {' '.join(map(str, task.after))}" if task.after else ""
        lines.append(f"{task.id:3} {'+'.join(task.lanes):10} {'; '.join(_call(c, plan) for c in task.calls)}{after}")
    return "\n".join(lines) + "\n"


def _call(call: Call, plan: Plan) -> str:
    operands, words = call.operands, [call.op]
    if call.unit >= 0:
        unit = plan.units[call.unit]
        words.append(f"{unit.part}[{unit.lo}:{unit.hi}]")
    words += [value for value in operands if isinstance(value, str)]
    if call.batch is not None:
        words.append(f"b{call.batch.id}")
    slots = [slot for _, slot in ops.slots_of(operands)]
    words += [str(slot) for slot in slots if slot.arena.endswith((".ring", ".cache"))]
    if isinstance(operands, ops.KvMove):
        words += [str(slot) for slot in slots if slot.arena.endswith(".window")][:1]  # its keys; the values lie behind
        words.append(f"layer {operands.layer}")
    if isinstance(operands, ops.Copy):
        words.append(f"{operands.source.arena.split('.')[0]}→{operands.target.arena.split('.')[0]}")
    return " ".join(words)
