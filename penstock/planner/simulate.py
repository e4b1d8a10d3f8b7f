"""Runs a task list on a clock instead of a machine: lanes are first in, first out, and share what they share.

A task has so much work, in seconds alone; while other lanes are busy it proceeds more slowly (`Cost.factor`). So the
clock goes from event to event: a task starts, a task is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from penstock.graph.tasks import MOVES, Task
from penstock.graph.timeline import Span, Timeline, span
from penstock.planner.cost import Cost
from penstock.spec.plan import Unit


class Simulator:
    """Keeps the lanes from pass to pass, so loads that ran ahead are ahead in the next one too.

    `units`: the plan's, which timelines name."""

    def __init__(self, cost: Cost, units: Sequence[Unit] = ()) -> None:
        self._cost, self._units = cost, units
        self._queues: dict[str, deque[Task]] = {}
        self._waiting: set[int] = set()  # tasks that are not done
        self._running: dict[int, tuple[Task, float, float]] = {}  # task, when it started, seconds of work left
        self._spans: list[Span] = []
        self.now_s = 0.0

    def run(self, tasks: Iterable[Task]) -> Timeline:
        """The tasks of one pass. It ends when its last task on an executor does; loads for the next pass may still be
        under way. Tokens are sampled in between, so executors wait for that. The spans are of tasks that ended
        since the timeline before."""
        start_s, computing = self.now_s, self._add(tasks)
        while not computing.isdisjoint(self._waiting):
            self._step()
        return self._timeline(start_s)

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

    def _add(self, tasks: Iterable[Task]) -> set[int]:
        computing = set()
        for task in tasks:
            for lane in task.lanes:
                self._queues.setdefault(lane, deque()).append(task)
            self._waiting.add(task.id)
            if task.calls[0].op not in MOVES:
                computing.add(task.id)
        return computing

    def _step(self, until_s: float = float("inf")) -> None:
        """Starts what can start, and goes on to the next task that is done, at most to `until_s`."""
        for queue in self._queues.values():
            if queue and queue[0].id not in self._running and self._ready(queue[0]):
                self._running[queue[0].id] = (queue[0], self.now_s, self._cost.seconds(queue[0]))
        if not self._running:
            assert until_s < float("inf"), "a task waits for one that never came"
            self.now_s = until_s
            return
        busy = frozenset(lane for task, _, _ in self._running.values() for lane in task.lanes)
        factors = {}
        for i, (task, _, _) in self._running.items():
            others = busy.difference(task.lanes)
            factors[i] = max(self._cost.factor(lane, others) for lane in task.lanes)
        next_s = min(left_s * factors[i] for i, (_, _, left_s) in self._running.items())
        passed_s = min(next_s, until_s - self.now_s)
        self.now_s += passed_s
        for i, (task, start_s, left_s) in list(self._running.items()):
            if left_s * factors[i] <= passed_s * (1 + 1e-12):
                self._finish(task, start_s)
            else:
                self._running[i] = (task, start_s, left_s - passed_s / factors[i])

    def _ready(self, task: Task) -> bool:
        heads = all(self._queues[lane][0].id == task.id for lane in task.lanes)
        return heads and self._waiting.isdisjoint(task.after)

    def _finish(self, task: Task, start_s: float) -> None:
        del self._running[task.id]
        self._waiting.discard(task.id)
        for lane in task.lanes:
            self._queues[lane].popleft()
        self._spans.append(span(task, self._units, start_s, self.now_s))

    def _timeline(self, start_s: float) -> Timeline:
        ended, self._spans = tuple(self._spans), []
        return Timeline(ended, start_s, self.now_s)


def simulate(tasks: Iterable[Task], cost: Cost) -> Timeline:
    """The predicted timeline of one task list from a standing start, to its last task."""
    simulator = Simulator(cost)
    simulator._add(tasks)
    return simulator.drain()
