"""How loads are best read from this disk: block size, blocks in flight and engine, by experiment (PIPO appendix A).

A disk's speed swings from second to second, so candidates take turns, and what counts is how each does beside the
others of the same turn; the median of a few turns decides. First all of them briefly, then the best ones again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock import _native
from penstock.spec.machine import Reads
from penstock.spec.places import DISK
from penstock.units import KIB, MIB, format_bytes

# Larger ones were not faster (16 MiB: 2.54 GB/s under computing where two of 8 MiB gave 2.72), and a load has few.
BLOCKS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
DEPTHS = (1, 2, 4, 8)
SMALL = MIB  # loads up to here are one block each, and may have an engine of their own
_LOAD, _SMALL_LOADS = 16 * MIB, (16 * KIB, 128 * KIB, MIB)
_LARGE_TURN = ((_LOAD, 6),)
_SMALL_COUNT = 16
_FINALISTS, _FINAL_TURNS = 6, 6
# Among equals the fewest and largest blocks: less work for the processor, which computes meanwhile.
_EQUAL = 1.03
# One in flight is often as fast here, where nothing else runs. Under computing it is not, since whoever sends the next
# one has to get a core first: an 8B model read at 2.58 GB/s with one block of 8 MiB in flight, at 2.80 with two.
_LEAST_DEPTH = 2
# An io_uring has to be clearly better: it is one more thing that a system may refuse.
_MARGIN = 1.05
_ENGINE_TURNS = 8

# Seconds per load of so many bytes each, of a run of so many loads, by a reader.
LoadsS = Callable[[_native.Reader, int, int], float]


class Way(NamedTuple):
    """A way of reading."""

    engine: str
    depth: int
    block_bytes: int


@dataclass(frozen=True)
class _Seen:
    """What was measured of one way to read. `logs`: ln(its time ÷ the average of all ways), turn by turn.
    `bytes_per_s`: of the largest loads."""

    logs: tuple[float, ...]
    bytes_per_s: float

    @property
    def ratio(self) -> float:
        return math.exp(statistics.median(self.logs))


def best_reads(loads_s: LoadsS) -> tuple[Reads, ...]:
    """For loads of at most 1 MiB, and for larger ones."""
    try:
        _native.Reader("io_uring", 1, MIB)
        refused = ""
    except OSError as error:
        refused = f"this system refuses io_uring ({error.strerror})"
    return (_small(loads_s, refused), _large(loads_s, refused))


def _large(loads_s: LoadsS, refused: str) -> Reads:
    ways = [Way("threads", depth, block) for block in BLOCKS for depth in DEPTHS]
    first = _compare(ways, loads_s, ((_LOAD, 4),), 2)
    # Of each depth the best, so that a shallow one is not out for bad luck.
    finalists = [min((w for w in ways if w.depth == depth), key=lambda w: first[w].ratio) for depth in DEPTHS]
    others = sorted(set(ways) - set(finalists), key=lambda w: first[w].ratio)
    finalists += others[: _FINALISTS - len(finalists)]
    seen = _compare(finalists, loads_s, _LARGE_TURN, _FINAL_TURNS)
    best = choose({way: found.ratio for way, found in seen.items()})
    chosen, final, why = _engine(best, loads_s, _LARGE_TURN, refused)
    slow = Way("threads", 1, BLOCKS[0])
    beside = f"one of {format_bytes(slow.block_bytes)} at a time took {first[slow].ratio / first[best].ratio:.1f} times"
    return _reads(chosen, final, 0, f"{beside} as long; {why}")


def _small(loads_s: LoadsS, refused: str) -> Reads:
    sizes = tuple((nbytes, _SMALL_COUNT) for nbytes in _SMALL_LOADS)
    ways = [Way("threads", depth, SMALL) for depth in DEPTHS]
    seen = _compare(ways, loads_s, sizes, 4)
    best = choose({way: found.ratio for way, found in seen.items()})
    chosen, found, why = _engine(best, loads_s, sizes, refused)
    return _reads(chosen, found, SMALL, why)


def _engine(way: Way, loads_s: LoadsS, sizes: Sequence[tuple[int, int]], refused: str) -> tuple[Way, _Seen, str]:
    """The way itself, or an io_uring where that is faster by the margin; and why."""
    other = Way("io_uring", way.depth, way.block_bytes)
    if refused:
        return way, _compare([way], loads_s, sizes, 3)[way], refused
    seen = _compare([way, other], loads_s, sizes, _ENGINE_TURNS)
    gains = [math.exp(a - b) for a, b in zip(seen[way].logs, seen[other].logs, strict=True)]
    gain, wins = statistics.median(gains), sum(each > 1 for each in gains)
    told = f"io_uring took {1 / gain:.0%} of the time of threads, and less in {wins} of {len(gains)} turns"
    if gain >= _MARGIN and wins >= _ENGINE_TURNS - 1:
        return other, seen[other], told
    return way, seen[way], f"{told}: not surely {_MARGIN - 1:.0%} faster"


def _reads(way: Way, seen: _Seen, most_bytes: int, why: str) -> Reads:
    flight = f"{way.depth} in flight" if way.depth > 1 else "one at a time"
    reason = f"measured: blocks of {format_bytes(way.block_bytes)}, {flight}, by {way.engine}; {why}"
    return Reads(DISK.reads, way.block_bytes, way.depth, way.engine, seen.bytes_per_s, reason, most_bytes)


def choose(ratios: dict[Way, float]) -> Way:
    """The least depth from two on, then the largest block, among those about as fast as the fastest of them."""
    ratios = {way: ratio for way, ratio in ratios.items() if way.depth >= _LEAST_DEPTH} or ratios
    best = min(ratios.values())
    return min((way for way in ratios if ratios[way] <= best * _EQUAL), key=lambda way: (way.depth, -way.block_bytes))


def _compare(ways: Sequence[Way], loads_s: LoadsS, sizes: Sequence[tuple[int, int]], turns: int) -> dict[Way, _Seen]:
    """`sizes`: bytes of a load, and how many loads a turn has of them."""
    rng = np.random.default_rng(0)
    taken: dict[Way, list[float]] = {way: [] for way in ways}
    largest: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        logs = {}
        for i in rng.permutation(len(ways)):
            way = ways[i]
            reader = _native.Reader(way.engine, way.depth, way.block_bytes)  # not all at once: they have 100 threads
            found = [loads_s(reader, nbytes, count) for nbytes, count in sizes]
            reader.close()
            logs[way] = statistics.fmean(math.log(seconds) for seconds in found)
            largest[way].append(found[-1])
        mean = statistics.fmean(logs.values())
        for way, log in logs.items():
            taken[way].append(log - mean)
    return {way: _Seen(tuple(taken[way]), sizes[-1][0] / statistics.median(largest[way])) for way in ways}
