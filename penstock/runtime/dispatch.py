"""Who does a task: the host's kernels, its disks, or a device."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.graph.tasks import Task
from penstock.runtime.bind import Binding
from penstock.runtime.device import LANES, Device, Underway


class Dispatch:
    """What an executor knows of the machine. Without a device, tasks on its lanes are a fault of whoever made them."""

    def __init__(self, host: Binding, device: Device | None = None) -> None:
        self._host, self._device = host, device

    def on_device(self, lane: str) -> bool:
        return self._device is not None and lane in LANES

    def begin(self) -> None:
        """A pass starts."""
        self._host.begin()
        if self._device is not None:
            self._device.begin()

    def start(self, task: Task, after: Sequence[Underway] = ()) -> Underway | None:
        """Begins a task that goes on by itself; None for any other, which `run` does."""
        if self._device is not None and task.lanes[0] in LANES:
            return self._device.start(task, after)
        return self._host.start(task)

    def run(self, task: Task) -> None:
        """Does it, here and now."""
        if self._device is not None and task.lanes[0] in LANES:
            self._device.start(task, ()).wait()
        else:
            self._host.run(task)

    def forget(self) -> None:
        """Task ids start over: what was kept by them is forgotten."""
        self._host.forget()
        if self._device is not None:
            self._device.forget()
