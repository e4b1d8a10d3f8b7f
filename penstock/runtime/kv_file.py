"""KV that lives on a disk: a file without a name, which is gone with the process whatever happens to it."""

from __future__ import annotations

import errno
import os
import tempfile
import warnings
from pathlib import Path

from penstock import _native
from penstock.errors import StorageFailed
from penstock.units import format_bytes


class KvFile:
    """`nbytes` of disk in `folder`, all taken now, so that a full disk is met before a long run and not in it.

    Direct reads and writes in blocks; a file system that refuses them gets buffered ones, and one warning. `bytes_read`
    and `bytes_written` count. Raises StorageFailed.
    """

    def __init__(self, folder: Path, nbytes: int, block_bytes: int) -> None:
        self._folder, self._block_bytes = folder, block_bytes
        self.bytes_read = self.bytes_written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=folder, prefix=".penstock-kv-")
            try:
                os.posix_fallocate(fd, 0, nbytes)
                self._fd, self._direct = self._again(name)
            finally:
                os.close(fd)
                os.unlink(name)
        except OSError as error:
            raise StorageFailed(
                f"no {format_bytes(nbytes)} for the KV cache in {folder}: {os.strerror(error.errno or 0)}"
                " (--cache names another folder, a shorter --context or --kv int4 needs less)"
            ) from None

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Bytes to memory; offset, address and length are multiples of 4096."""
        try:
            got = _native.read_into(self._fd, offset, address, nbytes, self._block_bytes)
        except OSError as error:
            raise self._failed("reading", offset, error) from None
        if got != nbytes:
            raise StorageFailed(f"the KV file in {self._folder} ends at {offset + got}")
        self.bytes_read += got

    def write(self, offset: int, data: memoryview) -> None:
        """Bytes of memory to the file."""
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._fd, data[done : done + self._block_bytes], offset + done)
            except OSError as error:
                raise self._failed("writing", offset + done, error) from None
        self.bytes_written += done
        if not self._direct:
            _native.drop_cached(self._fd, offset, len(data))

    def close(self) -> None:
        os.close(self._fd)

    def _again(self, name: str) -> tuple[int, bool]:
        """(a descriptor for direct I/O, whether it is)."""
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(name, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            warnings.warn(
                f"{self._folder}: this file system refuses direct I/O; the KV cache goes through the page cache",
                stacklevel=3,
            )
            return os.open(name, flags), False

    def _failed(self, what: str, offset: int, error: OSError) -> StorageFailed:
        why = os.strerror(error.errno or 0)
        return StorageFailed(f"{what} the KV file in {self._folder} at {offset} failed: {why}")
