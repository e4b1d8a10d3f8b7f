"""Counts the bytes that the tasks of passes take from slower tiers, and move over the link to a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.graph.tasks import Task, kv_loaded_bytes, link_bytes, streamed_bytes
from penstock.spec.places import Lane
from penstock.spec.plan import Unit

_KEPT = 4096  # tasks whose bytes are remembered


class Traffic:
    """Counts bytes of tasks on their way to the executor. `streamed_bytes`: of weights and KV that tasks read from
    rings and windows. `link_bytes`: by lane; empty without a device."""

    def __init__(self, units: Sequence[Unit], has_device: bool) -> None:
        self._units, self._has_device = units, has_device
        self.streamed_bytes = 0  # the session sets it back to 0 before each pass
        self.link_bytes: dict[Lane, int] = {}
        self._known: dict[int, tuple[int, dict[Lane, int]]] = {}  # Task.like → streamed bytes, bytes by lane

    def counted(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yields the same tasks, and counts each."""
        for task in tasks:
            streamed, crossing = self._of(task)
            self.streamed_bytes += streamed
            for lane, nbytes in crossing.items():
                self.link_bytes[lane] = self.link_bytes.get(lane, 0) + nbytes
            yield task

    def forget(self) -> None:
        """Task ids start over. Everything that was kept by a task's id is forgotten."""
        self._known.clear()

    def _of(self, task: Task) -> tuple[int, dict[Lane, int]]:
        """(bytes of weights and KV that a task takes from slower tiers, bytes that it moves over the link by lane). To
        look at all calls of a pass takes 1 ms, so those of a task that comes again are counted once."""
        known = self._known.get(task.like)
        if known is None:
            streamed = streamed_bytes(task, self._units) + kv_loaded_bytes(task)
            known = streamed, link_bytes(task) if self._has_device else {}
            if task.like >= 0:
                if len(self._known) >= _KEPT:
                    self._known.clear()
                self._known[task.like] = known
        return known
