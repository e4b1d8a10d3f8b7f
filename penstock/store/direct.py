"""Writes a file front to back past the page cache, while the caller makes the next bytes."""

from __future__ import annotations

import errno
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.spec.parts import PAGE_BYTES
from penstock.units import MIB, round_up

# Direct writes of 4 MiB reached 1.4-1.9 GB/s where buffered ones with an fdatasync at the end reached 0.4-1.2.
STAGE_BYTES = 8 * MIB
_SYNC_BYTES = 64 * MIB
_PIECE_BYTES = STAGE_BYTES + 2 * MIB  # has room for a piece that is read at once, and the pages around it


class DirectWriter:
    """Writes a new file front to back, in multiples of 4096 bytes. The caller fills stages of memory while a thread
    writes another one. A context manager: where its block is left by an exception, the file is removed.

    Ranges of the file are reserved, and become complete, in their order. Several may be reserved and not complete yet.

    A file system that refuses O_DIRECT gets buffered writes, which are dropped from the page cache every 64 MiB. Raises
    OSError.
    """

    def __init__(self, file: Path, stage_bytes: int = STAGE_BYTES, stages: int = 2) -> None:
        self._file = file
        self._fd, self._direct = _open(file)
        size = round_up(stage_bytes, PAGE_BYTES)
        self._stages = [_Stage(huge_memory(size)) for _ in range(stages)]
        self._current = self._offset = self._synced = 0
        self._reserved: deque[_Stage] = deque()  # of each range that is not complete, its stage
        self._closed: deque[_Stage] = deque()  # stages that take no more ranges, and are not written yet
        self._thread = _Thread("penstock-write")

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.end()
        os.close(self._fd)
        if kind is not None:
            self._file.unlink(missing_ok=True)

    def has_room(self, nbytes: int) -> bool:
        """Whether `reserve` can be called. If not, ranges have to become complete first."""
        following = self._stages[(self._current + 1) % len(self._stages)]
        return self._fits(nbytes) or (following.incomplete == 0 and following not in self._closed)

    def reserve(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The next `nbytes` of the file as uint8 [nbytes], to be filled before it is complete. Raises ValueError for
        more than one stage, and OSError where an earlier write failed."""
        if not self._fits(nbytes):
            self._close_stage()
            self._stages[self._current].wait()
        stage = self._stages[self._current]
        reserved = stage.memory[stage.filled : stage.filled + nbytes]
        if reserved.nbytes < nbytes:
            raise ValueError(f"{nbytes} bytes do not go into a stage of {stage.memory.nbytes}")
        stage.filled += nbytes
        stage.incomplete += 1
        self._reserved.append(stage)
        return reserved

    def complete(self) -> None:
        """The oldest range that was not complete is filled."""
        self._reserved.popleft().incomplete -= 1
        self._write_closed()

    def sync(self) -> None:
        """Returns when all bytes are on the disk, for which all ranges must be complete. Raises OSError where a write
        failed."""
        self._close_stage()
        for stage in self._stages:
            stage.wait()
        os.fsync(self._fd)

    def _fits(self, nbytes: int) -> bool:
        stage = self._stages[self._current]
        return stage.filled + nbytes <= stage.memory.nbytes

    def _close_stage(self) -> None:
        self._closed.append(self._stages[self._current])
        self._current = (self._current + 1) % len(self._stages)
        self._write_closed()

    def _write_closed(self) -> None:
        """Has the thread write the stages that are closed and complete."""
        while self._closed and self._closed[0].incomplete == 0:
            stage = self._closed.popleft()
            data, offset = stage.memory.data[: stage.filled], self._offset
            stage.writing = self._thread.submit(partial(self._write, data, offset))
            self._offset += stage.filled

    def _write(self, data: memoryview, offset: int) -> None:
        written = 0
        while written < len(data):
            try:
                written += os.pwrite(self._fd, data[written:], offset + written)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._direct = False  # some file systems open a file with O_DIRECT, and then refuse direct writes
                fd = os.open(self._file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                os.dup2(fd, self._fd, inheritable=False)
                os.close(fd)
        end = offset + len(data)
        if not self._direct and end - self._synced >= _SYNC_BYTES:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, end, os.POSIX_FADV_DONTNEED)
            self._synced = end


class _Thread:
    """Makes calls one after another, until `end`. An executor takes none once the interpreter ends, which waits for a
    copy that is being written (`serve.copying`). Python 3.12.1 starts no thread then either, and the caller's makes the
    calls."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """What becomes of the call."""
        future = Future[None]()
        self._calls.put((future, call))
        if self._thread is None:
            self._calls.put(None)
            self._work()
        return future

    def end(self) -> None:
        """Returns when all calls have been made."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (taken := self._calls.get()) is not None:
            future, call = taken
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


def _open(file: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(file, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file.unlink(missing_ok=True)  # it may have been created before the flag was refused
        return os.open(file, flags, 0o666), False


class _Stage:
    """Memory for some ranges. `incomplete`: how many of them are not filled yet."""

    def __init__(self, memory: npt.NDArray[Any]) -> None:
        self.memory, self.filled, self.incomplete = memory, 0, 0
        self.writing: Future[None] | None = None

    def wait(self) -> None:
        """Returns when it is written, and is empty then."""
        if self.writing is not None:
            self.writing.result()
            self.writing, self.filled = None, 0


def huge_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory, uint8 [nbytes], on huge pages where the kernel grants them: direct I/O then pins 1 page instead of 512,
    and reaches 3.3 GB/s instead of 1.2. Its address is a multiple of 2 MiB."""
    memory = _native.Memory(round_up(nbytes, 2 * MIB), True)
    taken: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    return taken[:nbytes]


class Recycled:
    """Memory as of `huge_memory`, which is given out again when the last view of it is gone. Where the system gives
    pages at 0.5 GB/s, fresh ones for each read took longer than the disk. Threads may share it."""

    def __init__(self) -> None:
        self._idle: dict[int, list[_native.Memory]] = {}  # by their bytes

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8 [nbytes], of any content. Pages that nobody touches are not there, so small ones share a size. Of each
        size one stays idle at most, for packing's peak would be 20 MiB more with all."""
        size = max(_PIECE_BYTES, round_up(nbytes, 2 * MIB))
        idle = self._idle.setdefault(size, [])
        try:
            memory = idle.pop()
        except IndexError:
            memory = _native.Memory(size, True)
        taken: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)

        def give_back() -> None:
            if not idle:
                idle.append(memory)

        # The base of any view of it is this very array, so it goes when they are all gone.
        weakref.finalize(taken, give_back).atexit = False
        return taken[:nbytes]

    def forget(self) -> None:
        """Gives back what nobody uses."""
        self._idle = {}
