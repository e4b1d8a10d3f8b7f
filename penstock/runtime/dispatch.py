"""Hands each task to whoever does it: the host's kernels, the host's disks, or a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.graph.tasks import Task
from penstock.runtime.bind import Binding
from penstock.runtime.device import LANES, Device, Underway


class Work(Protocol):
    """All that `execute` knows of the machine: how to begin a task, and how to do one."""

    def on_device(self, lane: str) -> bool:
        """Whether a device does the tasks of this lane."""

    def begin(self) -> None:
        """Is told that a pass starts."""

    def start(self, task: Task, after: Sequence[Underway] = ()) -> Underway | None:
        """Begins a task that goes on by itself, to run after the tasks `after`. Returns None if the task is none of
        these: then `run` does it."""

    def run(self, task: Task) -> None:
        """Does a task and returns when it is done."""

    def forget(self) -> None:
        """Task ids start over. Everything that was kept by a task's id is forgotten."""


class Dispatch:
    """The work of a plan here: by the host's kernels and disks, and by a device. Without a device a plan must not have
    tasks on a device's lanes."""

    def __init__(self, host: Binding, device: Device | None = None) -> None:
        self._host, self._device = host, device

    def on_device(self, lane: str) -> bool:
        return self._device is not None and lane in LANES

    def begin(self) -> None:
        self._host.begin()
        if self._device is not None:
            self._device.begin()

    def start(self, task: Task, after: Sequence[Underway] = ()) -> Underway | None:
        if self._device is not None and task.lanes[0] in LANES:
            return self._device.start(task, after)
        return self._host.start(task)

    def run(self, task: Task) -> None:
        if self._device is not None and task.lanes[0] in LANES:
            self._device.start(task, ()).wait()
        else:
            self._host.run(task)

    def forget(self) -> None:
        self._host.forget()
        if self._device is not None:
            self._device.forget()
