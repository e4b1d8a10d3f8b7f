"""Loads weights: packed files to memory, by direct reads past the page cache, compared with their checksums."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import BrokenModel, PenstockError, StorageFailed
from penstock.spec.machine import FETCHED_AT_ONCE, PICKS_IN_FLIGHT, experts_in_flight
from penstock.spec.places import Lane, Tier, disk_of
from penstock.store.packed import Packed, damaged_granule

PICKER_THREADS = 16  # of a kernel without io_uring


class DiskLoad:
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
        """When the disk began and ended, in seconds of time.perf_counter. Only of a load that is done."""
        return self._begun.span_s

    def wait(self) -> int:
        """Waits until all bytes are there and are right; returns how many were read. Raises StorageFailed, and
        DamagedModel where a granule is not what its checksum says."""
        try:
            read_bytes = self._begun.wait()
        except OSError as error:
            raise self._place.failed(error, self._begun.arrived) from None
        except _native.Damaged as error:
            raise self._place.damaged(error) from None
        if not self._settled:
            self._place.settle(read_bytes)
            self._settled = True
        return read_bytes


@dataclass(frozen=True, slots=True)
class FileRange:
    """`nbytes` at `offset` of an open file. They belong to a part, and begin with its granule `lo`. `direct`: whether
    the file was opened for direct reads."""

    path: Path
    fd: int
    direct: bool
    part: str
    offset: int
    nbytes: int
    lo: int = 0

    def failed(self, error: OSError, arrived: int) -> StorageFailed:
        """The error of a read that failed after `arrived` bytes."""
        why = os.strerror(error.errno or 0)
        return StorageFailed(f"reading {self.path} at {self.offset + arrived} failed: {why}")

    def damaged(self, error: _native.Damaged) -> BrokenModel:
        """The error of a read whose granule `error.args[0]`, counted from `lo`, is not what its checksum says."""
        return damaged_granule(self.path, self.part, self.lo + int(error.args[0]))

    def truncated(self, read_bytes: int) -> StorageFailed:
        """The error of a read that brought so few bytes."""
        end = self.offset + read_bytes
        return StorageFailed(f"{self.path} ends at {end}, inside {self.part}: it was truncated while in use")

    def settle(self, read_bytes: int) -> None:
        """Ends a read that returned `read_bytes`. Raises StorageFailed where these are too few."""
        if read_bytes != self.nbytes:
            raise self.truncated(read_bytes)
        if not self.direct:
            _native.drop_cached(self.fd, self.offset, self.nbytes)


class DiskReader:
    """Reads granule ranges of a packed model with O_DIRECT. Each disk that the model lies on has `depth` blocks of
    `block_bytes` in flight (PIPO §3.3), by `engine`, "threads" or "io_uring".

    Each granule is compared with its checksum when it is read first, by the reader's own thread. A granule that was
    right once is not compared again, so a disk that turns bad later is not noticed. A model without `sums` is read
    unchecked.

    Where the kernel refuses an io_uring, threads read. A file system that refuses O_DIRECT gets buffered reads, with
    one warning; the pages are dropped from the cache right after. `bytes_read` counts the bytes that reads returned.
    Raises StorageFailed where a file cannot be opened.
    """

    def __init__(self, packed: Packed, block_bytes: int, depth: int, engine: str) -> None:
        self._packed, self._block_bytes = packed, block_bytes
        self.sums = None if packed.sums is None else _native.Sums(packed.sums)
        self._first_granules = packed.first_granules
        self._fds: dict[Path, tuple[int, bool]] = {}
        self._readers: dict[Tier, _native.Reader] = {}
        self._pickers: dict[Tier, _native.Reader] = {}  # of many small reads, made when they are first wanted
        self._askers: dict[Tier, _native.Reader] = {}  # of what native code asks for, as well
        self._fetchers: dict[Tier, _native.Reader] = {}  # of single embedding rows, as well
        self._depth = depth
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
        """Bytes read from each disk so far, by the lane of its reads. Still valid after `close`."""
        nbytes: dict[Lane, int] = dict(self._closed)
        for tier, reader in self._all_readers():
            lane = disk_of(tier).reads
            nbytes[lane] = nbytes.get(lane, 0) + reader.bytes_read
        return nbytes

    def start(self, part: str, lo: int, hi: int, address: int, disk: Tier | None = None) -> DiskLoad:
        """Begins to read granules lo..hi of a part to `address`, which is a multiple of 4096. The load queues behind
        earlier loads of its disk. The caller must wait for the load before the memory is used for anything else.

        `disk`: the disk whose queue the load joins, None for the disk that the part lies on. A plan names the disk, so
        that the loads of one lane stay in order wherever their parts lie."""
        place = self.place(part, lo, hi)
        reader = (disk and self._readers.get(disk)) or self._readers[self._packed.disks[place.path]]
        return DiskLoad(reader.start(place.fd, place.offset, address, place.nbytes, *self._expected(part, lo)), place)

    def fetch(self, part: str, granules: Sequence[int], address: int, slots: int) -> Iterator[int]:
        """Reads single granules of a part, past the queue of `start`, and yields the bytes of each when it is there.
        Number n lies in slot n % `slots` of the memory at `address`. The others are on their way meanwhile, and the
        next one takes the slot as soon as the iteration goes on. One alone is read by the calling thread.

        512 rows of a prompt took 85 ms one after the other, where the disk gives so many bytes in 25. Raises
        StorageFailed, and DamagedModel where a granule is not what its checksum says."""
        if len(granules) == 1:
            yield self._read(self.place(part, granules[0], granules[0] + 1), address)
            return
        places = [self.place(part, granule, granule + 1) for granule in granules]
        loads = (self._fetch(place, address + n % slots * place.nbytes) for n, place in enumerate(places))
        yield from waited_for(loads, slots - 1)

    def _read(self, place: FileRange, address: int) -> int:
        """Reads by the calling thread itself."""
        reader = self._readers[self._packed.disks[place.path]]
        try:
            read_bytes = reader.read(
                place.fd, place.offset, address, place.nbytes, *self._expected(place.part, place.lo)
            )
        except OSError as error:
            raise place.failed(error, 0) from None
        except _native.Damaged as error:
            raise place.damaged(error) from None
        place.settle(read_bytes)
        return read_bytes

    def _fetch(self, place: FileRange, address: int) -> DiskLoad:
        disk = self._packed.disks[place.path]
        reader = self._fetchers.get(disk)
        if reader is None:
            reader = self._fetchers[disk] = new_reader("io_uring", FETCHED_AT_ONCE, self._block_bytes)
        begun = reader.start(place.fd, place.offset, address, place.nbytes, *self._expected(place.part, place.lo))
        return DiskLoad(begun, place)

    @property
    def reads_directly(self) -> bool:
        """Whether all files are read past the page cache."""
        return all(direct for _, direct in self._fds.values())

    def home(self, part: str, lo: int, hi: int, disk: Tier) -> tuple[_native.Reader, int, int, int]:
        """What native code needs to read granules lo..hi of a part by itself: (reader, file descriptor, their offset in
        the file, number of the first granule's checksum). The reader is apart from the queue of `start`. Where there is
        an io_uring, the thread that computes begins the reads."""
        place = self.place(part, lo, hi)
        reader = self._askers.get(disk)
        if reader is None:
            depth = max(self._depth, experts_in_flight(place.nbytes, self._block_bytes))
            reader = self._askers[disk] = new_reader("io_uring", depth, self._block_bytes)
        return reader, place.fd, place.offset, self._first_granules[part] + lo

    def pick(self, part: str, runs: Sequence[tuple[int, int, int]]) -> DiskLoad | None:
        """Begins to read runs of a part, as (first byte, end, address): whole pages, in rising order of addresses. Many
        small reads are in flight at once, past the queue of `start`. They are not compared with checksums: the caller
        has read their granules whole before. Returns None where there are no runs."""
        if not runs:
            return None
        path, offset, _ = self._packed.locate(part, 0, 0)
        fd, direct = self._fds[path]
        disk = self._packed.disks[path]
        reader = self._pickers.get(disk)
        if reader is None:
            reader = self._pickers[disk] = new_picker(self._block_bytes)
        begun = reader.start_runs(fd, [(offset + lo, address, hi - lo) for lo, hi, address in runs])
        nbytes = sum(hi - lo for lo, hi, _ in runs)
        return DiskLoad(begun, FileRange(path, fd, direct, part, offset + runs[0][0], nbytes))

    def close(self) -> None:
        """Returns when no read is under way any more, and closes the files. Loads that had not begun fail."""
        for _, reader in self._all_readers():
            reader.close()
        self._closed = self.bytes_by_disk
        for readers in self._by_use():
            readers.clear()
        for fd, _ in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _all_readers(self) -> list[tuple[Tier, _native.Reader]]:
        return [pair for readers in self._by_use() for pair in readers.items()]

    def _by_use(self) -> tuple[dict[Tier, _native.Reader], ...]:
        return self._readers, self._pickers, self._askers, self._fetchers

    def place(self, part: str, lo: int, hi: int) -> FileRange:
        """Where granules lo..hi of a part lie."""
        path, offset, nbytes = self._packed.locate(part, lo, hi)
        fd, direct = self._fds[path]
        return FileRange(path, fd, direct, part, offset, nbytes, lo)

    def _expected(self, part: str, lo: int) -> tuple[_native.Sums | None, int, int]:
        """What the native reader compares granules from `lo` on with: the model's checksums, the index of the first
        granule among them, and the bytes of a granule."""
        return self.sums, self._first_granules[part] + lo, self._packed.parts[part].granule_bytes


class BegunLoad(Protocol):
    """Granules on their way to memory."""

    def wait(self) -> int:
        """Waits until all bytes are there; returns how many there are."""
        ...


def waited_for(loads: Iterable[BegunLoad], ahead: int) -> Iterator[int]:
    """Yields the bytes of each load as it is done, in order. `ahead`: how many more loads are begun before the first
    one is waited for, so that no disk idles. However this ends, no load is under way afterwards: none may write to
    memory that was given back. Raises StorageFailed, DamagedModel."""
    begun: deque[BegunLoad] = deque()
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
    """A reader by this engine, or by threads where the kernel refuses an io_uring (kernels of containers often do)."""
    try:
        return _native.Reader(engine, depth, block_bytes)
    except OSError:
        return _native.Reader("threads", depth, block_bytes)


def new_picker(block_bytes: int) -> _native.Reader:
    """A reader of many small reads at once. They are in flight through an io_uring where the kernel has one: threads
    would be PICKS_IN_FLIGHT of them."""
    try:
        return _native.Reader("io_uring", PICKS_IN_FLIGHT, block_bytes)
    except OSError:
        return _native.Reader("threads", PICKER_THREADS, block_bytes)


def poison(target: NDArray[np.uint8]) -> None:
    """Fills a slot's bytes, uint8 [n], with 0xFF, which is NaN in every float format. Called when a write to the slot
    starts, so that a missing edge shows as a wrong answer. For tests."""
    target[...] = 0xFF
