"""The probe's figures of a disk: direct reads of the sizes that loads and single rows have, and writes."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock import _native
from penstock.errors import StorageFailed
from penstock.runtime import host
from penstock.runtime.fit import Fit, Points, Tell, fit_well
from penstock.runtime.kv_file import KvFile
from penstock.runtime.movers import new_reader
from penstock.spec.machine import KV_IN_FLIGHT, USUAL_READS, Rate
from penstock.spec.places import DISK
from penstock.units import KIB, MIB

FILE_BYTES = 192 * MIB
_MODELS = ("*.safetensors", "*/*.safetensors", "*/*/*.safetensors")
UNIT_BYTES = 4 * MIB  # of a load, about
LOADS_AHEAD = 3  # of the one waited for, as a ring of four units has them
_ROW_READS = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)  # granules for single embedding rows
_LOADS = (MIB, 4 * MIB, 8 * MIB, 16 * MIB)
_KV_READS = (32 * KIB, 128 * KIB, 512 * KIB)  # a sequence's K or V in a layer, before its new rows
_KV_ROUNDS = 2
_WRITES = (16 * KIB, 64 * KIB, 256 * KIB, MIB)  # its pages with new rows
_WRITTEN_BYTES, _WRITE_ROUNDS, _WRITE_TURNS = 32 * MIB, 4, 5
_TURNS = 2  # of a visit, 0.5 GB together
_EVERY_S = 1.5  # is a visit due


class ProbeFile:
    """A file, large if it can be, and direct reads of it into huge pages by the reader that runs have.
    `file_bytes`: its whole pages."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd, self.file_bytes = path, fd, os.fstat(fd).st_size // 4096 * 4096
        wanted = (LOADS_AHEAD + 1) * max(_LOADS)
        self._memory = _native.Memory(max(max(_LOADS), min(wanted, host.available_bytes() // 8)), True)
        self._memory.populate()
        self._rng, self._at = np.random.default_rng(0), 0
        self.reader = usual_reader()
        self._kv_reader = new_reader(USUAL_READS.engine, KV_IN_FLIGHT, USUAL_READS.block_bytes)

    def loads_s(self, reader: _native.Reader, nbytes: int, count: int) -> float:
        """Seconds that a load of so many bytes takes, of `count` one after the other, as a pass loads its units."""
        start_s = time.perf_counter()
        begun: deque[_native.Begun] = deque()
        slots = min(LOADS_AHEAD + 1, self._memory.nbytes // nbytes)
        for i in range(count):
            if self._at + nbytes > self.file_bytes:
                self._at = 0
            if len(begun) == slots:
                begun.popleft().wait()
            slot = self._memory.address + i % slots * nbytes
            begun.append(reader.start(self._fd, self._at, slot, nbytes))
            self._at += nbytes
        for load in begun:
            load.wait()
        return (time.perf_counter() - start_s) / count

    def kv_reads_s(self, nbytes: int) -> float:
        """Seconds of a round of reads at random places that are in flight together, as a batch's KV comes."""
        places = [self._somewhere(nbytes) for _ in range(_KV_ROUNDS * KV_IN_FLIGHT)]
        start_s = time.perf_counter()
        begun = [
            self._kv_reader.start(self._fd, at, self._memory.address + i * nbytes, nbytes)
            for i, at in enumerate(places)
        ]
        for load in begun:
            load.wait()
        return (time.perf_counter() - start_s) / _KV_ROUNDS

    def read_anywhere_s(self, nbytes: int) -> float:
        """Seconds of a read at a random place by the calling thread, as single rows are read."""
        at = self._somewhere(nbytes)
        start_s = time.perf_counter()
        self.reader.read(self._fd, at, self._memory.address, nbytes)
        return time.perf_counter() - start_s

    def _somewhere(self, nbytes: int) -> int:
        return int(self._rng.integers(0, (self.file_bytes - nbytes) // 4096 + 1)) * 4096


def usual_reader() -> _native.Reader:
    return new_reader(USUAL_READS.engine, USUAL_READS.depth, USUAL_READS.block_bytes)


@contextmanager
def probe_file(folder: Path) -> Iterator[ProbeFile]:
    """The largest file of a packed model in `folder`, for what will be read should be measured: a new small file lay in
    some cache below us and read at 3.5 GB/s where models read at 2.9. Without one a new file, gone afterwards. Raises
    StorageFailed."""
    name, fd = None, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = largest_file(folder)
        if there is not None:
            fd, _ = _native.open_direct(str(there))
            yield ProbeFile(there, fd)
            return
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".penstock-probe-", delete=False) as file:
            name = Path(file.name)
            block = os.urandom(MIB)
            for _ in range(FILE_BYTES // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        fd, _ = _native.open_direct(str(name))
        _native.drop_cached(fd, 0, FILE_BYTES)
        yield ProbeFile(name, fd)
    except OSError as error:
        raise StorageFailed(f"cannot measure the disk at {folder}: {error.strerror}") from None
    finally:
        if fd is not None:
            os.close(fd)
        if name is not None:
            name.unlink(missing_ok=True)


@contextmanager
def existing_file(path: Path) -> Iterator[ProbeFile]:
    """A file that is there, whatever its size. Raises StorageFailed."""
    try:
        fd, _ = _native.open_direct(str(path))
    except OSError as error:
        raise StorageFailed(f"cannot open {path}: {os.strerror(error.errno or 0)}") from None
    try:
        yield ProbeFile(path, fd)
    finally:
        os.close(fd)


def disk_rates(file: ProbeFile, folder: Path, tell: Tell) -> list[Rate]:
    """The rates of reads for single rows (`fetch`), and of a KV file's writes."""
    rows = fit_well(lambda: _row_reads(file), "small reads from disk", tell)
    writes = fit_well(lambda: _writes(folder), "writes to disk", tell)
    return [
        Rate(DISK.reads, "fetch", "*", rows.alpha_s, rows.slope_s, 0.0, rows.r2),
        Rate(DISK.writes, "*", "*", writes.alpha_s, writes.slope_s, 0.0, writes.r2),
    ]


class LoadVisits:
    """Loads of all sizes, timed at many moments of a probe: the disk swings from second to second, and what runs load
    for minutes. One visit of 0.4 s had from 0.67 to 1.25 of the ceiling, the mean of four such visits from 0.81 to 1.22
    (a deviation of 0.07), where runs had 0.79 to 1.27 (docs/LOG.md)."""

    def __init__(self, file: ProbeFile) -> None:
        self._file = file
        self._times: dict[int, list[float]] = {nbytes: [] for nbytes in _LOADS}
        self._kv_times: dict[int, list[float]] = {nbytes: [] for nbytes in _KV_READS}
        self._last_s = -_EVERY_S

    def between(self) -> None:
        """A visit, where the last one is a while ago: for who measures something else, between two measurements."""
        if time.perf_counter() - self._last_s >= _EVERY_S:
            self.visit()

    def visit(self) -> None:
        """Whole runs of loads: a run waits for slow reads too, of 4 MiB the mean was 2.2 GB/s, the median 3.0."""
        for _ in range(_TURNS):
            for nbytes, found in self._times.items():
                found.append(self._file.loads_s(self._file.reader, nbytes, 8))
            for nbytes, found in self._kv_times.items():
                found.append(self._file.kv_reads_s(nbytes))
        self._last_s = time.perf_counter()

    def rates(self, tell: Tell) -> list[Rate]:
        """The rates of loads and of KV reads, over all visits so far. Pays another visit where the times do not lie on
        a line. The alpha of KV is that of a round: of reads that are in flight together."""
        loads = self._fit(self._times, 1, "loads from disk", tell)
        kv = self._fit(self._kv_times, KV_IN_FLIGHT, "KV reads from disk", tell)
        return [
            Rate(DISK.reads, "*", "*", loads.alpha_s, loads.slope_s, 0.0, loads.r2),
            Rate(DISK.reads, "kv_load", "*", kv.alpha_s, kv.slope_s, 0.0, kv.r2),
        ]

    def _fit(self, times: dict[int, list[float]], at_once: int, what: str, tell: Tell) -> Fit:
        def points() -> Points:
            if tried:
                self.visit()
            tried.append(True)
            return [(at_once * nbytes, statistics.fmean(found)) for nbytes, found in times.items()]

        tried: list[bool] = []
        return fit_well(points, what, tell)


def largest_file(folder: Path) -> Path | None:
    """The largest file of the packed models in `folder`; None where it is too small to measure with."""
    found = [(file.stat().st_size, file) for pattern in _MODELS for file in folder.glob(pattern)]
    most, file = max(found, default=(0, None))
    return file if most >= FILE_BYTES else None


def _row_reads(file: ProbeFile) -> Points:
    """Means too."""
    return [(nbytes, statistics.fmean(file.read_anywhere_s(nbytes) for _ in range(8))) for nbytes in _ROW_READS]


def _writes(folder: Path) -> Points:
    """Rounds at random places, of pages that were written before, as a step saves a batch's KV."""
    rng = np.random.default_rng(0)
    zeros = np.zeros(max(_WRITES) + 4096, np.uint8)
    page = zeros[-zeros.ctypes.data % 4096 :].data  # direct writes are of whole pages
    file = KvFile(folder, _WRITTEN_BYTES, USUAL_READS.block_bytes)
    try:
        for at in range(0, _WRITTEN_BYTES, max(_WRITES)):
            file.write([(at, page[: max(_WRITES)])])
        times: dict[int, list[float]] = {nbytes: [] for nbytes in _WRITES}
        for nbytes in _WRITES * _WRITE_TURNS:
            places = rng.permutation(_WRITTEN_BYTES // nbytes)[: _WRITE_ROUNDS * KV_IN_FLIGHT] * nbytes
            start_s = time.perf_counter()
            file.write([(at, page[:nbytes]) for at in places.tolist()])
            times[nbytes].append((time.perf_counter() - start_s) / _WRITE_ROUNDS)
        return [(KV_IN_FLIGHT * nbytes, statistics.fmean(found)) for nbytes, found in times.items()]
    finally:
        file.close()
