"""What this machine delivers at most, now: reads of RAM and of a disk, and dot products. That drifts, so whoever
compares a speed with it measures it in the same run.

`python -m penstock.runtime.ceilings THREADS [FILE]` prints them as JSON, of the disk that FILE lies on.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock import _native
from penstock.errors import PenstockError, StorageFailed
from penstock.runtime import child, host
from penstock.runtime.probe_disk import ProbeFile, existing_file
from penstock.units import MIB

# 16 times a large L3 cache; less where memory is short. With 128 and 192 MiB what a cache still held at the next round
# made the figures 10 to 14 % better than what a run of a large model then gets.
RAM_BYTES = 512 * MIB
_DISK_S = 0.5  # of reads
_LOAD_BYTES, _LOADS = 8 * MIB, 8  # one after the other, before the clock is read


@dataclass(frozen=True)
class Ceilings:
    """`disk_read_bytes_per_s`: 0 where no file was read."""

    ram_read_bytes_per_s: float
    int8_ops_per_s: float
    float32_flops_per_s: float
    disk_read_bytes_per_s: float = 0.0


def ceilings(threads: int, file: ProbeFile | None = None) -> Ceilings:
    """RAM: what `threads` pinned threads read; the peaks: dot products in registers; the disk: half a second of direct
    reads of `file`."""
    return Ceilings(
        ram_read_bytes_per_s(threads),
        _native.peak_per_s("int8", threads),
        _native.peak_per_s("float32", threads),
        disk_read_bytes_per_s(file) if file is not None else 0.0,
    )


def ceilings_apart(threads: int, file: Path | None) -> Ceilings:
    """In a process of its own, whose memory is not ours. Raises StorageFailed."""
    done = child.run("penstock.runtime.ceilings", str(threads), *([str(file)] if file else []))
    if done.returncode:
        raise StorageFailed(f"measuring this machine's ceilings failed: {child.last_words(done)}")
    return Ceilings(**json.loads(done.stdout))


def ram_read_bytes_per_s(threads: int) -> float:
    """What pinned threads read."""
    nbytes = max(8 * MIB, min(RAM_BYTES, host.available_bytes() // 4))
    memory = _native.Memory(nbytes, True)
    memory.populate()
    seconds: float = _native.ram_read_s(memory.address, nbytes, threads, 5)
    memory.close()
    return nbytes / seconds


def disk_read_bytes_per_s(file: ProbeFile) -> float:
    """What direct reads of a file give, one after the other, as a pass loads its units."""
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
