"""Computes a model's first pass while the weights that it reads are still being loaded.

Weights are loaded in the order in which the pass reads them. A thread follows: it does the pass call by call, and waits
before each call until the weights of that call are there. When loading is over, the thread stops. The rest of the pass
is done when somebody asks for the pass. So nothing is computed while the session does what comes between loading and
the first word, such as to measure the RAM's speed.

This is done for plans that stream nothing. If weights stream, the disk has no time to spare, and computing is hidden
behind its loads already. The tasks of the pass are those that the lowering gives. They are all tasks of the CPU, so to
do them in their order is enough.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from penstock.graph import ops
from penstock.graph.tasks import Call, Slot, Task
from penstock.runtime.dispatch import Work
from penstock.spec.places import HOST

WEIGHTS = f"{HOST}.weights"


class Arrived:
    """Counts the loads that are done, and knows for how many of them each call has to wait. `calls`: the pass's calls,
    in order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._changed, self._done, self._over = threading.Condition(), 0, False
        self._needed: list[int] = []  # for each call, how many loads have to be done

    def order(self, slots: Sequence[Slot]) -> list[int]:
        """The order in which to load weights into `slots`: first those that the calls read, in the order of the calls,
        then the others. The plan's own order is nearly the same, but the norms at the model's ends come last in it, and
        are needed before the first layer."""
        places = sorted((slot.arena, slot.lo, i) for i, slot in enumerate(slots))
        order: dict[int, None] = {}
        needed = []
        for call in self._calls:
            for arena, lo, hi in weights_of(call):
                first = bisect_right(places, (arena, lo, len(slots))) - 1
                for _, _, i in places[first : bisect_left(places, (arena, hi, -1))]:
                    order.setdefault(i)
            needed.append(len(order))
        self._needed = needed
        return list(order | dict.fromkeys(range(len(slots))))

    def note(self, done: int) -> None:
        """Notes that so many loads are done: their bytes are in memory, and were compared with their checksums."""
        with self._changed:
            self._done = done
            self._changed.notify_all()

    def stop(self) -> None:
        """Notes that loading has ended, or failed. Nobody waits any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, number: int) -> bool:
        """Waits until the weights of a call are there. `number`: the call's place in the pass. Returns False if loading
        is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or (self._done and self._done >= self._needed[number]))
            return not self._over


class PassAhead:
    """Does one pass call by call. `tasks`: the tasks of the pass, all of them the CPU's. `work`: does the calls. Nobody
    else may use it until the pass is done, or given up."""

    def __init__(self, tasks: Iterable[Task], work: Work) -> None:
        self._work = work
        self._tasks = [task._replace(calls=(call,)) for task in tasks for call in task.calls]
        self._failed = False
        self.calls_done = 0

    @contextmanager
    def following(self) -> Iterator[Arrived]:
        """While this block runs, a thread does the pass as far as the caller's loads have come. When the block ends, no
        call is under way. An error of the pass is not raised here: `finish` then returns False."""
        arrived = Arrived([task.calls[0] for task in self._tasks])
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
        """Does the rest of the pass. Returns False if its beginning has failed, and the pass has to be done anew.
        Raises as `Work.run`."""
        while not self._failed and self.calls_done < len(self._tasks):
            self._do_next()
        return not self._failed

    def _do_next(self) -> None:
        if not self.calls_done:
            self._work.begin()
        self._work.run(self._tasks[self.calls_done])
        self.calls_done += 1

    def _follow(self, arrived: Arrived) -> None:
        try:
            while self.calls_done < len(self._tasks) and arrived.wait(self.calls_done):
                self._do_next()
        except BaseException:
            self._failed = True


def weights_of(call: Call) -> list[Slot]:
    """The slots of weights in RAM that a call reads."""
    operands = cast(tuple[Any, ...], call.operands)
    slots: list[Slot] = []
    for operand in ops.OPS[call.op].operands:
        value = operands[operand.field]
        slots += value if operand.many else (value,)
    return [slot for slot in slots if slot.arena == WEIGHTS]
