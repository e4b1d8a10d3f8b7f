"""Predicts when each task of a pass begins and ends, by running the tasks on a simulated clock.

Each lane does one task at a time, in the order of the tasks. `Cost.seconds` is a task's work, in seconds. While other
lanes are busy the task proceeds more slowly (`Cost.factor`). The clock jumps from event to event: a task begins, or a
task ends.

A real disk has several loads under way at once. Here they come one after the other, each at the disk's full rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.graph.demand import Answer
from penstock.graph.lower import Lowering
from penstock.graph.tasks import MOVES, Pass, Task
from penstock.graph.timeline import Timeline, span
from penstock.planner.cost import Cost
from penstock.spec.places import Lane
from penstock.spec.plan import Unit

# Passes that come before the first one whose time counts. Loads for the first ran ahead in the pass before, and calls
# are prepared for tasks that come again from the fourth pass of a shape on (`graph/recurring`).
WARM_PASSES = 3


class Lowered(NamedTuple):
    """The tasks of a pass. `one_piece`: one native program does them, an open pass (`graph/open_passes`)."""

    tasks: list[Task]
    one_piece: bool


def lowered_pass(lowering: Lowering, p: Pass, answer: Answer) -> Lowered:
    """The next pass of a lowering, as the engine runs it: an open pass in one piece from the second of its shape on."""
    one_piece = lowering.open_pass(p) is not None
    return Lowered(list(lowering.step(p, answer)), one_piece)


class Simulator:
    """A simulated clock with its lanes. It is kept from pass to pass, so that loads which run ahead in one pass are
    ahead in the next one too.

    units           the plan's units, which timelines name
    now_s           the clock in seconds
    """

    def __init__(self, cost: Cost, units: Sequence[Unit] = ()) -> None:
        self._cost, self._units = cost, units
        self._queues: dict[Lane, deque[Task]] = {}
        self._waiting: set[int] = set()  # ids of tasks that have not ended
        self._computing: set[int] = set()  # ids of the waiting tasks that a pass waits for: all but moves
        self._in_one_piece: set[int] = set()  # ids of the waiting tasks that a native program does
        self._running: dict[int, tuple[Task, float, float]] = {}  # id → (task, when it began, seconds of work left)
        self._ended: list[tuple[Task, float, float]] = []  # (task, when it began, when it ended)
        self._slowed: dict[tuple[tuple[Lane, ...], ...], list[float]] = {}  # lanes of all running tasks → `_factors`
        self.now_s = 0.0

    def run(self, tasks: Iterable[Task], one_piece: bool = False) -> Timeline:
        """Runs the tasks of one pass. `one_piece`: a native program does them (`lowered_pass`). The pass ends when its
        last task on an executor ends. Loads for the next pass may still be under way then.

        The timeline has a span for each task that ended since the last timeline."""
        start_s = self.now_s
        self._pass(tasks, one_piece)
        return self._timeline(start_s)

    def busy_s(self, tasks: Iterable[Task], one_piece: bool = False) -> dict[Lane, float]:
        """Runs the tasks of one pass, as `run` does. Lane → the seconds of the tasks that ended on it since the last
        timeline."""
        self._pass(tasks, one_piece)
        total: dict[Lane, float] = {}
        for task, start_s, end_s in self._ended:
            for lane in task.lanes:
                total[lane] = total.get(lane, 0.0) + end_s - start_s
        self._ended = []
        return total

    def drain(self) -> Timeline:
        """Runs the tasks that are still under way to their ends."""
        start_s = self.now_s
        while self._waiting:
            self._step()
        return self._timeline(start_s)

    def pause(self, seconds: float) -> None:
        """Lets the executors do nothing for some seconds, as between two passes. Loads go on."""
        until_s = self.now_s + seconds
        while self.now_s < until_s * (1 - 1e-12):
            self._step(until_s)

    def _pass(self, tasks: Iterable[Task], one_piece: bool) -> None:
        self._add(tasks, one_piece)
        while self._computing:
            self._step()

    def _add(self, tasks: Iterable[Task], one_piece: bool = False) -> None:
        for task in tasks:
            for lane in task.lanes:
                self._queues.setdefault(lane, deque()).append(task)
            self._waiting.add(task.id)
            if one_piece:
                self._in_one_piece.add(task.id)
            if task.calls[0].op not in MOVES:
                self._computing.add(task.id)

    def _step(self, until_s: float = float("inf")) -> None:
        """Starts the tasks that can start, and moves the clock to the next end of a task, at most to `until_s`."""
        running, waiting = self._running, self._waiting
        for queue in self._queues.values():
            if queue:
                task = queue[0]
                if task.id not in running and waiting.isdisjoint(task.after) and self._heads(task):
                    seconds = self._cost.seconds(task, task.id in self._in_one_piece)
                    running[task.id] = (task, self.now_s, seconds)
        if not running:
            assert until_s < float("inf"), "a task waits for one that never came"
            self.now_s = until_s
            return
        entries = list(running.values())
        slowed = self._factors(tuple([task.lanes for task, _, _ in entries]))
        ends_s = [entry[2] * factor for entry, factor in zip(entries, slowed, strict=True)]
        passed_s = min(*ends_s, until_s - self.now_s)
        self.now_s += passed_s
        for (task, start_s, left_s), factor, end_s in zip(entries, slowed, ends_s, strict=True):
            if end_s <= passed_s * (1 + 1e-12):
                self._finish(task, start_s)
            else:
                running[task.id] = (task, start_s, left_s - passed_s / factor)

    def _factors(self, running: tuple[tuple[Lane, ...], ...]) -> list[float]:
        """How many times as long each of the running tasks takes beside the others. `running`: the lanes of each."""
        factors = self._slowed.get(running)
        if factors is None:
            busy = frozenset(lane for lanes in running for lane in lanes)
            factors = [max(self._cost.factor(lane, busy.difference(lanes)) for lane in lanes) for lanes in running]
            self._slowed[running] = factors
        return factors

    def _heads(self, task: Task) -> bool:
        """Whether the task is the next one of each of its lanes."""
        return len(task.lanes) == 1 or all(self._queues[lane][0].id == task.id for lane in task.lanes)

    def _finish(self, task: Task, start_s: float) -> None:
        del self._running[task.id]
        self._waiting.discard(task.id)
        self._computing.discard(task.id)
        self._in_one_piece.discard(task.id)
        for lane in task.lanes:
            self._queues[lane].popleft()
        self._ended.append((task, start_s, self.now_s))

    def _timeline(self, start_s: float) -> Timeline:
        ended, self._ended = self._ended, []
        return Timeline(tuple(span(task, self._units, *times) for task, *times in ended), start_s, self.now_s)


def simulate(tasks: Iterable[Task], cost: Cost) -> Timeline:
    """The predicted timeline of one task list, which begins on idle lanes, up to the end of its last task."""
    simulator = Simulator(cost)
    simulator._add(tasks)
    return simulator.drain()
