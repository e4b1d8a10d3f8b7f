"""Counts the bytes that the tasks of passes take from slower tiers, and move over the link to a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.graph.tasks import Task, kv_loaded_bytes, link_bytes, streamed_bytes
from penstock.spec.places import Lane
from penstock.spec.plan import Unit


class Traffic:
    """Counts bytes of tasks on their way to the executor. `streamed_bytes`: of weights and KV that tasks read from
    rings and windows. `link_bytes`: by lane; empty without a device."""

    def __init__(self, units: Sequence[Unit], has_device: bool) -> None:
        self._units, self._has_device = units, has_device
        self.streamed_bytes = 0  # the session sets it back to 0 before each pass
        self.link_bytes: dict[Lane, int] = {}
        self._crossed: dict[int, dict[Lane, int]] = {}  # Task.like → bytes by lane

    def counted(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yields the same tasks, and counts each."""
        for task in tasks:
            if task.like < 0:  # a task that comes again streams nothing, and to look at all its calls takes 1 ms
                self.streamed_bytes += streamed_bytes(task, self._units) + kv_loaded_bytes(task)
            if self._has_device:
                for lane, nbytes in self._crossing(task).items():
                    self.link_bytes[lane] = self.link_bytes.get(lane, 0) + nbytes
            yield task

    def forget(self) -> None:
        """Task ids start over. Everything that was kept by a task's id is forgotten."""
        self._crossed.clear()

    def _crossing(self, task: Task) -> dict[Lane, int]:
        """The bytes that a task moves over the link, by lane."""
        crossed = self._crossed.get(task.like)
        if crossed is None:
            crossed = link_bytes(task)
            if task.like >= 0:
                self._crossed[task.like] = crossed
        return crossed
