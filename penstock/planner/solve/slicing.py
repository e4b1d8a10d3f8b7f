"""ScheInfer §IV as mathematics: how a layer's FFN is best shared out between CPU, link and device.

Of a block, r_GG is at home on the device, r_CG crosses the link each time, and the CPU computes r_CC = 1 - r_CG - r_GG
from RAM (Eq. 4). `best_r_cg` is a closed form as the paper's Eq. 13 is: all lanes' times are linear in r_CG between few
points, so a layer's period, a maximum of sums of them, is least at one of these points, or where two such sums meet.

What the paper lacks, and is here:

*RAM.* While the link lifts from RAM and the CPU reads RAM, both take longer: by the factors c (the CPU beside the link)
and k (the link beside the CPU) of `MachineSpec.sharing`. Alone they would take C and Y seconds. Let both begin at once.
Whoever has less to do takes as long as its factor says; by then the other has done the rest of its work at full speed:

    c·C <= k·Y (the link outlasts the CPU):   CPU' = c·C                  link' = Y + c·C·(1 - 1/k)
    else                                      link' = k·Y                 CPU'  = C + k·Y·(1 - 1/c)

Both are linear in r_CG on either side of c·C = k·Y, which is one point more to look at. Where nothing but CPU and link
counts, the block takes the least of C (the CPU alone), Y (the link alone) and c·C·k·Y / (c·C + k·Y), all with C and Y
of the whole block: the last with r_CG = c·C / (c·C + k·Y), where both end together. With k = 1 that is worth while only
as long as Y·(1 - 1/c) < C: lifting a share must not cost the CPU more than it takes off it. With c = k = 1 it is the
paper's.

*Loads that run ahead.* The paper's link begins with the block. In penstock it never rests: what it lifts for a layer
may come while the device computes attention, as much as a ring holds. With `ahead_s`, the seconds of a layer outside
the block, its period is max(link', ahead_s + CPU', ahead_s + device, ahead_s + link' - ring), again linear between few
points.

`assign` is the greedy assignment of device memory by benefit per byte (Eq. 14), `best_n_g` the tokens of a prompt that
the device computes with the CPU's weights (CG', Eq. 15). Not here are Eq. 10 to 12, the end of a block whose transfers
begin with it: no plan of penstock loads so late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise
from math import inf, isinf
from typing import NamedTuple

_NARROW = 1e-9  # between points so near to each other there is nothing to find


@dataclass(frozen=True, slots=True)
class Line:
    """t = fixed_s + share · whole_s, for a share of a product's weights; nothing takes no time (Eq. 3, 4)."""

    fixed_s: float
    whole_s: float

    def at(self, share: float) -> float:
        return self.fixed_s + share * self.whole_s if share > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Lanes:
    """What goes on beside a block: `cpu_factor`: c above, `link_factor`: k; `ahead_s`: as above. `ring_s`: of lifting,
    as much as runs ahead. Outside the block, for the same layer: `link_also_s` of lifting, `cpu_also_s` of the CPU's
    computing."""

    cpu_factor: float = 1.0
    link_factor: float = 1.0
    ahead_s: float = 0.0
    ring_s: float = inf
    link_also_s: float = 0.0
    cpu_also_s: float = 0.0


class Times(NamedTuple):
    """Seconds of a block on the CPU, over the link and on the device; each as if alone."""

    cpu_s: float
    link_s: float
    gpu_s: float


@dataclass(frozen=True, slots=True)
class FfnBlock:
    """An FFN in one pass: each lane's time for it, were all of it that lane's."""

    lanes: Lanes
    cpu: Line
    link: Line
    gpu: Line

    def times(self, r_cg: float, r_gg: float = 0.0) -> Times:
        """Eq. 4."""
        r_cc = 1 - r_cg - r_gg
        cpu_s = self.cpu.at(r_cc if r_cc > 1e-12 else 0.0)
        return Times(cpu_s, self.link.at(r_cg), self.gpu.at(r_cg) + self.gpu.at(r_gg))


def shared(lanes: Lanes, times: Times) -> tuple[float, float]:
    """(CPU, link): seconds of both, each slowed while the other works. As if all that the link does fell beside the
    CPU: where it has gaps, the CPU may be a little quicker."""
    cpu_s, link_s = times.cpu_s + lanes.cpu_also_s, times.link_s + lanes.link_also_s
    c, k = lanes.cpu_factor, lanes.link_factor
    if c * cpu_s <= k * link_s:
        return c * cpu_s, link_s + c * cpu_s * (1 - 1 / k)
    return cpu_s + k * link_s * (1 - 1 / c), k * link_s


def finish_s(lanes: Lanes, times: Times) -> float:
    """A layer's period."""
    return max(_ends(lanes, times))


def _ends(lanes: Lanes, times: Times) -> tuple[float, ...]:
    """What a period is the maximum of. Each is linear where `times` is, apart from the point that `shared` has."""
    cpu_s, link_s = shared(lanes, times)
    outside_s = lanes.ahead_s + max(0.0, lanes.link_also_s - lanes.ring_s)  # what does not run ahead is waited for
    begins_s = outside_s + lanes.cpu_also_s
    lifted = () if isinf(lanes.ring_s) else (begins_s + link_s - lanes.link_also_s - lanes.ring_s,)
    return link_s, outside_s + cpu_s, begins_s + times.gpu_s, *lifted


def best_r_cg(block: FfnBlock, r_gg: float = 0.0) -> tuple[float, float]:
    """(r_CG, seconds): the optimum for a block of which `r_gg` is on the device already (Eq. 13), by at most some dozen
    evaluations. Among equals the least over the link."""
    most = 1 - r_gg

    def finish(r_cg: float) -> float:
        return finish_s(block.lanes, block.times(r_cg, r_gg))

    points = {0.0, most, *_meetings(block.lanes, lambda r_cg: block.times(r_cg, r_gg), 0.0, most)}
    seconds, r_cg = min((finish(r_cg), r_cg) for r_cg in points if 0 <= r_cg <= most)
    return r_cg, seconds


def _meetings(lanes: Lanes, times: Callable[[float], Times], lo: float, hi: float) -> Iterator[float]:
    """Where a period may be least inside (lo, hi), where `times` is linear: where CPU and link, slowed, end together,
    and to either side of that where two of `_ends` meet."""

    def difference(at: float) -> float:
        cpu_s, link_s, _ = times(at)
        cpu_s, link_s = cpu_s + lanes.cpu_also_s, link_s + lanes.link_also_s
        return lanes.cpu_factor * cpu_s - lanes.link_factor * link_s

    edges = [lo, *_zero(difference, lo, hi), hi]
    yield from edges[1:-1]
    for a, b in pairwise(edges):
        if b - a <= _NARROW * max(1.0, b):
            continue
        # From two points inside, not from the ends: a share of nothing has no fixed cost.
        p, q = a + (b - a) / 3, b - (b - a) / 3
        found = zip(_ends(lanes, times(p)), _ends(lanes, times(q)), strict=True)
        lines = [(at_p, (at_q - at_p) / (q - p)) for at_p, at_q in found]
        for (start, slope), (other, steeper) in combinations(lines, 2):
            if slope != steeper and a < (at := p + (other - start) / (slope - steeper)) < b:
                yield at


def _zero(f: Callable[[float], float], lo: float, hi: float) -> list[float]:
    """Where a function that is linear inside (lo, hi) is 0 there: one point, or none."""
    p, q = lo + (hi - lo) / 3, hi - (hi - lo) / 3
    at_p, at_q = f(p), f(q)
    found = p - at_p * (q - p) / (at_q - at_p) if at_p != at_q else lo
    return [found] if lo < found < hi else []


class Option(NamedTuple):
    """One way to keep something: bytes of device memory that it takes, and the seconds a pass takes for it."""

    nbytes: int
    seconds: float


def assign(items: Sequence[Sequence[Option]], budget_bytes: int) -> list[int]:
    """Greedy assignment of device memory (Eq. 14): which option of each item. An item begins with its first one.

    Each step takes the change that saves the most seconds a byte, of those that still fit. What that leaves to the
    optimum is at most what the first step that did not fit would have saved. So it is none where all steps are of one
    size, and where granules are small it is a granule's. Among equals the smallest step, and items by turns: parts that
    are alike keep even shares.
    """
    chosen = [0] * len(items)
    best: dict[tuple[int, int], tuple[float, int] | None] = {}  # where everything fits; most items are one object

    def best_step(options: Sequence[Option], now: int, left: int) -> tuple[float, int] | None:
        key = (id(options), now)
        if key not in best:
            best[key] = _best_step(options, now, max(option.nbytes for option in options))
        step = best[key]
        if step is None or options[step[1]].nbytes - options[now].nbytes <= left:
            return step
        return _best_step(options, now, left)

    left = budget_bytes - sum(options[0].nbytes for options in items)
    heap = [(*step, i) for i, options in enumerate(items) if (step := best_step(options, 0, left)) is not None]
    heapify(heap)
    while heap:
        _, wanted, i = heappop(heap)
        options, now = items[i], chosen[i]
        more = options[wanted].nbytes - options[now].nbytes
        if more <= left:
            chosen[i], left = wanted, left - more
        step = best_step(options, chosen[i], left)
        if step is not None:
            heappush(heap, (*step, i))
    return chosen


def _best_step(options: Sequence[Option], now: int, left: int) -> tuple[float, int] | None:
    """(seconds that a byte saves, negative; option) of the best change that fits (Eq. 14). Savings are rounded to nine
    digits, so that equal ones are."""
    best: tuple[float, int] | None = None
    start = options[now]
    for i, (nbytes, seconds) in enumerate(options):
        more, saved_s = nbytes - start.nbytes, start.seconds - seconds
        if 0 < more <= left and saved_s > 0 and (best is None or -saved_s / more < best[0] * (1 + 1e-9)):
            best = (-saved_s / more, i)
    return None if best is None else (float(f"{best[0]:.8e}"), best[1])


def best_n_g(finish_s: Callable[[int], float], rows: int) -> tuple[int, float]:
    """(n_g, seconds): how many of a prompt's `rows` tokens the device had best compute with the CPU's share of the
    weights, where `finish_s` says how long the block then takes (Eq. 15). Kernels for few rows have rates of their own,
    so it is linear in no stretch that is worth a formula: all are tried. Among equals the fewest."""
    seconds, n_g = min((finish_s(n), n) for n in range(rows + 1))
    return n_g, seconds
