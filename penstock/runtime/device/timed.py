"""Does nothing but wait: every task of every lane takes the time that it is said to take. So schedules of machines that
are not here run in real time, by the executor that runs all others, without weights and without memory.

It proves the executor's order, not what tasks cost: those seconds are given.
"""

from __future__ import annotations

import queue
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
    other."""

    def __init__(self, seconds: Callable[[Task], float], disturbance: float = 0.0, seed: int = 0) -> None:
        self._seconds, self._disturbance, self._seed = seconds, disturbance, seed
        self._lanes: dict[str, _Lane] = {}

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
            lane = self._lanes[name] = _Lane(name)
        return lane.submit(self._wait_s(task), after)

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


class _Waiting:
    """A task of a lane that is no more than a wait."""

    def __init__(self, seconds: float, after: Sequence[Underway]) -> None:
        self._seconds, self._after = seconds, after
        self._ended = threading.Event()
        self._span_s = (0.0, 0.0)

    def do(self) -> None:
        for other in self._after:
            other.wait()
        self._after = ()
        start_s = time.perf_counter()
        time.sleep(self._seconds)
        self._span_s = (start_s, time.perf_counter())
        self._ended.set()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def complete(self) -> bool:
        return self.done

    @property
    def span_s(self) -> tuple[float, float]:
        return self._span_s

    def wait(self) -> None:
        self._ended.wait()


class _Lane:
    """A lane: a queue of waits and the thread that takes them one after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"penstock-timed-{name}", daemon=True)
        self._thread.start()

    def submit(self, seconds: float, after: Sequence[Underway]) -> _Waiting:
        waiting = _Waiting(seconds, after)
        self._queue.put(waiting)
        return waiting

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (waiting := self._queue.get()) is not None:
            waiting.do()
