"""GB/s of reads by size and by block (PIPO figures 6 and 7): direct against buffered, into huge and ordinary pages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from bench.pipo.plain import OrdinaryMemory, drop_cache
from bench.pipo.rounds import Figures, Row, against_first, in_turns, rows_of, show
from penstock import _native
from penstock.spec.plan import Plan
from penstock.units import GIB, KIB, MIB, format_bytes

FILE_BYTES, QUICK_FILE_BYTES = GIB, 4 * MIB
LEAST_BYTES = 32 * MIB  # of a figure: small reads are repeated, at other places
Read = Callable[[int, int], None]  # offset, bytes


class ReadFile:
    """A file of random bytes, two descriptors of it, and memory of both kinds for the largest read."""

    def __init__(self, path: Path, nbytes: int) -> None:
        block, self.nbytes = os.urandom(16 * MIB), nbytes
        with path.open("wb") as file:
            for at in range(0, nbytes, len(block)):
                file.write(block[: nbytes - at])
            file.flush()
            os.fsync(file.fileno())
        self.buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.direct, _ = _native.open_direct(str(path))
        self.huge = _native.Memory(nbytes, True)
        self.huge.populate()
        self.ordinary = OrdinaryMemory(nbytes)
        self._rng = np.random.default_rng(0)

    def close(self) -> None:
        os.close(self.buffered)
        os.close(self.direct)

    def bytes_per_s(self, read: Read, nbytes: int) -> float:
        """Reads of so many bytes, at shuffled places, so that no read profits from the one before; nothing of the file
        is in the page cache when they begin."""
        places = self.nbytes // nbytes
        chosen = self._rng.permutation(places)[: max(1, min(places, LEAST_BYTES // nbytes))]
        drop_cache(self.buffered)
        start_s = time.perf_counter()
        for place in chosen.tolist():
            read(place * nbytes, nbytes)
        return len(chosen) * nbytes / (time.perf_counter() - start_s)


@contextmanager
def read_file(folder: Path, nbytes: int) -> Iterator[ReadFile]:
    path = folder / "reads"
    try:
        file = ReadFile(path, nbytes)
        try:
            yield file
        finally:
            file.close()
    finally:
        path.unlink(missing_ok=True)


def direct_reads(file: ReadFile, address: int, block_bytes: int, depth: int, engine: str) -> Read:
    """As a session's loads are done: in blocks, so many in flight."""
    if depth == 1 and engine == "threads":

        def one_by_one(offset: int, nbytes: int) -> None:
            assert _native.read_into(file.direct, offset, address, nbytes, block_bytes) == nbytes

        return one_by_one
    reader = _native.Reader(engine, depth, block_bytes)

    def several(offset: int, nbytes: int) -> None:
        assert reader.start(file.direct, offset, address, nbytes).wait() == nbytes

    return several


def buffered_reads(file: ReadFile, address: int, block_bytes: int | None = None) -> Read:
    """Through the page cache; `block_bytes` None: each in one call."""

    def read(offset: int, nbytes: int) -> None:
        assert _native.read_into(file.buffered, offset, address, nbytes, block_bytes or nbytes) == nbytes

    return read


def by_size(file: ReadFile, plan: Plan, rounds: int) -> list[Row]:
    """64 KiB to 1 GiB (Figure 7), with the plan's block size, depth and engine."""
    how = (plan.io_block_bytes, plan.io_depth, plan.io_engine)
    ways = {
        "buffered, ordinary pages": buffered_reads(file, file.ordinary.address),
        "buffered, huge pages": buffered_reads(file, file.huge.address),
        "direct, ordinary pages": direct_reads(file, file.ordinary.address, *how),
        "direct, huge pages": direct_reads(file, file.huge.address, *how),
    }
    sizes = [n for n in (64 * KIB << 2 * i for i in range(8)) if n <= file.nbytes]
    title = f"reads by size, GB/s; direct ones in blocks of {format_bytes(how[0])}, {how[1]} in flight by {how[2]}"
    return _table(file, title, sizes, lambda way, size: (ways[way], size), list(ways), rounds)


def by_block(file: ReadFile, plan: Plan, rounds: int, most_bytes: int = 128 * MIB) -> list[Row]:
    """Of 128 MiB, 256 KiB to 64 MiB at a time (Figure 6): what the size of a block is worth."""
    nbytes = min(most_bytes, file.nbytes)
    how = (plan.io_depth, plan.io_engine)
    ways: dict[str, Callable[[int], Read]] = {
        "buffered, ordinary pages": lambda block: buffered_reads(file, file.ordinary.address, block),
        "direct, ordinary pages": lambda block: direct_reads(file, file.ordinary.address, block, *how),
        "direct, huge pages": lambda block: direct_reads(file, file.huge.address, block, *how),
    }
    sizes = [n for n in (256 * KIB << i for i in range(9)) if n <= nbytes]
    title = f"reads of {format_bytes(nbytes)} by block, GB/s; {how[0]} in flight by {how[1]}"
    return _table(file, title, sizes, lambda way, size: (ways[way](size), nbytes), list(ways), rounds)


def _table(
    file: ReadFile, title: str, sizes: list[int], read_of: Callable[[str, int], tuple[Read, int]], ways: list[str],
    rounds: int,
) -> list[Row]:  # fmt: skip
    """A row per size and way; ratios against the first way of the size. `read_of`: how to read, and how much."""

    def turn(way: str, size: int) -> Figures:
        return {"bytes_per_s": file.bytes_per_s(*read_of(way, size))}

    rows: list[Row] = []
    for size in sizes:
        turns = {way: partial(turn, way, size) for way in ways}
        rows += [row | {"bytes": size} for row in rows_of(in_turns(turns, rounds), against_first(turns))]
    shown = []
    for size in sizes:
        of_size = [row for row in rows if row["bytes"] == size]
        shown.append({"name": format_bytes(size), **{row["name"]: row["bytes_per_s"] for row in of_size}})
    show(title, shown, {way: (way, 1e9) for way in ways})
    return rows
