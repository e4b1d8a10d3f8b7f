"""Runs the lanes of a GPU as streams, and tells by events when a task is done. On the processor a task is done at
once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from penstock.errors import DeviceFailed, PenstockError
from penstock.runtime.device import Underway


class Enqueued:
    """Work on a stream, between two events. `base`: an earlier event, and its time in seconds of time.perf_counter."""

    def __init__(self, begun: Any, ended: Any, base: tuple[Any, float]) -> None:
        self._begun, self.ended, self._base = begun, ended, base
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        if self._error is None:
            try:
                return bool(self.ended.query())
            except RuntimeError as error:
                self._error = failed(error)
        return True

    @property
    def complete(self) -> bool:
        return self.done and self._error is None

    @property
    def span_s(self) -> tuple[float, float]:
        base_event, base_s = self._base
        if self._begun is None:
            return base_s, base_s
        return base_s + base_event.elapsed_time(self._begun) / 1e3, base_s + base_event.elapsed_time(self.ended) / 1e3

    def wait(self) -> None:
        """Waits until the work is done. Raises DeviceFailed if it failed."""
        if self._error is None:
            try:
                self.ended.synchronize()
            except RuntimeError as error:
                self._error = failed(error)
        if self._error is not None:
            raise self._error


class AlreadyDone:
    """Work that was done as soon as it was enqueued."""

    done = True

    def __init__(self, start_s: float, end_s: float, error: BaseException | None) -> None:
        self.span_s, self._error = (start_s, end_s), error
        self.complete = error is None

    def wait(self) -> None:
        """Returns at once. Raises the error by which the work failed, if it did."""
        if self._error is not None:
            raise self._error


class CudaStreams:
    """A stream for each lane. `enqueue` calls `work` with the lane's stream current. What `work` launches runs there
    after the tasks `after`, which are this device's own. It raises DeviceFailed where launching fails."""

    def __init__(self, device: torch.device, lanes: Sequence[str]) -> None:
        self._torch: Any = torch.get_device_module(device)
        self._device = device
        self._streams = {lane: self._torch.Stream(device=device) for lane in lanes}
        self.timed = False  # whether spans will be read, which costs two timed events a task
        self._base = self._now()

    def stream(self, lane: str) -> Any:
        return self._streams[lane]

    def on(self, lane: str) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._torch.stream(self._streams[lane])
        return context

    def enqueue(self, lane: str, work: Callable[[], None], after: Sequence[Underway]) -> Underway:
        """Begins `work` on a lane, after the tasks `after`. Raises DeviceFailed if launching fails, and PenstockErrors
        of `work` as they are."""
        stream = self._streams[lane]
        try:
            with self._torch.device(self._device), self._torch.stream(stream):
                for other in after:
                    assert isinstance(other, Enqueued), "a device waits for its own tasks"
                    stream.wait_event(other.ended)
                timed = self.timed  # another thread may change it meanwhile
                begun = self._record(stream, timed) if timed else None
                work()
                return Enqueued(begun, self._record(stream, timed), self._base)
        except (PenstockError, AssertionError):
            raise
        except Exception as error:  # Triton's errors are no RuntimeErrors
            raise failed(error) from error

    def _record(self, stream: Any, timed: bool) -> Any:
        event = self._torch.Event(enable_timing=timed)
        event.record(stream)
        return event

    def _now(self) -> tuple[Any, float]:
        event = self._torch.Event(enable_timing=True)
        stream = next(iter(self._streams.values()))
        event.record(stream)
        event.synchronize()
        return event, time.perf_counter()


class AtOnce:
    """Stands in for streams on the processor, which has none: `enqueue` does the work."""

    timed = True

    def on(self, lane: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def enqueue(self, lane: str, work: Callable[[], None], after: Sequence[Underway]) -> Underway:
        start_s, error = time.perf_counter(), None
        try:
            for other in after:
                other.wait()
            work()
        except Exception as caught:
            error = caught
        return AlreadyDone(start_s, time.perf_counter(), error)


def failed(error: Exception) -> PenstockError:
    """torch's error as a DeviceFailed of one line."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower():
        return DeviceFailed(f"device memory ran out, another process may have taken it: {text}")
    return DeviceFailed(f"the device failed: {text}")
