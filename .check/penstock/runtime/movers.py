"""Moves bytes between tiers. Here: packed files to memory by direct reads, past the page cache."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import StorageFailed
from penstock.store.packed import Packed


class DiskReader:
    """Reads granule ranges of a packed model with O_DIRECT, in blocks of `block_bytes`.

    A file system that refuses O_DIRECT gets buffered reads, whose pages are dropped behind us, and one
    warning. `bytes_read` counts what the reads returned.
    """

    def __init__(self, packed: Packed, block_bytes: int) -> None:
        self._packed, self._block_bytes = packed, block_bytes
        self._fds: dict[Path, tuple[int, bool]] = {}
        self.bytes_read = 0
        for path in packed.files:
            try:
                self._fds[path] = _native.open_direct(str(path))
            except OSError as error:
                self.close()
                raise StorageFailed(f"cannot open {path}: {os.strerror(error.errno or 0)}") from None
        if any(not direct for _, direct in self._fds.values()):
            warnings.warn(
                f"{packed.folder}: this file system refuses direct reads; reading through the page cache, slower",
                stacklevel=2,
            )

    def read(self, part: str, lo: int, hi: int, address: int) -> int:
        """Granules lo..hi of a part to `address`, 4096-aligned. Returns the bytes read."""
        path, offset, nbytes = self._packed.locate(part, lo, hi)
        fd, direct = self._fds[path]
        try:
            got = _native.read_into(fd, offset, address, nbytes, self._block_bytes)
        except OSError as error:
            raise StorageFailed(f"reading {path} at {offset} failed: {os.strerror(error.errno or 0)}") from None
        self.bytes_read += got
        if got != nbytes:
            raise StorageFailed(f"{path} ends at {offset + got}, inside {part}: it was truncated while in use")
        if not direct:
            _native.drop_cached(fd, offset, nbytes)
        return got

    def close(self) -> None:
        for fd, _ in self._fds.values():
            os.close(fd)
        self._fds.clear()


def poison(target: NDArray[np.uint8]) -> None:
    """Fills a slot with 0xFF (NaN in every float format) when a write to it starts, so that a missing edge
    shows as a wrong answer. For tests."""
    target[...] = 0xFF
