"""Writes a file front to back past the page cache, while the caller makes the next bytes."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.spec.parts import PAGE_BYTES
from penstock.units import MIB, round_up

# Direct writes of 4 MiB reached 1.4-1.9 GB/s where buffered ones with an fdatasync at the end reached 0.4-1.2.
STAGE_BYTES = 8 * MIB
_SYNC_BYTES = 64 * MIB


class DirectWriter:
    """Writes a new file front to back, in multiples of 4096 bytes. The caller fills one stage of memory while a thread
    writes the other. A context manager: where its block is left by an exception, the file is removed.

    A file system that refuses O_DIRECT gets buffered writes, which are dropped from the page cache every 64 MiB. Raises
    OSError.
    """

    def __init__(self, file: Path, stage_bytes: int = STAGE_BYTES) -> None:
        self._file = file
        self._fd, self._direct = _open(file)
        size = round_up(stage_bytes, PAGE_BYTES)
        self._stages = [_stage(size), _stage(size)]
        self._current = self._filled = self._offset = self._synced = 0
        self._thread = ThreadPoolExecutor(1, "penstock-write")
        self._writing: Future[None] | None = None

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        os.close(self._fd)
        if kind is not None:
            self._file.unlink(missing_ok=True)

    def reserve(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The next `nbytes` of the file as uint8 [nbytes], to be filled before the next call. Raises ValueError for
        more than one stage, and OSError where an earlier write failed."""
        stage = self._stages[self._current]
        if self._filled + nbytes > stage.nbytes:
            self._push()
            stage = self._stages[self._current]
        reserved = stage[self._filled : self._filled + nbytes]
        if reserved.nbytes < nbytes:
            raise ValueError(f"{nbytes} bytes do not go into a stage of {stage.nbytes}")
        self._filled += nbytes
        return reserved

    def sync(self) -> None:
        """Returns when all bytes are on the disk. Raises OSError where a write failed."""
        self._push()
        self._wait()
        os.fsync(self._fd)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _push(self) -> None:
        self._wait()
        data = self._stages[self._current].data[: self._filled]
        self._writing = self._thread.submit(self._write, data, self._offset)
        self._offset += self._filled
        self._current, self._filled = 1 - self._current, 0

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


def _open(file: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(file, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file.unlink(missing_ok=True)  # it may have been created before the flag was refused
        return os.open(file, flags, 0o666), False


def _stage(nbytes: int) -> npt.NDArray[Any]:
    """Page-aligned memory, uint8 [nbytes], on huge pages where the kernel grants them: direct I/O then pins 1 page
    instead of 512."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
