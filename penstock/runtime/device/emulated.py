"""Stands in for a device where there is none, to test correctness and schedules. Its speed means nothing.

It has memory of its own with a hard cap, a thread for each lane, and copies at a set bandwidth; the CPU's kernels
compute. A slot that is written over the link is filled with NaN when the write starts, so that a missing edge shows as
a wrong answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import DoesNotFit
from penstock.graph.tasks import Slot, Task
from penstock.runtime.arena import Arenas
from penstock.runtime.bind import Binding
from penstock.runtime.device import LANES, Underway
from penstock.runtime.device.lane_thread import LaneThread
from penstock.spec.places import GPU
from penstock.spec.plan import Plan
from penstock.units import format_bytes

LINK_BYTES_PER_S = 6e9  # a laptop's PCIe 3.0 with 8 lanes: slow enough that copying memory keeps up


class EmulatedDevice:
    """An emulated device. `limit_bytes`: of its memory. `link_bytes_per_s`: in each direction. `jitter_s`: every task
    begins up to so much later, at random (by `seed`), so that tests see many interleavings."""

    name, note = "emulated", ""

    def __init__(
        self, limit_bytes: int, link_bytes_per_s: float = LINK_BYTES_PER_S, jitter_s: float = 0.0, seed: int = 0
    ) -> None:
        self.description = f"an emulated device of {format_bytes(limit_bytes)}: for tests, its speed means nothing"
        self._limit_bytes, self._link_bytes_per_s = limit_bytes, link_bytes_per_s
        self._jitter_s, self._random = jitter_s, random.Random(seed)
        self._memory: dict[str, _native.Memory] = {}
        self.borrowed_bytes = 0
        self._lanes: dict[str, LaneThread] = {}
        self._binding: Binding | None = None

    def time_tasks(self, on: bool) -> None:
        """Nothing to do: tasks are always timed."""

    @property
    def peak_bytes(self) -> int:
        return self.borrowed_bytes

    def allocate(self, arena: str, nbytes: int) -> memoryview:
        """Memory of the device. Raises DoesNotFit beyond its limit."""
        need_bytes = self.borrowed_bytes + nbytes
        if need_bytes > self._limit_bytes:
            raise DoesNotFit(
                f"device memory of {format_bytes(self._limit_bytes)} is too little: with {arena} it would be"
                f" {format_bytes(need_bytes)}",
                tier=GPU.executor,
                need_bytes=need_bytes,
                have_bytes=self._limit_bytes,
                minimum_bytes=need_bytes,
            )
        memory = _native.Memory(nbytes, True)
        memory.populate()
        self._memory[arena] = memory
        self.borrowed_bytes += nbytes
        return memoryview(memory)

    def upload(self, target: Slot, source: NDArray[np.uint8]) -> Underway:
        """As `Device.upload`. `source`: uint8 [target's bytes]."""
        memory = np.frombuffer(memoryview(self._memory[target.arena]), dtype=np.uint8)

        def copy() -> None:
            memory[target.lo : target.hi] = source

        return self._lane(GPU.to_device).submit(copy, ())

    def attach(self, plan: Plan, arenas: Arenas, cpu: Callable[[], Binding]) -> None:
        self._binding = cpu()

    def start(self, task: Task, after: Sequence[Underway]) -> Underway:
        delay_s = self._random.random() * self._jitter_s
        return self._lane(task.lanes[0]).submit(lambda: self._do(task, delay_s), after)

    def begin(self) -> None:
        if self._binding is not None:
            self._binding.begin()

    def forget(self) -> None:
        self._stop()
        if self._binding is not None:
            self._binding.forget()

    def close(self) -> None:
        self._stop()
        self._memory.clear()

    def _stop(self) -> None:
        """Waits for the tasks under way and ends the lanes. New lanes take the place of one that failed."""
        for lane in self._lanes.values():
            lane.stop()
        self._lanes.clear()

    def _lane(self, name: str) -> LaneThread:
        if name not in self._lanes:
            assert name in LANES, name
            self._lanes[name] = LaneThread(f"emulated-{name}")
        return self._lanes[name]

    def _do(self, task: Task, delay_s: float) -> None:
        assert self._binding is not None, "a device computes when it is attached"
        if delay_s:
            time.sleep(delay_s)
        start_s = time.perf_counter()
        self._binding.run(task)
        if task.lanes[0] != GPU.kernels:
            time.sleep(max(0.0, task.bytes / self._link_bytes_per_s - (time.perf_counter() - start_s)))
