"""Runs tasks: `run` overlaps the lanes, `run_serial` does one task at a time and is the oracle.

The main thread computes (lane `host`), and lowers the tasks as it takes them. While a task of its own has to wait for a
load, it takes the tasks that follow. So lowering them costs no time: with experts, a layer takes half a millisecond. A
load is only begun here, and the disk's own reader does it. A device's task is only begun too: the device is told which
of its tasks it comes after, and waits for these by itself. Tasks of all other lanes are done by a thread of the lane. A
task waits for the tasks that it names in `after`, and for nothing else.

Every lane begins its tasks in the order in which it was given them. The host and a device also end them in that order.
A disk does not: it has several loads under way, and a later one may be there first (see `_Lane`). An edge names only
the last task of a lane. So to wait for a load is to wait for the loads before it too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import Enum
from itertools import takewhile

from penstock.errors import InternalError
from penstock.graph.demand import Answer
from penstock.graph.open_passes import OpenPass
from penstock.graph.tasks import MOVES, Pass, Task
from penstock.graph.timeline import Span, Timeline, span
from penstock.runtime.bind import OnRoute
from penstock.runtime.device import Underway
from penstock.runtime.dispatch import Work
from penstock.runtime.open_passes import OpenPassRunner
from penstock.spec.places import CPU
from penstock.spec.plan import Unit

_SWEEP = 256  # if a lane has more tasks that nobody waited for, the first ones that are done are forgotten


class Executor:
    """Runs the passes of one plan. Loads for a coming pass may go on between two calls of `run`.

    `units`: the plan's, which timelines name. `origin_s`: the time of time.perf_counter from which timelines count.
    `recording`: whether timelines hold the tasks, which costs 2 µs each."""

    def __init__(self, work: Work, units: Sequence[Unit] = (), origin_s: float | None = None) -> None:
        self._work, self._units, self.recording = work, units, True
        self._lanes: dict[str, _Lane] = {}
        self._handed: dict[int, _Handed] = {}  # by id: tasks handed to a lane and not known to be done
        self._later: dict[int, Task] = {}  # by id, in order: tasks of the main thread that are taken and not done yet
        self._spans: list[Span] = []  # of tasks that ended and are in no timeline yet
        self._origin_s = time.perf_counter() if origin_s is None else origin_s

    def run(self, tasks: Iterable[Task]) -> Timeline:
        """Runs tasks. Returns when all of them are done but those that move weights and KV. Raises the error of the
        first task that failed."""
        start_s = time.perf_counter()
        self._work.begin()
        self._later.clear()
        computing = []
        for task in tasks:
            if CPU in task.lanes:
                self._later[task.id] = task
            else:
                self._do_those_before(task)
                self._hand_over(task)
                if task.calls[0].op not in MOVES:
                    computing.append(task.id)
            while self._later and self._may_begin(next(iter(self._later.values()))):
                self._do_next()
        self.catch_up()
        for other in computing:
            self._wait(other)
        for lane in self._lanes.values():
            self._sweep(lane)
        return self._timeline(start_s)

    def catch_up(self) -> None:
        """Does all tasks of the main thread that were taken so far. Raises as `run`."""
        while self._later:
            self._do_next()

    def run_open(
        self, runner: OpenPassRunner, open_pass: OpenPass, p: Pass, given: Answer | None, heard: Sequence[OnRoute]
    ) -> Timeline:
        """Runs a pass in one piece, after all tasks before it have ended. Raises as `OpenPassRunner.run`, and the error
        of one of these tasks."""
        start_s = time.perf_counter()
        for lane in self._lanes.values():
            while lane.handed:
                self._next(lane)
        self._work.begin()
        runner.run(open_pass, p, given, heard)
        if self.recording:
            self._spans += runner.spans(open_pass, p, self._origin_s)
        return self._timeline(start_s)

    def run_serial(self, tasks: Iterable[Task]) -> Timeline:
        """Runs one task after the other, in the order in which they come. Raises a task's error."""
        start_s = time.perf_counter()
        self._work.begin()
        for task in tasks:
            self._do(task)
        return self._timeline(start_s)

    def drain(self) -> Timeline:
        """Waits for the tasks under way. Returns a timeline of those that ended since the last pass. Raises as
        `run`."""
        start_s = time.perf_counter()
        for lane in self._lanes.values():
            while lane.handed:
                self._next(lane)
        return self._timeline(start_s)

    def close(self) -> None:
        """Ends the lanes. Waits also for loads that failed or that nobody wants: they write to memory."""
        for lane in self._lanes.values():
            lane.stop()
        self._lanes.clear()
        self._handed.clear()
        self._later.clear()

    def _do_next(self) -> None:
        """Does the first of the main thread's tasks, after it has waited for the tasks that it comes after."""
        task = self._later.pop(next(iter(self._later)))
        for other in task.after:
            self._wait(other)
        self._do(task)

    def _do_those_before(self, task: Task) -> None:
        """Does the tasks of the main thread that this task comes after, and all tasks before these."""
        for other in task.after:
            while other in self._later:
                self._do_next()

    def _may_begin(self, task: Task) -> bool:
        """Whether nothing is left that the task has to wait for."""
        for other in task.after:
            handed = self._handed.get(other)
            if handed is not None:
                self._sweep(self._lanes[handed.task.lanes[0]])
                if other in self._handed:
                    return False
        return True

    def _hand_over(self, task: Task) -> None:
        if len(task.lanes) != 1:
            raise InternalError(f"task {task.id} occupies {task.lanes}; this runtime has one lane per task")
        name = task.lanes[0]
        if name not in self._lanes:
            self._lanes[name] = _Lane(name, self._work)
        lane = self._lanes[name]
        if len(lane.handed) > _SWEEP:
            self._sweep(lane)
        waits = [handed for other in task.after for handed in self._unfinished(other)]
        self._handed[task.id] = lane.take(task, waits)

    def _unfinished(self, task_id: int) -> list[_Handed]:
        """The task, if it is not done, and the tasks before it in its lane that may end after it."""
        last = self._handed.get(task_id)
        if last is None or last.on_device:  # whose lanes end their tasks in order
            return [] if last is None else [last]
        lane = self._lanes[last.task.lanes[0]]
        self._sweep(lane)
        before = takewhile(lambda handed: handed is not last, lane.handed)
        return [*before, last] if task_id in self._handed else []

    def _wait(self, task_id: int) -> None:
        """Waits until the task is done, and all tasks before it in its lane: edges name only the last task of a
        lane."""
        handed = self._handed.get(task_id)
        if handed is None:
            return
        lane = self._lanes[handed.task.lanes[0]]
        while task_id in self._handed:
            self._next(lane)

    def _next(self, lane: _Lane) -> None:
        """Waits for the lane's first task, notes its span and forgets it. Raises the task's error."""
        handed = lane.handed[0]
        start_s, end_s = handed.wait()
        # It may have begun, or even ended, while the task before it was under way. In a timeline the tasks of a lane
        # follow each other.
        start_s, end_s = max(start_s, lane.end_s), max(end_s, lane.end_s)
        lane.end_s = end_s
        self._note(handed.task, start_s, end_s)
        lane.handed.popleft()
        del self._handed[handed.task.id]

    def _sweep(self, lane: _Lane) -> None:
        """Forgets the lane's first tasks that are done. A task that failed stays, for the one who waits for it."""
        while lane.handed and lane.handed[0].succeeded:
            self._next(lane)

    def _do(self, task: Task) -> None:
        start_s = time.perf_counter()
        self._work.run(task)
        self._note(task, start_s, time.perf_counter())

    def _note(self, task: Task, start_s: float, end_s: float) -> None:
        if self.recording:
            self._spans.append(span(task, self._units, start_s - self._origin_s, end_s - self._origin_s))

    def _timeline(self, start_s: float) -> Timeline:
        """A timeline of all tasks that ended by now and are in no earlier timeline."""
        end_s = time.perf_counter()
        ended, self._spans = tuple(self._spans), []
        return Timeline(ended, start_s - self._origin_s, end_s - self._origin_s)


class _State(Enum):
    """How far a task in a lane is: WAITING → BEGUN, DONE or FAILED. A task that is BEGUN may become FAILED, where
    waiting for it was interrupted."""

    WAITING = "for tasks of other lanes, or for those before it in its own"
    BEGUN = "it goes on by itself, and its Underway says whether it has ended, and how"
    DONE = "by the lane's thread"
    FAILED = "it could not be begun, or not be done: `error` says why"


class _Handed:
    """A task in a lane. `on_device`: the lane is a device's. It ends its tasks in order, and the device waits for its
    own tasks by itself."""

    def __init__(self, task: Task, on_device: bool) -> None:
        self.task, self.on_device = task, on_device
        self.state = _State.WAITING
        self.error: BaseException | None = None  # of one that FAILED
        self._left_waiting = threading.Event()
        self._underway: Underway | None = None  # of one that was BEGUN
        self._span_s = (0.0, 0.0)  # of one that is DONE

    def begin(self, work: Work, waits: Sequence[_Handed]) -> bool:
        """Begins the task, if it is one that goes on by itself. An error is kept for the one who waits for the task.
        Returns whether the task is no longer WAITING."""
        own = [other._underway for other in waits if other.on_device] if self.on_device else []
        try:
            self._underway = work.start(self.task, [underway for underway in own if underway is not None])
        except BaseException as error:
            self.fail(error)
        if self._underway is not None:
            self._become(_State.BEGUN)
        return self.state is not _State.WAITING

    def do(self, work: Work, waits: Sequence[_Handed]) -> None:
        """Begins the task, or does it here and now. An error is kept for the one who waits for the task."""
        if self.begin(work, waits):
            return
        try:
            start_s = time.perf_counter()
            work.run(self.task)
            self._span_s = (start_s, time.perf_counter())
        except BaseException as error:
            self.fail(error)
        else:
            self._become(_State.DONE)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._become(_State.FAILED)

    @property
    def succeeded(self) -> bool:
        """Whether `wait` returns at once."""
        if self.state is _State.BEGUN:
            assert self._underway is not None
            return self._underway.complete
        return self.state is _State.DONE

    def may_follow(self, other: _Handed) -> bool:
        """Whether `other` is no reason to wait before this task is begun: it is done, or a device that does both will
        wait for it by itself. After a task that failed none is begun here: the lane's thread waits for it, gets the
        error, and fails the tasks that follow."""
        if self.on_device and other.on_device:
            return other.state is _State.BEGUN
        return other.succeeded

    def follow(self, other: _Handed) -> None:
        """Waits until this task may follow `other`. Raises the error of `other`."""
        if self.on_device and other.on_device:
            other._wait_begun()
        else:
            other.wait()

    def settle(self) -> None:
        """Waits until nothing of the task is under way, also where it failed after it was begun: it writes to
        memory."""
        self._left_waiting.wait()
        if self._underway is not None:
            self._underway.wait()

    def wait(self) -> tuple[float, float]:
        """Waits for the task. Returns when it began and ended, in seconds of time.perf_counter. Raises its error."""
        self._wait_begun()
        if self._underway is None:
            return self._span_s
        self._underway.wait()
        return self._underway.span_s

    def _wait_begun(self) -> None:
        self._left_waiting.wait()
        if self.error is not None:
            raise self.error

    def _become(self, state: _State) -> None:
        self.state = state
        self._left_waiting.set()


class _Lane:
    """The tasks of one lane, which begin in the order in which they came. A task is begun by the thread that hands it
    over, without a hop to another thread, if nothing is left to wait for and no task before it waits for the lane's
    thread.

    On a device the tasks also end in that order. A disk has several loads under way, and a later one may be there
    first."""

    def __init__(self, name: str, work: Work) -> None:
        self._name, self._to_do = name, work
        self._on_device = work.on_device(name)
        self.handed: deque[_Handed] = deque()  # tasks that nobody has waited for
        self.end_s = 0.0  # when the last task that was waited for ended
        self._queue: queue.SimpleQueue[tuple[_Handed, list[_Handed]] | None] = queue.SimpleQueue()
        self._last: _Handed | None = None  # the last task that the thread was given
        self._thread: threading.Thread | None = None

    def take(self, task: Task, waits: list[_Handed]) -> _Handed:
        """Begins a task, or gives it to the lane's thread. `waits`: tasks that it comes after and that are not done."""
        handed = _Handed(task, self._on_device)
        self.handed.append(handed)
        try:
            if not self._thread_is_behind and all(handed.may_follow(other) for other in waits):
                if handed.begin(self._to_do, waits):
                    return handed
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"penstock-{self._name}", daemon=True)
                self._thread.start()
            self._last = handed
            self._queue.put((handed, waits))
        except BaseException as error:  # Ctrl-C, between any two lines: without this `stop` would wait for ever
            handed.fail(error)
            raise
        return handed

    @property
    def _thread_is_behind(self) -> bool:
        return self._last is not None and self._last.state is _State.WAITING

    def stop(self) -> None:
        """Ends the lane's thread, and waits for everything that was begun."""
        if self._thread is not None:
            self._queue.put(None)
            with suppress(RuntimeError):  # Ctrl-C came while it was being started: then it has no task
                self._thread.join()
        for handed in self.handed:
            with suppress(BaseException):
                handed.settle()

    def _work(self) -> None:
        failed: BaseException | None = None
        while (item := self._queue.get()) is not None:
            handed, waits = item
            try:
                for other in waits:
                    handed.follow(other)
            except BaseException as error:
                failed = failed or error
            if failed is None:
                handed.do(self._to_do, waits)
                failed = handed.error
            else:  # after an error all later tasks fail with it, so that nobody waits for ever
                handed.fail(failed)
