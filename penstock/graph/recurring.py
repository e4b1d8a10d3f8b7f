"""Reuses the tasks of a pass for the passes that follow it, where weights stream and no answer decides which.

The first piece of a pass goes to the beginning of its ring. So a pass finds the rings as the pass before found them, if
both have the same shape, and then its tasks are the same. They differ in ids, in positions, and in the cost of
attention there. Such passes are lowered until one is like the pass before it, edges included; all that follow are views
of that one. The first of a shape waits for tasks of other passes, so mostly it is the third. Lowering 32 layers and
running their 600 calls one by one took 15 to 20 ms of a pass of 90.

Edges reach into the pass before: a load waits for the last call that reads its bytes in the ring, and a call waits for
a load that was emitted one pass earlier. They are kept as they are, and move with the ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.graph.arenas import Layout
from penstock.graph.emit import Emitter
from penstock.graph.repeats import KnownTask, shape_of
from penstock.graph.tasks import Pass, Task
from penstock.spec.places import CPU
from penstock.spec.plan import Plan

Key = tuple[object, ...]
# A pass with more calls has many batches and takes long. To remember it would take 1.3 kB a call.
_MOST_CALLS = 1 << 13


class _Lowered(NamedTuple):
    """A pass that was lowered. `base`, `end`: its tasks have the ids from `base` up to `end`."""

    key: Key
    base: int
    end: int
    tasks: list[Task]


class Recurring:
    """The latest pass of a plan, to come again. For plans that stream and do not ask."""

    def __init__(self, plan: Plan, layout: Layout, emit: Emitter) -> None:
        self._plan, self._layout, self._emit = plan, layout, emit
        # Which KV crosses, and how rows are computed beside it, depends on positions. Such passes come again only in
        # predictions, which repeat a pass at one position.
        self._by_positions = bool(layout.delegated) or any(home.home != home.attend for home in plan.kv)
        self._latest: _Lowered | None = None  # none while a pass is being lowered
        self._settled = False  # whether the next pass may be a view of the latest one
        self._known: tuple[KnownTask, ...] = ()  # the latest pass's, if it is settled and positions may differ
        self._times = 0  # that the latest pass has come again

    def find(self, p: Pass, held: tuple[object, ...]) -> list[Task] | None:
        """The tasks of a pass that is like the latest one; else None. `held`: `Streams.held`."""
        latest = self._latest
        if latest is None or not self._settled or latest.key != self._key(p, held):
            return None
        self._times += 1
        shift = self._times * (latest.end - latest.base)
        if self._by_positions:
            return [
                task._replace(id=task.id + shift, after=tuple([other + shift for other in task.after]))
                for task in latest.tasks
            ]
        batches = {batch.id: batch for batch in p.batches}
        tasks = []
        for known in self._known:
            task, (calls, nbytes, flops) = known.task, known.moved(batches)
            after = tuple([other + shift for other in task.after])
            like = task.id if task.like < 0 and task.lanes == (CPU,) else task.like
            tasks.append(Task(task.id + shift, task.lanes, calls, task.reads, task.writes, nbytes, flops, after, like))
        return tasks

    def keep(self, p: Pass, held: tuple[object, ...], tasks: Iterator[Task]) -> Iterator[Task]:
        """Hands on the tasks of a pass that is lowered, and remembers them. `held`: before it."""
        before, self._latest = self._latest, None
        if before is not None and self._times:
            self._emit.shift(before.base, self._times * (before.end - before.base))
        self._settled, self._known, self._times = False, (), 0
        base, seen, calls = self._emit.next_id, list[Task](), 0
        for task in tasks:
            calls += len(task.calls)
            if calls <= _MOST_CALLS:
                seen.append(task)
            yield task
        if calls > _MOST_CALLS:
            return
        self._latest = _Lowered(self._key(p, held), base, self._emit.next_id, seen)
        self._settled = before is not None and before.key == self._latest.key and _alike(before, self._latest)
        if self._settled and not self._by_positions:
            self._known = tuple([KnownTask(self._plan, self._layout, task) for task in seen])

    def _key(self, p: Pass, held: tuple[object, ...]) -> Key:
        """All that decides a pass's tasks, but for ids."""
        positions = tuple([batch.start for batch in p.batches]) if self._by_positions else ()
        return (shape_of(p), p.stream, p.then, p.pages_used, positions, held)


def _alike(before: _Lowered, latest: _Lowered) -> bool:
    """Whether the tasks of two passes in a row are the same but for their ids. Edges are compared too: the lowering
    leaves out an edge that an earlier one implies, so the first passes may lack edges that later ones have."""
    by = latest.base - before.base
    return len(before.tasks) == len(latest.tasks) and all(
        (task.id + by, task.lanes, task.reads, task.writes, tuple([other + by for other in task.after]))
        == (again.id, again.lanes, again.reads, again.writes, again.after)
        for task, again in zip(before.tasks, latest.tasks, strict=True)
    )
