"""Runs a task list on a clock instead of a machine: lanes are first in, first out."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.graph.tasks import Task
from penstock.graph.timeline import Span, Timeline, label
from penstock.planner.cost import Cost


class Simulator:
    """Keeps each lane's clock from pass to pass, so loads that ran ahead are ahead in the next one too."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._free_s: dict[str, float] = {}
        self._end_s: dict[int, float] = {}
        self.now_s = 0.0  # when the last pass ended; the next one's first host task starts no earlier

    def run(self, tasks: Iterable[Task]) -> Timeline:
        """Adds the tasks of one pass. The pass ends when its last task on an executor does; loads for the
        next pass may still be under way. Tokens are sampled in between, so executors wait for that."""
        spans = []
        end_s = self.now_s
        for task in tasks:
            ready = [self._end_s.get(other, 0.0) for other in task.after]
            ready += [self._free_s.get(lane, 0.0) for lane in task.lanes]
            computes = task.calls[0].op != "load"
            if computes:
                ready.append(self.now_s)
            start_s = max(ready, default=0.0)
            finish_s = start_s + self._cost.seconds(task)
            for lane in task.lanes:
                self._free_s[lane] = finish_s
            self._end_s[task.id] = finish_s
            if computes:
                end_s = max(end_s, finish_s)
            spans.append(Span(task.id, task.lanes, label(task), start_s, finish_s, task.bytes))
        self.now_s = end_s
        return Timeline(tuple(spans))


def simulate(tasks: Iterable[Task], cost: Cost) -> Timeline:
    """The predicted timeline of one task list from a standing start."""
    return Simulator(cost).run(tasks)
