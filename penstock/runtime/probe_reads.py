"""Finds by experiment how loads are best read from this disk: block size, blocks in flight, engine (PIPO appendix A).

A disk's speed swings from second to second, so the candidates take turns. Each is judged by its time beside the others'
of the same turn, and the median of a few turns decides. First all candidates run briefly, then the best ones again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock import _native
from penstock.spec.machine import Reads
from penstock.spec.places import DISK
from penstock.units import KIB, MIB, format_bytes

# Larger blocks were not faster (16 MiB: 2.54 GB/s under computing, where two of 8 MiB gave 2.72), and a load of few
# blocks has little in flight.
BLOCKS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
DEPTHS = (1, 2, 4, 8)
SMALL = MIB  # loads up to here are one block each, and may have an engine of their own
_LOAD, _SMALL_LOADS = 16 * MIB, (16 * KIB, 128 * KIB, MIB)
_LARGE_TURN = ((_LOAD, 6),)
_SMALL_COUNT = 16
_FINALISTS, _FINAL_TURNS = 6, 6
# Ways whose times differ by less than this are equals. Among equals the fewest and largest blocks win: less work for
# the processor, which computes meanwhile.
_EQUAL = 1.03
# One block in flight is often as fast here, where nothing else runs. Under computing it is not, for the thread that
# sends the next block has to get a core first: an 8B model read at 2.58 GB/s with one block of 8 MiB in flight, at 2.80
# with two.
_LEAST_DEPTH = 2
# An io_uring has to be faster by this factor, for it is one more thing that a system may refuse.
_MARGIN = 1.05
_ENGINE_TURNS = 8

# (reader, bytes of a load, number of loads) → seconds per load of a run of such loads.
LoadsS = Callable[[_native.Reader, int, int], float]


class Way(NamedTuple):
    """A way to read loads. `engine`: "threads" or "io_uring". `depth`: blocks in flight."""

    engine: str
    depth: int
    block_bytes: int


@dataclass(frozen=True)
class _Tried:
    """Measurements of one way to read. `logs`: ln(its time ÷ the geometric mean of all ways), turn by turn.
    `bytes_per_s`: of the largest loads."""

    logs: tuple[float, ...]
    bytes_per_s: float

    @property
    def ratio(self) -> float:
        return math.exp(statistics.median(self.logs))


def best_reads(loads_s: LoadsS, until_s: float = math.inf) -> tuple[Reads, ...]:
    """The best ways to read loads of at most 1 MiB, and to read larger ones, in this order. After `until_s` of
    `time.perf_counter` nothing more is tried: what was not found out by then is missing."""
    try:
        _native.Reader("io_uring", 1, MIB)
        refused = ""
    except OSError as error:
        refused = f"this system refuses io_uring ({error.strerror})"
    small, large = _small(loads_s, refused, until_s), _large(loads_s, refused, until_s)
    return tuple(reads for reads in (small, large) if reads is not None)


def _large(loads_s: LoadsS, refused: str, until_s: float) -> Reads | None:
    ways = [Way("threads", depth, block) for block in BLOCKS for depth in DEPTHS]
    first = _compare(ways, loads_s, ((_LOAD, 4),), 2, until_s)
    if not first:
        return None
    # The best way of each depth is among them, so that no depth drops out by bad luck.
    finalists = [min((w for w in ways if w.depth == depth), key=lambda w: first[w].ratio) for depth in DEPTHS]
    others = sorted(set(ways) - set(finalists), key=lambda w: first[w].ratio)
    finalists += others[: _FINALISTS - len(finalists)]
    tried = _compare(finalists, loads_s, _LARGE_TURN, _FINAL_TURNS, until_s) or first
    best = choose({way: times.ratio for way, times in tried.items()})
    chosen, final, why = _engine(best, tried[best], loads_s, _LARGE_TURN, refused, until_s)
    slow = Way("threads", 1, BLOCKS[0])
    beside = f"one of {format_bytes(slow.block_bytes)} at a time took {first[slow].ratio / first[best].ratio:.1f} times"
    return _reads(chosen, final, 0, f"{beside} as long; {why}")


def _small(loads_s: LoadsS, refused: str, until_s: float) -> Reads | None:
    sizes = tuple((nbytes, _SMALL_COUNT) for nbytes in _SMALL_LOADS)
    ways = [Way("threads", depth, SMALL) for depth in DEPTHS]
    tried = _compare(ways, loads_s, sizes, 4, until_s)
    if not tried:
        return None
    best = choose({way: times.ratio for way, times in tried.items()})
    chosen, final, why = _engine(best, tried[best], loads_s, sizes, refused, until_s)
    return _reads(chosen, final, SMALL, why)


def _engine(
    way: Way, before: _Tried, loads_s: LoadsS, sizes: Sequence[tuple[int, int]], refused: str, until_s: float
) -> tuple[Way, _Tried, str]:
    """Chooses between a way and the same way with an io_uring, which has to be faster by _MARGIN. Returns the chosen
    way, its times, and the reason.

    `before`: the way's times as known. `refused`: why this system has no io_uring, or "" where it has."""
    other = Way("io_uring", way.depth, way.block_bytes)
    if refused:
        return way, _compare([way], loads_s, sizes, 3, until_s).get(way, before), refused
    tried = _compare([way, other], loads_s, sizes, _ENGINE_TURNS, until_s)
    if not tried:
        return way, before, "io_uring was not tried for want of time"
    gains = [math.exp(a - b) for a, b in zip(tried[way].logs, tried[other].logs, strict=True)]
    gain, wins = statistics.median(gains), sum(turn > 1 for turn in gains)
    told = f"io_uring took {1 / gain:.0%} of the time of threads, and less in {wins} of {len(gains)} turns"
    if gain >= _MARGIN and wins >= _ENGINE_TURNS - 1:  # never by fewer turns
        return other, tried[other], told
    return way, tried[way], f"{told}: not surely {_MARGIN - 1:.0%} faster"


def _reads(way: Way, times: _Tried, most_bytes: int, why: str) -> Reads:
    flight = f"{way.depth} in flight" if way.depth > 1 else "one at a time"
    reason = f"measured: blocks of {format_bytes(way.block_bytes)}, {flight}, by {way.engine}; {why}"
    return Reads(DISK.reads, way.block_bytes, way.depth, way.engine, times.bytes_per_s, reason, most_bytes)


def choose(ratios: dict[Way, float]) -> Way:
    """The best of several ways, by their time beside the others': of those about as fast as the fastest, the one with
    the least depth, and then with the largest blocks. Depths below two count only where there are no others."""
    ratios = {way: ratio for way, ratio in ratios.items() if way.depth >= _LEAST_DEPTH} or ratios
    best = min(ratios.values())
    return min((way for way in ratios if ratios[way] <= best * _EQUAL), key=lambda way: (way.depth, -way.block_bytes))


def _compare(
    ways: Sequence[Way], loads_s: LoadsS, sizes: Sequence[tuple[int, int]], turns: int, until_s: float
) -> dict[Way, _Tried]:
    """Times all ways in each of `turns` turns. `sizes`: (bytes of a load, how many such loads a turn has). A turn that
    is not over by `until_s` does not count, and is the last; {} where none is."""
    rng = np.random.default_rng(0)
    logs_by_way: dict[Way, list[float]] = {way: [] for way in ways}
    largest: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        logs, largest_s = {}, {}
        for i in rng.permutation(len(ways)):
            if time.perf_counter() > until_s:
                break
            way = ways[i]
            # One reader at a time: those of all ways together would have 100 threads.
            reader = _native.Reader(way.engine, way.depth, way.block_bytes)
            seconds_by_size = [loads_s(reader, nbytes, count) for nbytes, count in sizes]
            reader.close()
            logs[way] = statistics.fmean(math.log(seconds) for seconds in seconds_by_size)
            largest_s[way] = seconds_by_size[-1]
        if len(logs) < len(ways):
            break
        mean = statistics.fmean(logs.values())
        for way, log in logs.items():
            logs_by_way[way].append(log - mean)
            largest[way].append(largest_s[way])
    return {
        way: _Tried(tuple(logs_by_way[way]), sizes[-1][0] / statistics.median(largest[way]))
        for way in ways
        if largest[way]
    }
