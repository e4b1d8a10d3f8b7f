"""What the tasks of passes take from slower tiers, and what they move over the link to a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.graph.tasks import Task, kv_loaded_bytes, link_bytes, streamed_bytes
from penstock.spec.places import Lane
from penstock.spec.plan import Unit


class Traffic:
    """Counts tasks as they pass by. `streamed_bytes`: of weights and KV that they read from rings and windows;
    `link_bytes`: by lane, with a device."""

    def __init__(self, units: Sequence[Unit], has_device: bool) -> None:
        self._units, self._has_device = units, has_device
        self.streamed_bytes = 0  # whoever wants those of a pass sets it back
        self.link_bytes: dict[Lane, int] = {}
        self._crossed: dict[int, dict[Lane, int]] = {}  # of tasks that come again

    def counted(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """The same tasks."""
        for task in tasks:
            if task.like < 0:  # what comes again streams nothing, and to look at all its calls takes a millisecond
                self.streamed_bytes += streamed_bytes(task, self._units) + kv_loaded_bytes(task)
            if self._has_device:
                for lane, nbytes in self._crossing(task).items():
                    self.link_bytes[lane] = self.link_bytes.get(lane, 0) + nbytes
            yield task

    def forget(self) -> None:
        """Task ids start over."""
        self._crossed.clear()

    def _crossing(self, task: Task) -> dict[Lane, int]:
        crossed = self._crossed.get(task.like)
        if crossed is None:
            crossed = link_bytes(task)
            if task.like >= 0:
                self._crossed[task.like] = crossed
        return crossed
