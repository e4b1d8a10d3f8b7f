"""KV that lives on a disk: a file without a name, which is gone with the process whatever happens to it."""

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
    """`nbytes` of disk in `folder`, all taken now, so that a full disk is met before a long run and not in it.

    Direct reads in blocks of `block_bytes` by `engine`, and direct writes, several of each in flight; a file system
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
        self._reader = new_reader(engine, KV_IN_FLIGHT, block_bytes)
        self._writers = ThreadPoolExecutor(KV_IN_FLIGHT, "penstock-kv-write")

    def read(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """(offset, address, length) each, multiples of 4096, to memory. All queued at once: a batch's pages are many
        reads of some 100 KiB. Raises StorageFailed after all of them have ended."""
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

    def write(self, spans: Sequence[tuple[int, memoryview]]) -> None:
        """(offset, bytes) each to the file, by several threads: the system's call for one write waits for its end."""
        begun = [self._writers.submit(self._write, *span) for span in spans]
        wait(begun)  # of a bad one's others, none may be under way
        self.bytes_written += sum(each.result() for each in begun)

    def _write(self, offset: int, data: memoryview) -> int:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._fd, data[done : done + self._block_bytes], offset + done)
            except OSError as error:
                raise self._failed("writing", offset + done, error) from None
        if not self._direct:
            _native.drop_cached(self._fd, offset, len(data))
        return done

    def close(self) -> None:
        self._reader.close()
        self._writers.shutdown()
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
