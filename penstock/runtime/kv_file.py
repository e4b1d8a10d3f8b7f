"""Keeps the KV cache on a disk, in a file without a name: however the process ends, the file is gone with it."""

from __future__ import annotations

import errno
import os
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from penstock import _native
from penstock.errors import StorageFailed
from penstock.runtime.movers import new_reader
from penstock.spec.machine import KV_IN_FLIGHT, USUAL_READS
from penstock.units import format_bytes


class KvFile:
    """`nbytes` of disk in `folder`. All of it is taken now: a full disk must show before a long run, not in it.

    Reads are direct, in blocks of `block_bytes`, by `engine` ("threads" or "io_uring"). Writes are direct too. Several
    of each are in flight. A file system that refuses direct I/O gets buffered I/O, with one warning. `bytes_read` and
    `bytes_written` count all bytes so far. Raises StorageFailed where the file cannot be made.
    """

    def __init__(self, folder: Path, nbytes: int, block_bytes: int, engine: str = USUAL_READS.engine) -> None:
        self._folder, self._block_bytes, self.bytes_written = folder, block_bytes, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=folder, prefix=".penstock-kv-")
            try:
                os.posix_fallocate(fd, 0, nbytes)
                self._fd, self._direct = self._open_direct(name)
            finally:
                os.close(fd)
                os.unlink(name)
        except OSError as error:
            raise StorageFailed(
                f"no {format_bytes(nbytes)} for the KV cache in {folder}: {os.strerror(error.errno or 0)}"
                " (--cache names another folder, a shorter --context or --kv int4 needs less)"
            ) from None
        self._reader = new_reader(engine, KV_IN_FLIGHT, block_bytes)
        self._writers = ThreadPoolExecutor(KV_IN_FLIGHT, "penstock-kv-write")

    def read(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Reads spans of the file to memory: (offset, address, length) each, all multiples of 4096. All are queued at
        once, for the pages of a batch are many reads of some 100 KiB. Raises StorageFailed, but only after all reads
        have ended."""
        begun = [self._reader.start(self._fd, *span) for span in spans]
        failed: StorageFailed | None = None
        # Where one read fails, the others are still waited for: they write to memory.
        for load, (offset, _, nbytes) in zip(begun, spans, strict=True):
            try:
                read_bytes = load.wait()
            except OSError as error:
                failed = failed or self._failed("reading", offset + load.arrived, error)
                continue
            if read_bytes != nbytes:
                failed = failed or StorageFailed(f"the KV file in {self._folder} ends at {offset + read_bytes}")
            if not self._direct:
                _native.drop_cached(self._fd, offset, nbytes)
        if failed is not None:
            raise failed

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def write(self, spans: Sequence[tuple[int, memoryview]]) -> None:
        """Writes (offset, bytes) each to the file. By several threads, for the system's call for one write waits for
        its end. Raises StorageFailed, but only after all writes have ended."""
        begun = [self._writers.submit(self._write, *span) for span in spans]
        wait(begun)  # also where one of them failed: the others read memory that the caller may then overwrite
        self.bytes_written += sum(write.result() for write in begun)

    def _write(self, offset: int, data: memoryview) -> int:
        written_bytes = 0
        while written_bytes < len(data):
            block = data[written_bytes : written_bytes + self._block_bytes]
            try:
                written_bytes += os.pwrite(self._fd, block, offset + written_bytes)
            except OSError as error:
                raise self._failed("writing", offset + written_bytes, error) from None
        if not self._direct:
            _native.drop_cached(self._fd, offset, len(data))
        return written_bytes

    def close(self) -> None:
        self._reader.close()
        self._writers.shutdown()
        os.close(self._fd)

    def _open_direct(self, name: str) -> tuple[int, bool]:
        """Opens the file for direct I/O, or for buffered where that is refused: (descriptor, whether it is direct)."""
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

    def _failed(self, doing: str, offset: int, error: OSError) -> StorageFailed:
        why = os.strerror(error.errno or 0)
        return StorageFailed(f"{doing} the KV file in {self._folder} at {offset} failed: {why}")
