"""Moves bytes between tiers. Here: packed files to memory by direct reads, past the page cache."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import DamagedModel, PenstockError, StorageFailed
from penstock.spec.places import Lane, Tier, disk_of
from penstock.store.packed import Packed, damaged_granule


class Load:
    """Granules on their way from a disk to memory."""

    def __init__(self, begun: _native.Begun, place: FileRange) -> None:
        self._begun, self._place, self._settled = begun, place, False

    @property
    def done(self) -> bool:
        """Whether `wait` returns (or raises) at once."""
        return self._begun.done

    @property
    def complete(self) -> bool:
        """Whether `wait` returns at once and raises nothing."""
        return self._begun.done and self._begun.arrived == self._place.nbytes

    @property
    def span_s(self) -> tuple[float, float]:
        """When the disk began and ended, on the clock of time.perf_counter. Only of a load that is done."""
        return self._begun.span_s

    def wait(self) -> int:
        """Returns the bytes read when all are there, and right. Raises StorageFailed, DamagedModel."""
        try:
            got = self._begun.wait()
        except OSError as error:
            raise self._place.failed(error, self._begun.arrived) from None
        except _native.Damaged as error:
            raise self._place.damaged(error) from None
        if not self._settled:
            self._place.settle(got)
            self._settled = True
        return got


@dataclass(frozen=True, slots=True)
class FileRange:
    """`nbytes` at `offset` of an open file, which belong to a part, from its granule `lo` on."""

    path: Path
    fd: int
    direct: bool
    part: str
    offset: int
    nbytes: int
    lo: int = 0

    def failed(self, error: OSError, arrived: int) -> StorageFailed:
        why = os.strerror(error.errno or 0)
        return StorageFailed(f"reading {self.path} at {self.offset + arrived} failed: {why}")

    def damaged(self, error: _native.Damaged) -> DamagedModel:
        return damaged_granule(self.path, self.part, self.lo + int(error.args[0]))

    def settle(self, got: int) -> None:
        """After a read that returned `got` bytes. Raises StorageFailed where these are too few."""
        if got != self.nbytes:
            end = self.offset + got
            raise StorageFailed(f"{self.path} ends at {end}, inside {self.part}: it was truncated while in use")
        if not self.direct:
            _native.drop_cached(self.fd, self.offset, self.nbytes)


class DiskReader:
    """Reads granule ranges of a packed model with O_DIRECT: `depth` blocks of `block_bytes` in flight on each disk that
    the model lies on (PIPO §3.3), by `engine`, "threads" or "io_uring".

    Each granule is compared with its checksum when it is read first, by the reader's own thread; what was right once is
    not compared again, so a disk that turns bad later is not noticed. A model without `sums` is read as it is.

    Where the kernel refuses an io_uring, threads do it. A file system that refuses O_DIRECT gets buffered reads, whose
    pages are dropped behind us, and one warning. `bytes_read` counts what the reads returned.
    """

    def __init__(self, packed: Packed, block_bytes: int, depth: int, engine: str) -> None:
        self._packed, self._block_bytes = packed, block_bytes
        self._sums = None if packed.sums is None else _native.Sums(packed.sums)
        self._first_granules = packed.first_granules
        self._fds: dict[Path, tuple[int, bool]] = {}
        self._readers: dict[Tier, _native.Reader] = {}
        self._closed: dict[Lane, int] = {}  # bytes that readers had read when they were closed
        for path in packed.files:
            try:
                self._fds[path] = _native.open_direct(str(path))
            except OSError as error:
                self.close()
                raise StorageFailed(f"cannot open {path}: {os.strerror(error.errno or 0)}") from None
        self._readers = {disk: new_reader(engine, depth, block_bytes) for disk in sorted(set(packed.disks.values()))}
        if any(not direct for _, direct in self._fds.values()):
            warnings.warn(
                f"{packed.folder}: this file system refuses direct reads; reading through the page cache, slower",
                stacklevel=2,
            )

    @property
    def bytes_read(self) -> int:
        return sum(self.bytes_by_disk.values())

    @property
    def bytes_by_disk(self) -> dict[Lane, int]:
        """By the lane of its reads."""
        return self._closed or {disk_of(tier).reads: reader.bytes_read for tier, reader in self._readers.items()}

    def start(self, part: str, lo: int, hi: int, address: int, disk: Tier | None = None) -> Load:
        """Begins to read granules lo..hi of a part to `address`, 4096-aligned, after what this disk was given before.
        Whoever owns the memory waits for the load before giving it away. `disk`: whose queue it joins, where a plan
        says so; loads of a lane stay in order then, wherever the part lies."""
        place = self._locate(part, lo, hi)
        reader = (disk and self._readers.get(disk)) or self._readers[self._packed.disks[place.path]]
        return Load(reader.start(place.fd, place.offset, address, place.nbytes, *self._expected(part, lo)), place)

    def read(self, part: str, lo: int, hi: int, address: int) -> int:
        """The same, and waits for it. A single block is read by this very thread, past what is queued. Raises
        StorageFailed, and DamagedModel where a granule is not what its checksum says."""
        place = self._locate(part, lo, hi)
        if place.nbytes > self._block_bytes:
            return self.start(part, lo, hi, address).wait()
        reader = self._readers[self._packed.disks[place.path]]
        try:
            got = reader.read(place.fd, place.offset, address, place.nbytes, *self._expected(part, lo))
        except OSError as error:
            raise place.failed(error, 0) from None
        except _native.Damaged as error:
            raise place.damaged(error) from None
        place.settle(got)
        return got

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._closed = self.bytes_by_disk
        self._readers.clear()
        for fd, _ in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _locate(self, part: str, lo: int, hi: int) -> FileRange:
        path, offset, nbytes = self._packed.locate(part, lo, hi)
        return FileRange(path, *self._fds[path], part, offset, nbytes, lo)

    def _expected(self, part: str, lo: int) -> tuple[_native.Sums | None, int, int]:
        """What granules from `lo` on are compared with, as the native reader takes it."""
        return self._sums, self._first_granules[part] + lo, self._packed.parts[part].granule_bytes


def waited_for(loads: Iterable[Load], ahead: int) -> Iterator[int]:
    """The bytes of each load as it is done, in order. So many more than the one waited for are begun meanwhile, so that
    no disk idles. However it ends, no load is under way afterwards: nobody may write to memory that is given back."""
    begun: deque[Load] = deque()
    try:
        for load in loads:
            begun.append(load)
            if len(begun) > ahead:
                yield begun.popleft().wait()
        while begun:
            yield begun.popleft().wait()
    finally:
        for load in begun:
            with suppress(PenstockError):
                load.wait()


def new_reader(engine: str, depth: int, block_bytes: int) -> _native.Reader:
    """A reader by this engine, or by threads where the kernel refuses an io_uring (containers often do)."""
    try:
        return _native.Reader(engine, depth, block_bytes)
    except OSError:
        return _native.Reader("threads", depth, block_bytes)


def poison(target: NDArray[np.uint8]) -> None:
    """Fills a slot with 0xFF (NaN in every float format) when a write to it starts, so that a missing edge
    shows as a wrong answer. For tests."""
    target[...] = 0xFF
