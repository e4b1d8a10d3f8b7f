"""A task list as text, a line a task: what the golden tests hold and a person reads."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.graph.tasks import Call, Task
from penstock.spec.plan import Plan


def dump(tasks: Iterable[Task], plan: Plan) -> str:
    """`id lanes: calls | after ids`. A call: op, the unit's part and granules, the batch, and for what
    streams the ring's byte range."""
    lines = []
    for task in tasks:
        after = f"  after {' '.join(map(str, task.after))}" if task.after else ""
        lines.append(f"{task.id:3} {'+'.join(task.lanes):10} {'; '.join(_call(c, plan) for c in task.calls)}{after}")
    return "\n".join(lines) + "\n"


def _call(call: Call, plan: Plan) -> str:
    words = [call.op]
    if call.unit >= 0:
        unit = plan.units[call.unit]
        words.append(f"{unit.part}[{unit.lo}:{unit.hi}]")
    words += [str(arg) for arg in call.args if isinstance(arg, str)]
    if call.batch is not None:
        words.append(f"b{call.batch.id}")
    rings = [slot for slot in call.slots if slot.arena.endswith(".ring")]
    if call.op in ("kv_load", "kv_save"):
        rings += [slot for slot in call.slots if slot.arena.endswith(".window")][:1]  # its keys; the values lie behind
    words += [str(slot) for slot in rings]
    if call.op in ("kv_load", "kv_save"):
        words.append(f"layer {call.args[0]}")
    if call.op == "copy":
        words.append(f"{call.slots[0].arena.split('.')[0]}→{call.slots[1].arena.split('.')[0]}")
    return " ".join(words)
