"""The seam to a device: memory of its own, lanes of its own, tasks that are begun and go on by themselves."""

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
    """A task that goes on by itself: a load of a disk, or what a device was given."""

    @property
    def done(self) -> bool:
        """Whether `wait` returns (or raises) at once."""

    @property
    def complete(self) -> bool:
        """Whether `wait` returns at once and raises nothing."""

    @property
    def span_s(self) -> tuple[float, float]:
        """When it began and ended, on the clock of time.perf_counter. Only of one that is done."""

    def wait(self) -> object:
        """Returns when it is done. Raises what it raised."""


class Device(Protocol):
    """`name`: emulated or cuda. `description`: for people. A device's lanes end tasks in their order; `start` may be
    called by several threads, of one lane by one at a time."""

    name: str
    description: str

    @property
    def note(self) -> str:
        """What is not as it should be, one line or nothing."""

    def time_tasks(self, on: bool) -> None:
        """Whether spans are wanted of the tasks to come; without, they may be anything."""

    @property
    def peak_bytes(self) -> int:
        """The most of its memory that this process has taken so far, driver and libraries included."""

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of the host's memory that stand in for the device's own."""

    def allocate(self, arena: str, nbytes: int) -> memoryview | None:
        """Takes memory for an arena; the bytes where the host can see them. Raises DoesNotFit, DeviceFailed."""

    def upload(self, target: Slot, source: NDArray[np.uint8]) -> Underway:
        """Begins to copy pinned bytes to a slot in its memory: weights that stay there."""

    def attach(self, plan: Plan, arenas: Arenas, cpu: Callable[[], Binding]) -> None:
        """The arenas are there: whatever computes is made. `cpu`: makes the CPU's kernels, for a device that has none
        of its own."""

    def start(self, task: Task, after: Sequence[Underway]) -> Underway:
        """Begins a task on its lane, to run after these, which are its own; what else the task waits for is done."""

    def begin(self) -> None:
        """A pass starts."""

    def forget(self) -> None:
        """Task ids start over."""

    def close(self) -> None:
        """Waits for what is under way and gives the memory back."""


def uses_device(plan: Plan) -> bool:
    return any(arena.tier == GPU.executor for arena in plan.arenas)
