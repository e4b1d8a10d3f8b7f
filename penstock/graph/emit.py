"""Turns calls into tasks: derives the edges from the slots, and fuses neighbouring calls of a lane into one task.

A call joins its lane's open task unless it has to wait for another lane. So where nothing streams, a whole step is one
task. An edge is kept only if it says something new. For to wait for a task is to wait for all earlier tasks of its lane
too, and a lane that has waited for a task once need not wait for it again. Tasks of one lane end in their order, except
loads of a disk. So a load waits for an earlier load into the same bytes if no task has read these in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from penstock.graph import ops
from penstock.graph.hazards import Hazards, Segment
from penstock.graph.tasks import Call, Slot, Task
from penstock.spec.places import CPU, Lane, is_disk

# Op → its operands that may make edges: (field, whether it is several slots, whether it is read, whether it is
# written). An operand that is neither read nor written only comes after its writer.
_TOUCHES = {
    op.definition: tuple((o.field, o.many, o.mode in "r+", o.mode in "w+") for o in op.operands if o.mode != "s")
    for op in ops.OPS.values()
}
# Arenas whose slots make no edges: weights are constant while passes run, and scratch is private to one lane.
_UNTRACKED = (".weights", ".scratch")
_MOVING = (".ring", ".window", ".cache")  # arenas that hold other content in every pass
_MOST_ALIKE = 4096  # tasks that are remembered, to find later ones that are like them


class _Tracked(dict[str, bool]):
    """Arena → whether its slots make edges."""

    def __missing__(self, arena: str) -> bool:
        tracked = self[arena] = not arena.endswith(_UNTRACKED)
        return tracked


class _OpenTask:
    """A task still taking calls."""

    __slots__ = ("after", "calls", "id", "lanes", "reads", "writes")

    def __init__(self, task_id: int, lanes: tuple[Lane, ...], after: tuple[int, ...]) -> None:
        self.id, self.lanes, self.after = task_id, lanes, after
        self.calls: list[Call] = []
        self.reads: dict[Slot, None] = {}
        self.writes: dict[Slot, None] = {}


class Emitter:
    """Turns calls into tasks. Ids rise in the order in which tasks are opened. A task is handed out after all tasks
    that it waits for. `likens`: the lanes whose tasks get `Task.like`."""

    def __init__(self, likens: Collection[Lane] = ()) -> None:
        self._likens = likens
        self._alike: dict[
            tuple[object, ...], int
        ] = {}  # shapes of batches, units and operands of calls → first such task
        self._hazards = Hazards()
        self._tracked = _Tracked()
        # Lane → other lane → the latest task there that it has waited for.
        self._waited_for: dict[Lane, dict[Lane, int]] = {}
        self._open: dict[Lane, _OpenTask] = {}
        self.next_id = 0  # of the next task that is opened
        self._closed: list[Task] = []
        # For lane A: the last adopted task of lane B that A's next task must wait for.
        self._ended: dict[Lane, dict[Lane, int]] = {}
        self._fresh: dict[Lane, int] = {}  # lane → its latest task, of those closed since tasks were adopted

    def alone(self, lanes: tuple[Lane, ...], call: Call) -> None:
        """A task of this one call, on one lane or on two at once."""
        self.close(lanes[0])
        self._add(lanes, call)
        self.close(lanes[0])

    def call(self, lane: Lane, call: Call) -> None:
        """Appends to the lane's open task, or to a new one where the call has to wait for another lane."""
        self._add((lane,), call)

    def close(self, lane: Lane) -> None:
        """Closes the lane's open task: it takes no more calls."""
        task = self._open.pop(lane, None)
        if task is None:
            return
        self._fresh[lane] = task.id
        calls = task.calls
        nbytes, flops = calls[0].bytes, calls[0].flops
        if len(calls) > 1:
            nbytes, flops = sum([call.bytes for call in calls]), sum([call.flops for call in calls])
        calls_and_sums = (tuple(calls), tuple(task.reads), tuple(task.writes), nbytes, flops)
        like = self._like(task) if lane in self._likens else -1
        self._closed.append(Task(task.id, task.lanes, *calls_and_sums, task.after, like))

    def _like(self, task: _OpenTask) -> int:
        """The id of an earlier task with the same calls on the same slots, for batches of the same shape; -1: none. A
        task of the CPU has one only if all its weights are at home."""
        moving = any(slot.arena.endswith(_MOVING) for slots in (task.reads, task.writes) for slot in slots)
        if moving and task.lanes[0] == CPU:
            return -1
        # Calls for some rows of a batch say nothing of its sequences, which decide how attention is computed.
        batches = {(call.batch.id, call.batch.some): call.batch for call in task.calls if call.batch is not None}
        if any(call.batch is None for call in task.calls):
            return -1
        shapes = tuple([batch.shape for batch in batches.values()])
        key = (shapes, *[(call.unit, call.operands) for call in task.calls])
        if len(self._alike) >= _MOST_ALIKE:
            self._alike.clear()
        first_id = self._alike.setdefault(key, task.id)
        return first_id if first_id != task.id else -1

    def closed(self) -> Iterator[Task]:
        """Hands out the tasks closed since the last time."""
        while self._closed:
            closed, self._closed = self._closed, []
            yield from closed

    def adopt(self, tasks: Sequence[Task]) -> list[tuple[int, tuple[int, ...]]]:
        """Gives new (id, after) to tasks of an earlier pass that come again. No task may be open. The first of each
        lane waits for all tasks before them, and the next task of each lane will wait for all of these."""
        new_id = {task.id: self.next_id + i for i, task in enumerate(tasks)}
        lane_of = {task.id: task.lanes[0] for task in tasks}
        self.next_id += len(tasks)
        adopted: list[tuple[int, tuple[int, ...]]] = []
        last_on: dict[Lane, int] = {}
        for lane in set(lane_of.values()) if self._fresh else ():
            self._ended[lane] = {other: task for other, task in self._fresh.items() if other != lane}
        self._fresh.clear()
        for task in tasks:
            waits = self._ended.pop(task.lanes[0], {})
            waits |= {lane_of[other]: new_id[other] for other in task.after if other in new_id}
            adopted.append((new_id[task.id], tuple(sorted(waits.values()))))
            last_on[task.lanes[0]] = new_id[task.id]
        for lane in {*self._waited_for, *last_on, *self._ended}:
            self._ended[lane] = {other: task for other, task in last_on.items() if other != lane}
        return adopted

    def again(self, task: Task, calls: Sequence[Call], nbytes: int, flops: int) -> None:
        """Emits a task of an earlier pass again, with other positions: with `calls`, their bytes and their flops."""
        (lane,) = task.lanes
        self.close(lane)
        waits = self._ended.pop(lane, {})
        exactly = self._hazards.exactly
        for slots, write in ((task.reads, False), (task.writes, True)):
            for slot in slots:
                segment = exactly(slot)
                before = self._hazards.conflicts(*slot, write) if segment is None else segment.before(write)
                for other, number in before:
                    if other != lane and number > waits.get(other, -1):
                        waits[other] = number
        if waits:
            waits = self._unknown(lane, waits)
        mark = (lane, self.next_id)
        self.next_id += 1
        for slots, write in ((task.reads, False), (task.writes, True)):
            for slot in slots:
                segment = exactly(slot)
                if segment is None:
                    self._hazards.record(*slot, write, mark)
                else:
                    segment.note(write, mark)
        after = tuple(sorted(waits.values()))
        self._closed.append(Task(mark[1], (lane,), calls, task.reads, task.writes, nbytes, flops, after, task.id))

    def shift(self, base: int, by: int) -> None:
        """All tasks from id `base` on have come again, the latest time with ids that are larger by `by`."""
        self.next_id += by
        self._hazards.shift(base, by)
        for waited_for in self._waited_for.values():
            waited_for.update({other: task + by for other, task in waited_for.items() if task >= base})

    def finish(self) -> Iterator[Task]:
        """Closes every lane and hands out the rest."""
        for lane in list(self._open):
            self.close(lane)
        yield from self.closed()

    def _unknown(self, lane: Lane, waits: dict[Lane, int]) -> dict[Lane, int]:
        """The tasks among `waits`, by their lanes, that this lane has not waited for yet. It waits for them now, so
        they are closed."""
        waited_for = self._waited_for.setdefault(lane, {})
        waits = {other: task for other, task in waits.items() if task > waited_for.get(other, -1)}
        waited_for.update(waits)
        for other, task in waits.items():
            if other in self._open and self._open[other].id == task:
                self.close(other)
        return waits

    def _add(self, lanes: tuple[Lane, ...], call: Call) -> None:
        touched: list[tuple[Slot, Segment | None, bool, bool]] = []
        waits: dict[Lane, int] = {}
        operands: Any = call.operands
        exact = True  # whether all of them are segments
        in_order = [lane for lane in lanes if not is_disk(lane)]  # their earlier tasks have ended
        tracked, exactly = self._tracked, self._hazards.exactly
        for field, many, reads, writes in _TOUCHES[operands.__class__]:
            value = operands[field]
            for slot in value if many else (value,):
                arena, lo, hi = slot
                if not tracked[arena]:
                    continue
                segment = exactly(slot)
                if reads or writes:
                    touched.append((slot, segment, reads, writes))
                    exact = exact and segment is not None
                before = self._hazards.conflicts(arena, lo, hi, writes) if segment is None else segment.before(writes)
                for other, task in before:
                    if other not in in_order and task > waits.get(other, -1):
                        waits[other] = task
        lane = lanes[0]
        if lane not in self._open:
            for other, task in self._ended.pop(lane, {}).items():
                waits[other] = max(task, waits.get(other, -1))
        if waits:
            waits = self._unknown(lane, waits)
        if waits:
            self.close(lane)
        if lane not in self._open:
            self._open[lane] = _OpenTask(self.next_id, lanes, tuple(sorted(waits.values())))
            self.next_id += 1
        current = self._open[lane]
        current.calls.append(call)
        mark = (lane, current.id)
        for slot, segment, read, write in touched:
            if exact and segment is not None:
                segment.note(write, mark)
            else:
                self._hazards.record(*slot, write, mark)
            if read:
                current.reads[slot] = None
            if write:
                current.writes[slot] = None
