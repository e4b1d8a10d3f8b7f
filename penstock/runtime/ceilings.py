"""Measures the highest speeds of this machine now: reading RAM, reading a disk, dot products.

These ceilings drift, so a speed must be compared with ceilings of the same run.

`python -m penstock.runtime.ceilings THREADS [FILE]` prints them as JSON; the disk is the one that FILE lies on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock import _native
from penstock.errors import PenstockError, StorageFailed
from penstock.runtime import child, host
from penstock.runtime.probe_disk import ProbeFile, existing_file
from penstock.units import MIB

# 16 times a large L3 cache. Less is read where memory is short. With 128 and 192 MiB a cache still held some of it at
# the next round: the figures were 10 to 14 % better than those of a run of a large model.
RAM_BYTES = 512 * MIB
_DISK_S = 0.5  # seconds of reading a disk
_LOAD_BYTES, _LOADS = 8 * MIB, 8  # so many loads, one after the other, before the clock is read


@dataclass(frozen=True)
class Ceilings:
    """The highest speeds of the machine. `disk_read_bytes_per_s`: 0 where no file was read."""

    ram_read_bytes_per_s: float
    int8_ops_per_s: float
    float32_flops_per_s: float
    disk_read_bytes_per_s: float = 0.0


def ceilings(threads: int, file: ProbeFile | None = None, isa: str | None = None) -> Ceilings:
    """Measures in this process. RAM is read by `threads` pinned threads. The peaks are those of dot products in
    registers, by the instructions that the kernels `isa` use (None: the best ones). The disk is read directly, for half
    a second, from `file`. Raises ValueError for an `isa` that this processor has not."""
    return Ceilings(
        ram_read_bytes_per_s(threads),
        _native.peak_per_s("int8", threads, isa),
        _native.peak_per_s("float32", threads, isa),
        disk_read_bytes_per_s(file) if file is not None else 0.0,
    )


def ceilings_apart(threads: int, file: Path | None) -> Ceilings:
    """Measures in a process of its own, so that its memory does not count as ours. Raises StorageFailed where that
    process fails."""
    done = child.run("penstock.runtime.ceilings", str(threads), *([str(file)] if file else []))
    if done.returncode:
        raise StorageFailed(f"measuring this machine's ceilings failed: {child.last_words(done)}")
    return Ceilings(**json.loads(done.stdout))


def ram_read_bytes_per_s(threads: int, rounds: int = 5) -> float:
    """The speed at which pinned threads read RAM: the median of so many rounds, one after the other."""
    with _memory() as memory:
        seconds: float = _native.ram_read_s(memory.address, memory.nbytes, threads, rounds)
        return memory.nbytes / seconds


def ram_readings(threads: int, rounds: int, pause_s: float) -> list[float]:
    """The same speed in bytes per second of each of so many rounds, with pauses after them."""
    readings: list[float] = []
    with _memory() as memory:
        for _ in range(rounds):
            readings.append(memory.nbytes / _native.ram_read_s(memory.address, memory.nbytes, threads, 1))
            time.sleep(pause_s)
    return readings


@contextmanager
def _memory() -> Iterator[_native.Memory]:
    """Memory that no cache holds."""
    memory = _native.Memory(max(8 * MIB, min(RAM_BYTES, host.available_bytes() // 4)), True)
    try:
        memory.populate()
        yield memory
    finally:
        memory.close()


def disk_read_bytes_per_s(file: ProbeFile) -> float:
    """The speed of direct reads of a file, one load after the other, as a pass loads its units."""
    nbytes = min(_LOAD_BYTES, file.file_bytes)
    read_bytes, start_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - start_s) < _DISK_S or not read_bytes:
        file.loads_s(file.reader, nbytes, _LOADS)
        read_bytes += _LOADS * nbytes
    return read_bytes / taken_s


def _main(args: list[str]) -> None:
    with existing_file(Path(args[1])) if args[1:] else nullcontext() as file:
        print(json.dumps(asdict(ceilings(int(args[0]), file))))


if __name__ == "__main__":
    try:
        _main(sys.argv[1:])
    except PenstockError as failure:
        sys.exit(failure.message)
