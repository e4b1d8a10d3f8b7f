"""KV that lives on a disk: a file without a name, which is gone with the process whatever happens to it."""

from __future__ import annotations

import errno
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from penstock import _native
from penstock.errors import StorageFailed
from penstock.runtime.movers import new_reader
from penstock.spec.machine import USUAL_READS
from penstock.units import format_bytes

# 32 reads of 128 KiB, as a batch's pages are: 0.87 GB/s one at a time, 1.07 with 2 in flight, 1.3 with 4, 1.5 with 8
# and with 16, on a disk that gives 2 GB/s to large ones.
_IN_FLIGHT = 8


class KvFile:
    """`nbytes` of disk in `folder`, all taken now, so that a full disk is met before a long run and not in it.

    Direct reads, several blocks of `block_bytes` in flight by `engine`, and direct writes, one at a time; a file system
    that refuses them gets buffered ones, and one warning. `bytes_read` and `bytes_written` count. Raises StorageFailed.
    """

    def __init__(self, folder: Path, nbytes: int, block_bytes: int, engine: str = USUAL_READS.engine) -> None:
        self._folder, self._block_bytes, self.bytes_written = folder, block_bytes, 0
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
        self._reader = new_reader(engine, _IN_FLIGHT, block_bytes)

    def read(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """(offset, address, length) each, multiples of 4096, to memory. All queued at once: a batch's pages are many
        reads of some 100 KiB."""
        begun = [self._reader.start(self._fd, *span) for span in spans]
        failed: StorageFailed | None = None
        for load, (offset, _, nbytes) in zip(begun, spans, strict=True):  # of a bad one's others, none may be under way
            try:
                got = load.wait()
            except OSError as error:
                failed = failed or self._failed("reading", offset + load.arrived, error)
                continue
            if got != nbytes:
                failed = failed or StorageFailed(f"the KV file in {self._folder} ends at {offset + got}")
            if not self._direct:
                _native.drop_cached(self._fd, offset, nbytes)
        if failed is not None:
            raise failed

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

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
        self._reader.close()
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
