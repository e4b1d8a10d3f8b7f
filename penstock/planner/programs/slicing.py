"""The mathematics of ScheInfer §IV: how a layer's FFN is best shared out between the CPU, the link and the device.

The FFN is a block in three slices. The share r_GG is at home on the device. The share r_CG crosses the link in each
pass. The CPU computes the rest, r_CC = 1 - r_CG - r_GG, from RAM (Eq. 4). `best_r_cg` finds the best r_CG in closed
form, as the paper's Eq. 13 does. The time of each lane is linear in r_CG between a few points. The layer's period is a
maximum of sums of these times. So it is least at one of these points, or where two of the sums meet.

Two things are here that the paper lacks.

*Shared RAM.* While the link lifts from RAM and the CPU reads RAM, both take longer. `MachineSpec.sharing` has the
factors: c of the CPU beside the link, k of the link beside the CPU. Alone the CPU takes C seconds and the link Y. Both
begin at once. The one that ends first takes its factor longer. The other one is slowed until then, and does the rest
of its work at full speed:

    c·C <= k·Y (the CPU ends first):    CPU'  = c·C     link' = Y + c·C·(1 - 1/k)
    else (the link ends first):         link' = k·Y     CPU'  = C + k·Y·(1 - 1/c)

Both are linear in r_CG on either side of c·C = k·Y, so that is one more point to look at. If only CPU and link counted,
and C and Y were those of the whole block, the best times would be

    the CPU alone                               C
    the link alone                              Y
    both, r_CG = c·C / (c·C + k·Y)              c·C·k·Y / (c·C + k·Y), both end together

With k = 1 the last is the least only while Y·(1 - 1/c) < C: otherwise lifting a share slows the CPU by more than it
takes off the CPU. With c = k = 1 these are the paper's formulas.

*Loads that run ahead.* In the paper the link begins when the block begins. In penstock the link never rests: the device
computes attention while weights are lifted for the FFN, as many as the ring holds. With `ahead_s`, the seconds of a
layer outside the block, and `ring_s`, the seconds in which the link fills the ring, a layer's period is

    max(link', ahead_s + CPU', ahead_s + device, ahead_s + link' - ring_s)

which is again linear in r_CG between a few points.

`assign` assigns device memory greedily by the seconds that a byte saves (Eq. 14). `best_n_g` says how many tokens of a
prompt the device computes with the CPU's weights (CG', Eq. 15). Eq. 10 to 12 are not here. They are of transfers that
begin when their block begins, and no plan of penstock loads so late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise
from math import inf, isinf
from typing import NamedTuple

_NARROW = 1e-9  # an interval of r_CG that is no wider has no point inside that is worth looking at


@dataclass(frozen=True, slots=True)
class SliceTime:
    """Seconds of a lane as a function of its share of the FFN (Eq. 3, 4): fixed_s + share · whole_s, and 0 for a share
    of 0."""

    fixed_s: float
    whole_s: float

    def at(self, share: float) -> float:
        return self.fixed_s + share * self.whole_s if share > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the lanes do beside a block, in the same layer.

    cpu_factor, link_factor  c and k of the module's docstring
    ahead_s         seconds of the layer outside the block
    ring_s          seconds in which the link fills the ring: so far can lifts run ahead
    link_also_s     seconds of lifts outside the block
    cpu_also_s      seconds that the CPU computes outside the block
    """

    cpu_factor: float = 1.0
    link_factor: float = 1.0
    ahead_s: float = 0.0
    ring_s: float = inf
    link_also_s: float = 0.0
    cpu_also_s: float = 0.0


class Times(NamedTuple):
    """Seconds of a block on the CPU, over the link and on the device. Each is of the lane alone."""

    cpu_s: float
    link_s: float
    gpu_s: float


@dataclass(frozen=True, slots=True)
class FfnBlock:
    """An FFN in one pass. `cpu`, `link`, `gpu`: the seconds of each lane for a share of it."""

    lanes: Lanes
    cpu: SliceTime
    link: SliceTime
    gpu: SliceTime

    def times(self, r_cg: float, r_gg: float = 0.0) -> Times:
        """Seconds of each lane for its share (Eq. 4)."""
        r_cc = 1 - r_cg - r_gg
        cpu_s = self.cpu.at(r_cc if r_cc > 1e-12 else 0.0)
        return Times(cpu_s, self.link.at(r_cg), self.gpu.at(r_cg) + self.gpu.at(r_gg))

    def period_s(self, r_cg: float, r_gg: float) -> float:
        """Seconds from one such layer to the next."""
        return finish_s(self.lanes, self.times(r_cg, r_gg))


def shared(lanes: Lanes, times: Times) -> tuple[float, float]:
    """(seconds of the CPU, seconds of the link), each slowed while the other one works: CPU' and link' of the module's
    docstring. Both are taken to begin at once. If the link has gaps, the CPU is a little quicker than this."""
    cpu_s, link_s = times.cpu_s + lanes.cpu_also_s, times.link_s + lanes.link_also_s
    c, k = lanes.cpu_factor, lanes.link_factor
    if c * cpu_s <= k * link_s:
        return c * cpu_s, link_s + c * cpu_s * (1 - 1 / k)
    return cpu_s + k * link_s * (1 - 1 / c), k * link_s


def finish_s(lanes: Lanes, times: Times) -> float:
    """A layer's period in seconds."""
    return max(_ends(lanes, times))


def _ends(lanes: Lanes, times: Times) -> tuple[float, ...]:
    """The sums whose maximum is a layer's period, in seconds. Each is linear in r_CG where `times` is, but for a bend
    where `shared` changes its branch."""
    cpu_s, link_s = shared(lanes, times)
    # Lifts that the ring has no room for are waited for.
    outside_s = lanes.ahead_s + max(0.0, lanes.link_also_s - lanes.ring_s)
    begins_s = outside_s + lanes.cpu_also_s
    lifted = () if isinf(lanes.ring_s) else (begins_s + link_s - lanes.link_also_s - lanes.ring_s,)
    return link_s, outside_s + cpu_s, begins_s + times.gpu_s, *lifted


def best_r_cg(block: FfnBlock, r_gg: float = 0.0) -> tuple[float, float]:
    """(r_CG, the period in seconds): the optimum for a block of which `r_gg` is at home on the device (Eq. 13). It
    takes some dozen evaluations at most. Of equals the least r_CG is taken."""
    most = 1 - r_gg
    points = {0.0, most, *_meetings(block, r_gg)}
    seconds, r_cg = min((block.period_s(r_cg, r_gg), r_cg) for r_cg in points if 0 <= r_cg <= most)
    return r_cg, seconds


def _meetings(block: FfnBlock, r_gg: float) -> Iterator[float]:
    """The values of r_CG inside (0, 1 - r_GG) at which the period may be least. One is the point where CPU' and link'
    are equal. The others are the points on either side of it where two of `_ends` meet."""
    lanes, times, hi = block.lanes, partial(block.times, r_gg=r_gg), 1 - r_gg

    def difference(r_cg: float) -> float:
        cpu_s, link_s, _ = times(r_cg)
        cpu_s, link_s = cpu_s + lanes.cpu_also_s, link_s + lanes.link_also_s
        return lanes.cpu_factor * cpu_s - lanes.link_factor * link_s

    edges = [0.0, *_zero(difference, 0.0, hi), hi]
    yield from edges[1:-1]
    for a, b in pairwise(edges):
        if b - a <= _NARROW * max(1.0, b):
            continue
        # Lines are taken through two points inside the interval. At its ends a share may be 0, which has no fixed cost.
        p, q = a + (b - a) / 3, b - (b - a) / 3
        both = zip(_ends(lanes, times(p)), _ends(lanes, times(q)), strict=True)
        lines = [(at_p, (at_q - at_p) / (q - p)) for at_p, at_q in both]
        for (start, slope), (other, steeper) in combinations(lines, 2):
            if slope != steeper and a < (meeting := p + (other - start) / (slope - steeper)) < b:
                yield meeting


def _zero(f: Callable[[float], float], lo: float, hi: float) -> list[float]:
    """The zero inside (lo, hi) of a function that is linear there: one point, or none."""
    p, q = lo + (hi - lo) / 3, hi - (hi - lo) / 3
    at_p, at_q = f(p), f(q)
    zero = p - at_p * (q - p) / (at_q - at_p) if at_p != at_q else lo
    return [zero] if lo < zero < hi else []


class Option(NamedTuple):
    """One way to keep an item: the bytes of device memory that it takes, and the seconds that the item then takes."""

    nbytes: int
    seconds: float


def assign(items: Sequence[Sequence[Option]], budget_bytes: int) -> list[int]:
    """Assigns device memory greedily (Eq. 14): the index of the chosen option of each item. Every item begins with its
    first option.

    Each step makes the change that saves the most seconds a byte, of the changes that still fit. The result misses the
    optimum by at most the seconds that the first change which did not fit would have saved. If all changes are of one
    size it misses nothing. If changes are granules it misses a granule's seconds. Of equal changes the smallest is
    made, and items take turns, so that parts which are alike keep even shares.
    """
    chosen = [0] * len(items)
    # (id of the options, index of the present one) → the best change if everything fits. Most items share their
    # options.
    best: dict[tuple[int, int], tuple[float, int] | None] = {}

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
    """(minus the seconds that a byte saves, the index of the new option) of the best change that fits `left` bytes
    (Eq. 14). Savings are rounded to nine digits, so that rounding errors do not tell equals apart."""
    best: tuple[float, int] | None = None
    start = options[now]
    for i, (nbytes, seconds) in enumerate(options):
        more, saved_s = nbytes - start.nbytes, start.seconds - seconds
        if 0 < more <= left and saved_s > 0 and (best is None or -saved_s / more < best[0] * (1 + 1e-9)):
            best = (-saved_s / more, i)
    return None if best is None else (float(f"{best[0]:.8e}"), best[1])


def best_n_g(finish_s: Callable[[int], float], rows: int) -> tuple[int, float]:
    """(n_g, the period in seconds): how many of a prompt's `rows` tokens the device had best compute with the CPU's
    share of the weights (Eq. 15). `finish_s`: n_g → seconds. All values are tried. A closed form was rejected: kernels
    for few rows have rates of their own, so the seconds are linear on short stretches only. Of equals the least n_g is
    taken."""
    seconds, n_g = min((finish_s(n), n) for n in range(rows + 1))
    return n_g, seconds
