"""Measures a disk for the probe: direct reads of the sizes that loads, KV and single rows have, and writes of KV."""

from __future__ import annotations

import errno
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np

from penstock import _native
from penstock.errors import StorageFailed
from penstock.runtime import host
from penstock.runtime.fit import Fit, Points, Tell, fit_well
from penstock.runtime.kv_file import KvFile
from penstock.runtime.movers import new_picker, new_reader
from penstock.spec.machine import KV_IN_FLIGHT, PICKS_IN_FLIGHT, USUAL_READS, Rate
from penstock.spec.places import DISK
from penstock.store.writer import free_bytes
from penstock.units import KIB, MIB, format_bytes

FILE_BYTES = 192 * MIB
_MODELS = ("*.safetensors", "*/*.safetensors", "*/*/*.safetensors")
UNIT_BYTES = 4 * MIB  # about the size of a load
LOADS_AHEAD = 3  # loads begun beyond the one waited for, as with a ring of four units
_ROW_READS = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)  # sizes of granules that single embedding rows lie in
_LOADS = (MIB, 4 * MIB, 8 * MIB, 16 * MIB)  # sizes of loads
_KV_READS = (32 * KIB, 128 * KIB, 512 * KIB)  # sizes of a sequence's K or V in a layer, before its new rows
_KV_ROUNDS = 2
_PICKS = (4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB)  # sizes of runs of neurons' records
_PICK_ROUNDS = 4
_WRITES = (16 * KIB, 64 * KIB, 256 * KIB, MIB)  # sizes of the pages of a sequence that have new rows
_WRITTEN_BYTES, _WRITE_ROUNDS, _WRITE_TURNS = 32 * MIB, 4, 5
_TURNS = 2  # turns of a visit, 0.5 GB together
# From a visit until the next one is due: so many seconds, and so many times as long as the visit took.
_EVERY_S, _EVERY_VISITS = 1.5, 4.0


class ProbeFile:
    """Times direct reads of a file into huge pages, by the reader that runs have. The larger the file, the better: a
    small one may lie in a cache of the disk. `file_bytes`: of its whole pages."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd, self.file_bytes = path, fd, os.fstat(fd).st_size // 4096 * 4096
        wanted = (LOADS_AHEAD + 1) * max(_LOADS)
        self._memory = _native.Memory(max(max(_LOADS), min(wanted, host.available_bytes() // 8)), True)
        self._memory.populate()
        self._rng, self._offset = np.random.default_rng(0), 0  # where the next load begins
        self.reader = usual_reader()
        self._kv_reader = new_reader(USUAL_READS.engine, KV_IN_FLIGHT, USUAL_READS.block_bytes)
        self._picker = new_picker(USUAL_READS.block_bytes)

    def loads_s(self, reader: _native.Reader, nbytes: int, count: int) -> float:
        """Seconds per load of `nbytes`: `count` loads one after the other, as a pass loads its units."""
        start_s = time.perf_counter()
        begun: deque[_native.Begun] = deque()
        slots = min(LOADS_AHEAD + 1, self._memory.nbytes // nbytes)
        for i in range(count):
            if self._offset + nbytes > self.file_bytes:
                self._offset = 0
            if len(begun) == slots:
                begun.popleft().wait()
            slot = self._memory.address + i % slots * nbytes
            begun.append(reader.start(self._fd, self._offset, slot, nbytes))
            self._offset += nbytes
        for load in begun:
            load.wait()
        return (time.perf_counter() - start_s) / count

    def kv_reads_s(self, nbytes: int) -> float:
        """Seconds per round of reads of `nbytes` at random offsets, which are in flight together, as a batch's KV is
        read. A round has KV_IN_FLIGHT reads."""
        offsets = [self._random_offset(nbytes) for _ in range(_KV_ROUNDS * KV_IN_FLIGHT)]
        start_s = time.perf_counter()
        begun = [
            self._kv_reader.start(self._fd, offset, self._memory.address + i * nbytes, nbytes)
            for i, offset in enumerate(offsets)
        ]
        for load in begun:
            load.wait()
        return (time.perf_counter() - start_s) / _KV_ROUNDS

    def picks_s(self, nbytes: int) -> float:
        """Seconds per round of PICKS_IN_FLIGHT reads of `nbytes` at random offsets, which are in flight together, as
        neurons' records are read."""
        base, each = self._memory.address, PICKS_IN_FLIGHT * nbytes
        rounds = max(1, min(_PICK_ROUNDS, self._memory.nbytes // each))
        offsets = sorted(self._random_offset(nbytes) for _ in range(rounds * PICKS_IN_FLIGHT))
        start_s = time.perf_counter()
        self._picker.start_runs(
            self._fd, [(offset, base + i * nbytes, nbytes) for i, offset in enumerate(offsets)]
        ).wait()
        return (time.perf_counter() - start_s) / rounds

    def read_anywhere_s(self, nbytes: int) -> float:
        """Seconds of one read of `nbytes` at a random offset by the calling thread, as single rows are read."""
        offset = self._random_offset(nbytes)
        start_s = time.perf_counter()
        self.reader.read(self._fd, offset, self._memory.address, nbytes)
        return time.perf_counter() - start_s

    def _random_offset(self, nbytes: int) -> int:
        return int(self._rng.integers(0, (self.file_bytes - nbytes) // 4096 + 1)) * 4096


def usual_reader() -> _native.Reader:
    """The reader of a machine whose best way to read is not measured."""
    return new_reader(USUAL_READS.engine, USUAL_READS.depth, USUAL_READS.block_bytes)


@contextmanager
def probe_file(folder: Path, new_bytes: int = FILE_BYTES) -> Iterator[ProbeFile]:
    """The file to measure the disk of `folder` with: the largest one of a packed model there, else a new file of
    `new_bytes`, which is removed afterwards. Files that will be read are the better measure: a new small file lay in
    some cache below us and read at 3.5 GB/s where models read at 2.9. Raises StorageFailed."""
    name, fd = None, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        existing = largest_file(folder)
        if existing is not None:
            fd, _ = _native.open_direct(str(existing))
            yield ProbeFile(existing, fd)
            return
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".penstock-probe-", delete=False) as file:
            name = Path(file.name)
            block = os.urandom(MIB)
            for _ in range(new_bytes // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        fd, _ = _native.open_direct(str(name))
        _native.drop_cached(fd, 0, new_bytes)
        yield ProbeFile(name, fd)
    except OSError as error:
        why = error.strerror
        if error.errno == errno.ENOSPC:
            why = f"it is too full: that takes {format_bytes(new_bytes)}, {format_bytes(free_bytes(folder))} are free"
        raise StorageFailed(f"cannot measure the disk at {folder}: {why}") from None
    finally:
        if fd is not None:
            os.close(fd)
        if name is not None:
            name.unlink(missing_ok=True)


@contextmanager
def existing_file(path: Path) -> Iterator[ProbeFile]:
    """This file, whatever its size. Raises StorageFailed where it cannot be opened."""
    try:
        fd, _ = _native.open_direct(str(path))
    except OSError as error:
        raise StorageFailed(f"cannot open {path}: {os.strerror(error.errno or 0)}") from None
    try:
        yield ProbeFile(path, fd)
    finally:
        os.close(fd)


def disk_rates(file: ProbeFile, folder: Path, tell: Tell, until_s: float) -> list[Rate]:
    """The rates of reads of single rows (`fetch`), and of writes to a KV file in `folder`. `until_s`: as for
    `fit_well`."""
    rows = fit_well(lambda: _row_reads(file), "small reads from disk", tell, until_s)
    writes = fit_well(lambda: _writes(folder, until_s), "writes to disk", tell, until_s)
    return [
        Rate(DISK.reads, "fetch", "*", rows.alpha_s, rows.slope_s, 0.0, rows.r2),
        Rate(DISK.writes, "*", "*", writes.alpha_s, writes.slope_s, 0.0, writes.r2),
    ]


class LoadVisits:
    """Times loads of all sizes at many moments of a probe. The disk swings from second to second, and runs load for
    minutes: single visits of 0.4 s had from 0.67 to 1.25 of the ceiling, the mean of four such visits from 0.81 to
    1.22 (a deviation of 0.07), runs 0.79 to 1.27 (docs/LOG.md)."""

    def __init__(self, file: ProbeFile) -> None:
        self._file = file
        self._times: dict[int, list[float]] = {nbytes: [] for nbytes in _LOADS}
        self._kv_times: dict[int, list[float]] = {nbytes: [] for nbytes in _KV_READS}
        self._pick_times: dict[int, list[float]] = {nbytes: [] for nbytes in _PICKS}
        self._due_s = 0.0
        self.visits = 0

    def between(self) -> None:
        """A visit, if the last one is long enough ago. Other parts of the probe call this between two measurements."""
        if time.perf_counter() >= self._due_s:
            self.visit()

    def visit(self) -> None:
        """Times whole runs of loads, not single ones: a pass waits for slow loads too. Of 4 MiB the mean was 2.2 GB/s,
        the median 3.0."""
        start_s = time.perf_counter()
        for _ in range(_TURNS):
            for nbytes, times in self._times.items():
                times.append(self._file.loads_s(self._file.reader, nbytes, 8))
            for nbytes, times in self._kv_times.items():
                times.append(self._file.kv_reads_s(nbytes))
            for nbytes, times in self._pick_times.items():
                times.append(self._file.picks_s(nbytes))
        now_s = time.perf_counter()
        self._due_s = now_s + max(_EVERY_S, _EVERY_VISITS * (now_s - start_s))
        self.visits += 1

    def rates(self, tell: Tell, until_s: float) -> list[Rate]:
        """The rates of loads, of KV reads and of reads of records, over all visits so far. Makes another visit where
        the times do not lie on a line. The alphas of KV and of records are those of a whole round of reads in flight
        together. `until_s`: as for `fit_well`."""
        loads = self._fit(self._times, 1, "loads from disk", tell, until_s)
        kv = self._fit(self._kv_times, KV_IN_FLIGHT, "KV reads from disk", tell, until_s)
        picks = self._fit(self._pick_times, PICKS_IN_FLIGHT, "reads of records from disk", tell, until_s)
        return [
            Rate(DISK.reads, "*", "*", loads.alpha_s, loads.slope_s, 0.0, loads.r2),
            Rate(DISK.reads, "kv_load", "*", kv.alpha_s, kv.slope_s, 0.0, kv.r2),
            Rate(DISK.reads, "pick", "*", picks.alpha_s, picks.slope_s, 0.0, picks.r2),
        ]

    def _fit(self, times: dict[int, list[float]], at_once: int, figure: str, tell: Tell, until_s: float) -> Fit:
        def points() -> Points:
            if tried:
                self.visit()
            tried.append(True)
            return [(at_once * nbytes, statistics.fmean(seconds)) for nbytes, seconds in times.items()]

        tried: list[bool] = []
        return fit_well(points, figure, tell, until_s)


def largest_file(folder: Path) -> Path | None:
    """The largest file of the packed models in `folder`; None where it is too small to measure with."""
    sizes = [(file.stat().st_size, file) for pattern in _MODELS for file in folder.glob(pattern)]
    most, file = max(sizes, default=(0, None))
    return file if most >= FILE_BYTES else None


def _row_reads(file: ProbeFile) -> Points:
    """Means, as in `visit`."""
    return [(nbytes, statistics.fmean(file.read_anywhere_s(nbytes) for _ in range(8))) for nbytes in _ROW_READS]


def _writes(folder: Path, until_s: float) -> Points:
    """Rounds of writes at random offsets, over pages that were written before, as a step saves a batch's KV. After
    `until_s` of `time.perf_counter` no further turn begins."""
    rng = np.random.default_rng(0)
    zeros = np.zeros(max(_WRITES) + 4096, np.uint8)
    page = zeros[-zeros.ctypes.data % 4096 :].data  # direct writes are of whole pages
    file = KvFile(folder, _WRITTEN_BYTES, USUAL_READS.block_bytes)
    try:
        for offset in range(0, _WRITTEN_BYTES, max(_WRITES)):
            file.write([(offset, page[: max(_WRITES)])])
        times: dict[int, list[float]] = {nbytes: [] for nbytes in _WRITES}
        for turn, nbytes in product(range(_WRITE_TURNS), _WRITES):
            if turn and time.perf_counter() > until_s:
                break
            offsets = rng.permutation(_WRITTEN_BYTES // nbytes)[: _WRITE_ROUNDS * KV_IN_FLIGHT] * nbytes
            start_s = time.perf_counter()
            file.write([(offset, page[:nbytes]) for offset in offsets.tolist()])
            times[nbytes].append((time.perf_counter() - start_s) / _WRITE_ROUNDS)
        return [(KV_IN_FLIGHT * nbytes, statistics.fmean(seconds)) for nbytes, seconds in times.items()]
    finally:
        file.close()
