"""Does nothing but wait: every task of every lane takes the time that it is said to take. So schedules of machines that
are not here run in real time, by the executor that runs all others, without weights and without memory.

It proves the executor's order, not what tasks cost: those seconds are given. A lane that is not the processor's is a
clock, without a thread: the moment at which a task ends is known when it begins, as a device goes on with its next task
by itself. So what a thread oversleeps is the executor's loss alone, and not each lane's, task by task.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from penstock.graph.tasks import Task
from penstock.runtime.device import LANES, Underway
from penstock.spec.places import CPU


class Timed:
    """Work for an executor (`dispatch.Work`). `seconds`: of a task that nothing disturbs. `disturbance`: each takes up
    to so much of it more or less, by `seed` and its number, whatever the order in which lanes come to it.

    Each lane does one task at a time, in order: a disk too, as `planner/simulate` takes it. Lanes do not slow each
    other. A thread that slept longer than it should, as where other processes have the cores, computes for so much
    less afterwards."""

    def __init__(self, seconds: Callable[[Task], float], disturbance: float = 0.0, seed: int = 0) -> None:
        self._seconds, self._disturbance, self._seed = seconds, disturbance, seed
        self._ends_s: dict[str, float] = {}  # of each lane, when its last task ends
        self._alarm = _Alarm()

    def on_device(self, lane: str) -> bool:
        return lane in LANES

    def begin(self) -> None:
        """Nothing is to be done when a pass starts."""

    def start(self, task: Task, after: Sequence[Underway] = ()) -> Underway | None:
        """Begins a task of any lane but the processor's, after those in `after`, which are this device's own. None for
        the processor's."""
        if CPU in task.lanes:
            return None
        name = task.lanes[0]
        before_s = [other.end_s for other in after if isinstance(other, _Waits)]
        start_s = max(time.perf_counter(), self._ends_s.get(name, 0.0), *before_s)
        self._ends_s[name] = start_s + self._wait_s(task)
        return _Waits(start_s, self._ends_s[name], self._alarm)

    def run(self, task: Task) -> None:
        underway = self.start(task)
        if underway is None:
            self._alarm.pass_s(self._wait_s(task))
        else:
            underway.wait()

    def forget(self) -> None:
        """Lanes are idle, whatever was begun."""
        self._ends_s.clear()

    def _wait_s(self, task: Task) -> float:
        by = self._disturbance * random.Random(self._seed * 1_000_003 + task.id).uniform(-1, 1)
        return self._seconds(task) * (1 + by)


class _Alarm(threading.local):
    """Wakes the thread that asks. `late_s`: how much too late it woke last."""

    late_s = 0.0

    def wait_until(self, moment_s: float) -> None:
        if (left_s := moment_s - time.perf_counter()) > 0:
            time.sleep(left_s)
            self.late_s = max(0.0, time.perf_counter() - moment_s)

    def pass_s(self, seconds: float) -> None:
        """Computes for so long, less what the thread is late."""
        moment_s = time.perf_counter() - self.late_s + seconds
        self.late_s = max(0.0, time.perf_counter() - moment_s)  # of one that is over already
        self.wait_until(moment_s)


class _Waits:
    """A task that ends at a moment that is known (`Underway`)."""

    def __init__(self, start_s: float, end_s: float, alarm: _Alarm) -> None:
        self.span_s = (start_s, end_s)
        self._alarm = alarm

    @property
    def end_s(self) -> float:
        return self.span_s[1]

    @property
    def done(self) -> bool:
        return time.perf_counter() >= self.end_s

    @property
    def complete(self) -> bool:
        return self.done

    def wait(self) -> None:
        self._alarm.wait_until(self.end_s)
