"""Runs a task list on a clock instead of a machine: each lane does one task at a time, and lanes slow each other.

A disk's loads, of which several are under way on a machine, come one after the other here, at the disk's full rate.
A task has so much work, in seconds alone; while other lanes are busy it proceeds more slowly (`Cost.factor`). So the
clock goes from event to event: a task starts, a task is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from penstock.graph.tasks import MOVES, Task
from penstock.graph.timeline import Timeline, span
from penstock.planner.cost import Cost
from penstock.spec.places import Lane
from penstock.spec.plan import Unit


class Simulator:
    """Keeps the lanes from pass to pass, so loads that ran ahead are ahead in the next one too.

    `units`: the plan's, which timelines name."""

    def __init__(self, cost: Cost, units: Sequence[Unit] = ()) -> None:
        self._cost, self._units = cost, units
        self._queues: dict[Lane, deque[Task]] = {}
        self._waiting: set[int] = set()  # tasks that are not done
        self._computing: set[int] = set()  # those of them that a pass waits for
        self._running: dict[int, tuple[Task, float, float]] = {}  # task, when it started, seconds of work left
        self._ended: list[tuple[Task, float, float]] = []  # task, when it started and ended
        self._slowed: dict[tuple[tuple[Lane, ...], ...], list[float]] = {}  # by the lanes of all that run
        self.now_s = 0.0

    def run(self, tasks: Iterable[Task]) -> Timeline:
        """The tasks of one pass. It ends when its last task on an executor does; loads for the next pass may still be
        under way. Tokens are sampled in between, so executors wait for that. The spans are of tasks that ended
        since the timeline before."""
        start_s = self.now_s
        self._pass(tasks)
        return self._timeline(start_s)

    def busy_s(self, tasks: Iterable[Task]) -> dict[Lane, float]:
        """As `run`, but all that is told of the timeline is in how many seconds of it each lane had a task."""
        self._pass(tasks)
        total: dict[Lane, float] = {}
        for task, start_s, end_s in self._ended:
            for lane in task.lanes:
                total[lane] = total.get(lane, 0.0) + end_s - start_s
        self._ended = []
        return total

    def drain(self) -> Timeline:
        """Everything that is still under way."""
        start_s = self.now_s
        while self._waiting:
            self._step()
        return self._timeline(start_s)

    def pause(self, seconds: float) -> None:
        """Executors do nothing for so long; loads go on."""
        until_s = self.now_s + seconds
        while self.now_s < until_s * (1 - 1e-12):
            self._step(until_s)

    def _pass(self, tasks: Iterable[Task]) -> None:
        self._add(tasks)
        while self._computing:
            self._step()

    def _add(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            for lane in task.lanes:
                self._queues.setdefault(lane, deque()).append(task)
            self._waiting.add(task.id)
            if task.calls[0].op not in MOVES:
                self._computing.add(task.id)

    def _step(self, until_s: float = float("inf")) -> None:
        """Starts what can start, and goes on to the next task that is done, at most to `until_s`."""
        running, waiting = self._running, self._waiting
        for queue in self._queues.values():
            if queue:
                task = queue[0]
                if task.id not in running and waiting.isdisjoint(task.after) and self._heads(task):
                    running[task.id] = (task, self.now_s, self._cost.seconds(task))
        if not running:
            assert until_s < float("inf"), "a task waits for one that never came"
            self.now_s = until_s
            return
        entries = list(running.values())
        slowed = self._factors(tuple([task.lanes for task, _, _ in entries]))
        ends_s = [left_s * factor for (_, _, left_s), factor in zip(entries, slowed, strict=True)]
        passed_s = min(min(ends_s), until_s - self.now_s)
        self.now_s += passed_s
        for (task, start_s, left_s), factor, end_s in zip(entries, slowed, ends_s, strict=True):
            if end_s <= passed_s * (1 + 1e-12):
                self._finish(task, start_s)
            else:
                running[task.id] = (task, start_s, left_s - passed_s / factor)

    def _factors(self, running: tuple[tuple[Lane, ...], ...]) -> list[float]:
        """How much longer each of the running tasks takes beside the others, by their lanes."""
        found = self._slowed.get(running)
        if found is None:
            busy = frozenset(lane for lanes in running for lane in lanes)
            found = [max(self._cost.factor(lane, busy.difference(lanes)) for lane in lanes) for lanes in running]
            self._slowed[running] = found
        return found

    def _heads(self, task: Task) -> bool:
        """Whether the task is the next of all its lanes."""
        return len(task.lanes) == 1 or all(self._queues[lane][0].id == task.id for lane in task.lanes)

    def _finish(self, task: Task, start_s: float) -> None:
        del self._running[task.id]
        self._waiting.discard(task.id)
        self._computing.discard(task.id)
        for lane in task.lanes:
            self._queues[lane].popleft()
        self._ended.append((task, start_s, self.now_s))

    def _timeline(self, start_s: float) -> Timeline:
        ended, self._ended = self._ended, []
        return Timeline(tuple(span(task, self._units, *times) for task, *times in ended), start_s, self.now_s)


def simulate(tasks: Iterable[Task], cost: Cost) -> Timeline:
    """The predicted timeline of one task list from a standing start, to its last task."""
    simulator = Simulator(cost)
    simulator._add(tasks)
    return simulator.drain()
