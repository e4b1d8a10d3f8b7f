"""What a task of a lane waits for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.graph.tasks import Call, Task
from penstock.runtime.device import Underway
from penstock.runtime.dispatch import Dispatch
from penstock.runtime.execute import Executor
from tests.calls import operands


class Reading:
    """A load that is done when the test says so."""

    span_s = (0.0, 0.0)

    def __init__(self) -> None:
        self.arrived = threading.Event()

    @property
    def done(self) -> bool:
        return self.arrived.is_set()

    complete = done

    def wait(self) -> object:
        return self.arrived.wait(600)


class Two(Dispatch):
    """A disk with two loads under way, and a lane that does its tasks."""

    def __init__(self) -> None:
        self.reads = {0: Reading(), 1: Reading()}
        self.first_was_done: list[bool] = []

    def on_device(self, lane: str) -> bool:
        return False

    def begin(self) -> None:
        pass

    def start(self, task: Task, after: Sequence[Underway] = ()) -> Underway | None:
        return self.reads.get(task.id)

    def run(self, task: Task) -> None:
        self.first_was_done.append(self.reads[0].done)


def test_who_waits_for_a_load_waits_for_those_before_it() -> None:
    """Of a lane an edge names the last; a disk may be done with it before it is done with one that it began earlier."""
    work = Two()
    executor = Executor(work)
    tasks = [
        Task(i, (lane,), (Call(operands(op), 0, None, "int4", 0, 0),), (), (), 0, 0, after)
        for i, (lane, op, after) in enumerate([("disk0", "load", ()), ("disk0", "load", ()), ("h2d0", "lift", (1,))])
    ]
    work.reads[1].arrived.set()
    executor.run(tasks)
    threading.Timer(0.05, work.reads[0].arrived.set).start()
    executor.drain()
    executor.close()
    assert work.first_was_done == [True]
