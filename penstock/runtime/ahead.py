"""Computes a model's first pass while the weights that it reads are still being loaded.

Loads end in the order of the plan's units, which is the order in which a pass reads them. So a thread follows them: it
does the pass call by call, and waits before each call until the weights of that call are there. When loading is over,
the thread stops, and what is left of the pass is done when the pass is wanted. So nothing computes beside what comes
between loading and the first word, such as a look at the RAM's speed.

This is for plans of which a pass streams nothing. Where weights stream, the disk has no time to spare, and computing is
hidden behind its loads already. The pass's tasks are those that the lowering gives; they are all the CPU's, so their
order is all that they wait for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from penstock.graph import ops
from penstock.graph.tasks import Call, Task
from penstock.runtime.dispatch import Work
from penstock.spec.places import HOST

WEIGHTS = f"{HOST}.weights"


class Arrived:
    """How far loading has come: all bytes of the arena `host.weights` below `end` are there."""

    def __init__(self) -> None:
        self._changed, self._end, self._over = threading.Condition(), 0, False

    def note(self, end: int) -> None:
        """The bytes below `end` are there, and were compared with their checksums."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def stop(self) -> None:
        """Loading has ended, or failed: nobody shall wait any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, end: int) -> bool:
        """Waits for the bytes below `end`. Returns False where loading is over, whatever is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._end >= end)
            return not self._over


class PassAhead:
    """One pass, done call by call. `tasks`: the pass's, of the CPU alone. `work`: does them. Nobody else may use it
    until the pass is done, or given up."""

    def __init__(self, tasks: Iterable[Task], work: Work) -> None:
        self._work = work
        self._left = deque(task._replace(calls=(call,)) for task in tasks for call in task.calls)
        self._failed = False
        self.calls_ahead = 0  # that were done while weights were loaded

    @contextmanager
    def following(self) -> Iterator[Arrived]:
        """In this block a thread does the pass as far as the weights have come that the caller notes. At its end no
        call is under way. An error of the pass is not raised: `finish` says that there is nothing to finish."""
        arrived = Arrived()
        thread = threading.Thread(target=self._follow, args=(arrived,), name="penstock-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads may be started: then the whole pass is done when it is wanted
            yield arrived
            return
        try:
            yield arrived
        finally:
            arrived.stop()
            thread.join()

    def finish(self) -> bool:
        """Does what is left of the pass. Returns False where its beginning has failed: then it has to be done anew.
        Raises as `Work.run`."""
        if self._failed:
            return False
        self._begin()
        while self._left:
            self._work.run(self._left.popleft())
        return True

    def _begin(self) -> None:
        if not self.calls_ahead:
            self._work.begin()

    def _follow(self, arrived: Arrived) -> None:
        try:
            while self._left and arrived.wait(weights_end(self._left[0].calls[0])):
                self._begin()
                self._work.run(self._left.popleft())
                self.calls_ahead += 1
        except BaseException:
            self._failed = True


def weights_end(call: Call) -> int:
    """The end of the last byte of weights in RAM that a call reads; 0 where it reads none."""
    end, operands = 0, cast(tuple[Any, ...], call.operands)
    for operand in ops.OPS[call.op].operands:
        value = operands[operand.field]
        for slot in value if operand.many else (value,):
            if slot.arena == WEIGHTS:
                end = max(end, slot.hi)
    return end
