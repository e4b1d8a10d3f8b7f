"""Defines what the runtime wants of a device: memory of its own, lanes, and tasks that go on by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.graph.tasks import Slot, Task
from penstock.runtime.arena import Arenas
from penstock.runtime.bind import Binding
from penstock.spec.places import GPU
from penstock.spec.plan import Plan

LANES = (GPU.kernels, GPU.to_device, GPU.to_host)  # of the device that this runtime drives


class Underway(Protocol):
    """A task that goes on by itself: a load from a disk, or a task of a device."""

    @property
    def done(self) -> bool:
        """Whether `wait` returns (or raises) at once."""

    @property
    def complete(self) -> bool:
        """Whether `wait` returns at once and raises nothing."""

    @property
    def span_s(self) -> tuple[float, float]:
        """When the task began and ended, in seconds of time.perf_counter. Only of a task that is done."""

    def wait(self) -> object:
        """Returns when the task is done. Raises the task's error if it failed."""


class Device(Protocol):
    """A device that computes. `name`: emulated or cuda. `description`: for people.

    Each of its lanes ends its tasks in the order in which they began. `start` may be called by several threads at
    once, but for one lane by only one thread at a time."""

    name: str
    description: str

    @property
    def note(self) -> str:
        """One line about something that makes this device slower than it should be, or ""."""

    def time_tasks(self, on: bool) -> None:
        """Whether the spans of tasks begun from now on will be read. Where they will not, they may be anything."""

    @property
    def peak_bytes(self) -> int:
        """The most of its memory that this process has taken so far, driver and libraries included."""

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of the host's memory that stand in for the device's own."""

    def allocate(self, arena: str, nbytes: int) -> memoryview | None:
        """Takes memory for an arena. Returns its bytes if the host can see them, else None. Raises DoesNotFit beyond
        the device's limit, and DeviceFailed where the device has no more."""

    def upload(self, target: Slot, source: NDArray[np.uint8]) -> Underway:
        """Begins to copy pinned bytes, uint8 [target's bytes], to a slot in its memory: weights that stay there."""

    def attach(self, plan: Plan, arenas: Arenas, cpu: Callable[[], Binding]) -> None:
        """Prepares the device to compute, now that all arenas are allocated. `cpu`: makes a binding to the CPU's
        kernels, for a device that has no kernels of its own."""

    def start(self, task: Task, after: Sequence[Underway]) -> Underway:
        """Begins a task on its lane, to run after the tasks `after`, which are this device's own. All other tasks that
        it depends on are done already."""

    def begin(self) -> None:
        """A pass starts."""

    def forget(self) -> None:
        """Task ids start over. Everything that was kept by a task's id is forgotten."""

    def close(self) -> None:
        """Waits for the tasks under way and gives the memory back."""


def uses_device(plan: Plan) -> bool:
    """Whether any arena of the plan lies on a device."""
    return any(arena.tier == GPU.executor for arena in plan.arenas)
