"""Lanes of devices that are not there: a thread for each lane, which does one task after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from penstock.errors import DeviceFailed
from penstock.runtime.device import Underway


class LaneTask:
    """A task of a lane: its work, and whether that is done."""

    def __init__(self, work: Callable[[], None], after: Sequence[Underway]) -> None:
        self.work, self.after = work, after
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._span_s = (0.0, 0.0)

    def do(self) -> None:
        """Waits for the tasks before this one, then does the work. If one of those failed, this task fails too."""
        try:
            for other in self.after:
                other.wait()
            start_s = time.perf_counter()
            self.work()
            self._span_s = (start_s, time.perf_counter())
        except BaseException as error:
            self._error = error
        self.after = ()
        self._ended.set()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def complete(self) -> bool:
        return self.done and self._error is None

    @property
    def span_s(self) -> tuple[float, float]:
        return self._span_s

    def wait(self) -> None:
        """Waits until the task is done. Raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


class LaneThread:
    """A lane: a queue of tasks and the thread that does them. After an error all later tasks fail, so that nobody waits
    for ever."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[LaneTask | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None], after: Sequence[Underway]) -> LaneTask:
        event = LaneTask(work, after)
        self._queue.put(event)
        return event

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        failed = False
        while (event := self._queue.get()) is not None:
            if failed:
                event.work = _refuse
            event.do()
            failed = failed or not event.complete


def _refuse() -> None:
    raise DeviceFailed("the device failed at an earlier task")
