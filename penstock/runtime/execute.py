"""Runs tasks: `run` overlaps the lanes, `run_serial` does one task at a time and is the oracle.

The main thread computes (lane `host`); every other lane has a thread of its own. Lanes are first in, first
out; a task waits for the tasks that it names in `after`, and for nothing else.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from penstock.errors import InternalError
from penstock.graph.tasks import Task
from penstock.graph.timeline import Span, Timeline, span
from penstock.runtime.bind import Binding
from penstock.spec.plan import Unit

MAIN_LANE = "host"
_PENDING = 256


class Executor:
    """Runs the passes of one plan. Loads for a coming pass may go on between two calls of `run`.

    `units`: the plan's, which timelines name. `origin_s`: when timelines start, of time.perf_counter. `recording`:
    whether timelines hold the tasks, which costs 2 µs each."""

    def __init__(self, binding: Binding, units: Sequence[Unit] = (), origin_s: float | None = None) -> None:
        self._binding, self._units, self.recording = binding, units, True
        self._lanes: dict[str, _Lane] = {}
        self._pending: dict[int, threading.Event] = {}  # tasks handed to a lane and not known to be done
        # Of tasks that ended and are in no timeline yet. Lanes append while a pass ends, so it is never replaced.
        self._spans: deque[Span] = deque()
        self._origin_s = time.perf_counter() if origin_s is None else origin_s

    def run(self, tasks: Iterable[Task]) -> Timeline:
        """Returns when the tasks on the main lane are done. Raises what a lane raised."""
        start_s = time.perf_counter()
        self._binding.begin()
        for task in tasks:
            if MAIN_LANE not in task.lanes:
                self._hand_over(task)
                continue
            for other in task.after:
                self._wait(other)
            self._do(task)
        return self._timeline(start_s)

    def run_serial(self, tasks: Iterable[Task]) -> Timeline:
        """One task after the other, in the order in which they come."""
        start_s = time.perf_counter()
        self._binding.begin()
        for task in tasks:
            self._do(task)
        return self._timeline(start_s)

    def drain(self) -> Timeline:
        """Waits for the loads under way, and returns what ended since the last pass."""
        start_s = time.perf_counter()
        for task in list(self._pending):
            self._wait(task)
        return self._timeline(start_s)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.stop()
        self._lanes.clear()

    def _hand_over(self, task: Task) -> None:
        if len(task.lanes) != 1:
            raise InternalError(f"task {task.id} occupies {task.lanes}; this runtime has one lane per task")
        name = task.lanes[0]
        if name not in self._lanes:
            self._lanes[name] = _Lane(name, self)
        done = threading.Event()
        if len(self._pending) > _PENDING:  # tasks that are done are forgotten
            self._pending = {i: event for i, event in self._pending.items() if not event.is_set()}
        waits = [self._pending[other] for other in task.after if other in self._pending]
        self._pending[task.id] = done
        self._lanes[name].submit(task, waits, done)

    def _wait(self, task_id: int) -> None:
        event = self._pending.get(task_id)
        if event is None:
            return
        event.wait()
        for lane in self._lanes.values():
            if lane.error is not None:
                raise lane.error

    def _do(self, task: Task) -> None:
        start_s = time.perf_counter() - self._origin_s
        self._binding.run(task)
        end_s = time.perf_counter() - self._origin_s
        if self.recording:
            self._spans.append(span(task, self._units, start_s, end_s))

    def _timeline(self, start_s: float) -> Timeline:
        """All that ended by now and is in no earlier timeline."""
        end_s = time.perf_counter()
        ended = tuple(self._spans.popleft() for _ in range(len(self._spans)))
        return Timeline(ended, start_s - self._origin_s, end_s - self._origin_s)


class _Lane:
    """A thread that does the tasks of one lane in the order in which they came."""

    def __init__(self, name: str, executor: Executor) -> None:
        self._executor = executor
        self._queue: queue.SimpleQueue[tuple[Task, list[threading.Event], threading.Event] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: Task, waits: list[threading.Event], done: threading.Event) -> None:
        self._queue.put((task, waits, done))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        failed = False
        while (item := self._queue.get()) is not None:
            task, waits, done = item
            if not failed:  # after an error the rest is answered, not done: nobody may wait for ever
                try:
                    for event in waits:
                        event.wait()
                    self._executor._do(task)
                except BaseException as error:
                    self.error, failed = error, True
            done.set()
