"""Does nothing but wait: every task of every lane takes the time that it is said to take. So schedules of machines that
are not here run in real time, by the executor that runs all others, without weights and without memory.

It proves the executor's order, not what tasks cost: those seconds are given.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from penstock.graph.tasks import Task
from penstock.runtime.device import LANES, Underway
from penstock.runtime.device.lane_thread import LaneThread
from penstock.spec.places import CPU


class Timed:
    """Work for an executor (`dispatch.Work`). `seconds`: of a task that nothing disturbs. `disturbance`: each takes up
    to so much of it more or less, by `seed` and its number, whatever the order in which lanes come to it.

    Each lane does one task at a time, in order: a disk too, as `planner/simulate` takes it. Lanes do not slow each
    other."""

    def __init__(self, seconds: Callable[[Task], float], disturbance: float = 0.0, seed: int = 0) -> None:
        self._seconds, self._disturbance, self._seed = seconds, disturbance, seed
        self._lanes: dict[str, LaneThread] = {}

    def on_device(self, lane: str) -> bool:
        return lane in LANES

    def begin(self) -> None:
        """Nothing is to be done when a pass starts."""

    def start(self, task: Task, after: Sequence[Underway] = ()) -> Underway | None:
        """Begins a task of any lane but the processor's, to wait after those in `after`. None for the processor's."""
        if CPU in task.lanes:
            return None
        name = task.lanes[0]
        lane = self._lanes.get(name)
        if lane is None:  # a lane starts its thread as it is made
            lane = self._lanes[name] = LaneThread(f"timed-{name}")
        return lane.submit(partial(time.sleep, self._wait_s(task)), after)

    def run(self, task: Task) -> None:
        underway = self.start(task)
        if underway is None:
            time.sleep(self._wait_s(task))
        else:
            underway.wait()

    def forget(self) -> None:
        """Ends the lanes' threads. New ones begin when they are needed."""
        for lane in self._lanes.values():
            lane.stop()
        self._lanes.clear()

    def _wait_s(self, task: Task) -> float:
        by = self._disturbance * random.Random(self._seed * 1_000_003 + task.id).uniform(-1, 1)
        return self._seconds(task) * (1 + by)
