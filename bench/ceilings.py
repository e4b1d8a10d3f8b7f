"""What the machine can do right now: reads of RAM, and direct reads of a model's own files into huge pages."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock import _native
from penstock.runtime import host
from penstock.runtime.ceilings import ram_read_bytes_per_s
from penstock.units import MIB

DEPTHS, BLOCKS = (1, 2, 4), (8 * MIB,)
READ_S = 0.6  # of each depth; the best of many short ones was a burst, which no run keeps up
RAM_READINGS = 3
_PAGE_BYTES = 4096  # of which a direct read takes whole ones


@dataclass(frozen=True)
class Reading:
    """`depth`: how many reads in flight, of `block_bytes`, were the fastest."""

    ram_read_bytes_per_s: float
    disk_read_bytes_per_s: float
    depth: int
    block_bytes: int


class Ceilings:
    """Direct reads go on where the ones before ended, around and around, so that no cache below us helps."""

    def __init__(
        self, files: Iterable[Path], blocks: tuple[int, ...] = BLOCKS, depths: tuple[int, ...] = DEPTHS,
        room_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`blocks`: bytes of a read; where no file has so many, as many as the largest has. `room_bytes`: what is read
        goes to all of so much memory in turns. 0: each thread reads to one place again and again, which a processor's
        cache holds. Ends the bench where the files cannot be read directly, or have less than a page."""
        self._fds: list[tuple[int, int]] = []
        for file in files:
            fd, direct = _native.open_direct(str(file))
            if not direct:
                sys.exit(f"{file}: this file system refuses direct reads, so there is no ceiling to measure")
            self._fds.append((fd, file.stat().st_size))
        most = max((size for _, size in self._fds), default=0) // _PAGE_BYTES * _PAGE_BYTES
        if not most:
            sys.exit("no file has a page of 4096 bytes, so there is no ceiling of the disk to measure")
        blocks = tuple(min(nbytes, most) for nbytes in blocks)
        self._blocks, self._depths = blocks, depths
        self._spread = room_bytes > 0
        self._slots = max(room_bytes // max(blocks), max(depths))
        self._memory = _native.Memory(self._slots * max(blocks), True)
        self._memory.populate()
        self._places = {nbytes: itertools.cycle(self._whole_blocks(nbytes)) for nbytes in blocks}
        self._pool = ThreadPoolExecutor(max(depths))

    def read(self) -> Reading:
        """The best of all depths and blocks, and the median of some reads of RAM."""
        ram = statistics.median(ram_read_bytes_per_s(host.usable_cpus()) for _ in range(RAM_READINGS))
        tried = ((self._disk(depth, block), depth, block) for depth in self._depths for block in self._blocks)
        return Reading(ram, *max(tried))

    def close(self) -> None:
        self._pool.shutdown()
        for fd, _ in self._fds:
            os.close(fd)

    def _whole_blocks(self, nbytes: int) -> list[tuple[int, int]]:
        """(file, offset) of every whole block."""
        return [(fd, at) for fd, size in self._fds for at in range(0, size - nbytes + 1, nbytes)]

    def _disk(self, depth: int, nbytes: int) -> float:
        """Bytes per second, so many reads in flight, a thread each."""
        start_s, each = time.perf_counter(), self._slots // depth if self._spread else 1

        def reads(i: int) -> int:
            done = 0
            for slot in itertools.cycle(range(i * each, (i + 1) * each)):
                if time.perf_counter() - start_s >= READ_S:
                    break
                fd, at = next(self._places[nbytes])
                done += _native.read_into(fd, at, self._memory.address + slot * max(self._blocks), nbytes, nbytes)
            return done

        read_bytes = sum(self._pool.map(reads, range(depth)))
        return read_bytes / (time.perf_counter() - start_s)
