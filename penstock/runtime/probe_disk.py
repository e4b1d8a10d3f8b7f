"""The probe's figures of a disk: direct reads of the sizes that loads and single rows have, and writes."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock import _native
from penstock.errors import StorageFailed
from penstock.runtime.fit import Points, fit_well
from penstock.spec.machine import Rate
from penstock.store.direct import DirectWriter
from penstock.units import KIB, MIB

FILE_BYTES = 192 * MIB
_MODELS = ("*.safetensors", "*/*.safetensors", "*/*/*.safetensors")
BLOCK_BYTES = 8 * MIB  # of one read, as plans have it
UNIT_BYTES = 4 * MIB  # of a load, about
_ROW_READS = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)  # granules for single embedding rows
_LOADS = (MIB, 4 * MIB, 8 * MIB, 16 * MIB)
_WRITES = (4 * MIB, 16 * MIB)
Tell = Callable[[str], None]


class ProbeFile:
    """A file, large if it can be, and direct reads of it into huge pages. `file_bytes`: its whole pages."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd, self.file_bytes = path, fd, os.fstat(fd).st_size // 4096 * 4096
        self._memory = _native.Memory(max(_LOADS), True)
        self._memory.populate()
        self._rng, self._at = np.random.default_rng(0), 0

    def read_s(self, nbytes: int) -> float:
        """Seconds that a read of so many bytes takes, in blocks, after the one before, as a pass loads its units."""
        if self._at + nbytes > self.file_bytes:
            self._at = 0
        self._at += nbytes
        return self._read_s(self._at - nbytes, nbytes)

    def read_anywhere_s(self, nbytes: int) -> float:
        """The same at a random place, as single rows are read."""
        return self._read_s(int(self._rng.integers(0, (self.file_bytes - nbytes) // 4096 + 1)) * 4096, nbytes)

    def _read_s(self, at: int, nbytes: int) -> float:
        start_s = time.perf_counter()
        _native.read_into(self._fd, at, self._memory.address, nbytes, min(nbytes, BLOCK_BYTES))
        return time.perf_counter() - start_s


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
    """Of loads, of reads for single rows (`fetch`), and of writes (the lane `disk_write0`)."""
    rows = fit_well(lambda: _means(file.read_anywhere_s, _ROW_READS, 8), "small reads from disk", tell)
    writes = fit_well(lambda: _writes(folder), "writes to disk", tell)
    return [
        load_rate(file, tell),
        Rate("disk0", "fetch", "*", rows.alpha_s, rows.slope_s, 0.0, rows.r2),
        Rate("disk_write0", "*", "*", writes.alpha_s, writes.slope_s, 0.0, writes.r2),
    ]


def load_rate(file: ProbeFile, tell: Tell) -> Rate:
    loads = fit_well(lambda: _means(file.read_s, _LOADS, 32), "loads from disk", tell)
    return Rate("disk0", "*", "*", loads.alpha_s, loads.slope_s, 0.0, loads.r2)


def largest_file(folder: Path) -> Path | None:
    """Of the packed models in `folder`, where it is large enough."""
    found = [(file.stat().st_size, file) for pattern in _MODELS for file in folder.glob(pattern)]
    most, file = max(found, default=(0, None))
    return file if most >= FILE_BYTES else None


def _means(read_s: Callable[[int], float], sizes: tuple[int, ...], repeats: int) -> Points:
    """Means, since a run waits for slow reads too: of 4 MiB they were 2.2 GB/s where the median was 3.0."""
    return [(nbytes, statistics.fmean(read_s(nbytes) for _ in range(repeats))) for nbytes in sizes]


def _writes(folder: Path) -> Points:
    found = []
    for nbytes in _WRITES:
        times = []
        for _ in range(3):
            path = folder / f".penstock-probe-write-{os.getpid()}"
            try:
                start_s = time.perf_counter()
                with DirectWriter(path, nbytes) as writer:
                    writer.reserve(nbytes)[::4096] = 1
                    writer.sync()
                times.append(time.perf_counter() - start_s)
            finally:
                path.unlink(missing_ok=True)
        found.append((nbytes, statistics.median(times)))
    return found
