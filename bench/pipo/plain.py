"""Reads as an engine does them that takes no care: a buffered read per tensor, through the page cache, into ordinary
pages. What penstock does instead (PIPO §3.3) is measured against it."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import StorageFailed
from penstock.store.packed import Packed


class OrdinaryMemory:
    """Pages of 4 KiB, every one present, also where the system would give huge ones unasked."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.array[...] = 0
        self.address = int(self.array.ctypes.data)


class PlainFiles:
    """Granule ranges of a packed model, each by one buffered read.

    The pages that a read leaves in the cache are dropped right after it: a model that is larger than memory has its
    pages taken away before they are read again, and small ones must not do better. Who reads pays for that, as the
    kernel makes its readers reclaim; `drop_s` are the seconds that it took.
    """

    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        self._fds: dict[Path, int] = {}
        self.drop_s = 0.0
        for path in packed.files:
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            drop_cache(self._fds[path])

    def read(self, part: str, lo: int, hi: int, address: int) -> None:
        path, offset, nbytes = self._packed.locate(part, lo, hi)
        fd = self._fds[path]
        if _native.read_into(fd, offset, address, nbytes, nbytes) != nbytes:
            raise StorageFailed(f"{path} ends inside {part}")
        start_s = time.perf_counter()
        _native.drop_cached(fd, offset, nbytes)
        self.drop_s += time.perf_counter() - start_s

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def drop_cache(fd: int) -> None:
    """Makes the page cache forget the file, which must have been written to the disk."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
