"""ScheInfer §IV as mathematics: how a layer's FFN is best shared out between CPU, link and device.

Of a block, r_GG is at home on the device, r_CG crosses the link each time, and the CPU computes r_CC = 1 - r_CG - r_GG
from RAM (Eq. 4). `best_r_cg` is the paper's closed form: all lanes' times are linear in r_CG between few points, so the
end of the block, a maximum of sums of them, is least at one of these points, or where two such sums meet (Eq. 13).

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
the device computes with the CPU's weights (CG', Eq. 15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise
from math import ceil, floor, inf, isinf
from typing import NamedTuple

_NARROW = 1e-9  # between points so near to each other there is nothing to find


@dataclass(frozen=True, slots=True)
class Line:
    """t = alpha_s + share · whole_s, for a share of a product's weights; nothing takes no time (Eq. 3, 4)."""

    alpha_s: float
    whole_s: float

    def at(self, share: float) -> float:
        return self.alpha_s + share * self.whole_s if share > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Lanes:
    """Who works on a block of `products` matrix products (n_l) one after another.

    `launch_s`: of a kernel or a transfer. `cpu_factor`: c above, `link_factor`: k. `ahead_s`: as above; None: the link
    begins with the block, and launches have a stream of their own (the paper's Eq. 5). `ring_s`: of lifting, as much as
    runs ahead. Outside the block, for the same layer: `link_also_s` of lifting, `cpu_also_s` of the CPU's computing.
    """

    products: int = 1
    launch_s: float = 0.0
    cpu_factor: float = 1.0
    link_factor: float = 1.0
    ahead_s: float | None = None
    ring_s: float = inf
    link_also_s: float = 0.0
    cpu_also_s: float = 0.0


class Times(NamedTuple):
    """Seconds of one product: on the CPU, over the link, on the device, and of its launches; each as if alone."""

    cpu_s: float
    link_s: float
    gpu_s: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class Block:
    """An FFN in one pass: each lane's time for one of its products, were all of it that lane's."""

    lanes: Lanes
    cpu: Line
    link: Line
    gpu: Line

    def times(self, r_cg: float, r_gg: float = 0.0) -> Times:
        """Eq. 4. A share that crosses the link has two launches, one at home on the device has one."""
        r_cc = 1 - r_cg - r_gg
        return Times(
            self.cpu.at(r_cc if r_cc > 1e-12 else 0.0),
            self.link.at(r_cg),
            self.gpu.at(r_cg) + self.gpu.at(r_gg),
            (2 * (r_cg > 0) + (r_gg > 0)) * self.lanes.launch_s,
        )


def shared(lanes: Lanes, times: Times) -> tuple[float, float]:
    """(CPU, link): seconds of all products, each slowed while the other works. As if all that the link does fell beside
    the CPU: where it has gaps, the CPU may be a little quicker."""
    cpu_s = lanes.products * times.cpu_s + lanes.cpu_also_s
    link_s = lanes.products * times.link_s + lanes.link_also_s
    c, k = lanes.cpu_factor, lanes.link_factor
    if c * cpu_s <= k * link_s:
        return c * cpu_s, link_s + c * cpu_s * (1 - 1 / k)
    return cpu_s + k * link_s * (1 - 1 / c), k * link_s


def finish_s(lanes: Lanes, times: Times) -> float:
    """t_fin: when the block's last product is done (Eq. 5), or a layer's period where loads run ahead.

    In Eq. 5 equal jobs pass through launch, link and device; the longest stage recurs, the others are seen once:
    t_L + t_C2G + t_G + (n_l - 1) · max(t_L, t_C2G, t_G), which is Eq. 10, 11 and 12 in one.
    """
    return max(_ends(lanes, times))


def _ends(lanes: Lanes, times: Times) -> tuple[float, ...]:
    """What t_fin is the maximum of. Each is linear where `times` is, apart from the point that `shared` has."""
    cpu_s, link_s = shared(lanes, times)
    if lanes.ahead_s is not None:
        outside_s = lanes.ahead_s + max(0.0, lanes.link_also_s - lanes.ring_s)  # what does not run ahead is waited for
        begins_s = outside_s + lanes.cpu_also_s
        gpu_s = begins_s + lanes.products * (times.gpu_s + times.launch_s)
        lifted = () if isinf(lanes.ring_s) else (begins_s + link_s - lanes.link_also_s - lanes.ring_s,)
        return link_s, outside_s + cpu_s, gpu_s, *lifted
    stages = (times.launch_s, link_s / lanes.products, times.gpu_s)
    once = sum(stages)
    return (cpu_s, *(once + (lanes.products - 1) * stage for stage in stages))


def best_r_cg(block: Block, r_gg: float = 0.0) -> tuple[float, float]:
    """(r_CG, t_fin): the optimum for a block of which `r_gg` is on the device already (Eq. 13), by at most some dozen
    evaluations. Among equals the least over the link."""
    most = 1 - r_gg

    def finish(r_cg: float) -> float:
        return finish_s(block.lanes, block.times(r_cg, r_gg))

    points = {0.0, most, *_meetings(block.lanes, lambda r_cg: block.times(r_cg, r_gg), 0.0, most)}
    t_fin, r_cg = min((finish(r_cg), r_cg) for r_cg in points if 0 <= r_cg <= most)
    return r_cg, t_fin


def _meetings(lanes: Lanes, times: Callable[[float], Times], lo: float, hi: float) -> Iterator[float]:
    """Where t_fin may be least inside (lo, hi), where `times` is linear: where CPU and link, slowed, end together, and
    to either side of that where two of `_ends` meet (the edges of the paper's three cases are among them)."""

    def difference(at: float) -> float:
        cpu_s, link_s, *_ = times(at)
        cpu_s, link_s = lanes.products * cpu_s + lanes.cpu_also_s, lanes.products * link_s + lanes.link_also_s
        return lanes.cpu_factor * cpu_s - lanes.link_factor * link_s

    edges = [lo, *_zero(difference, lo, hi), hi]
    yield from edges[1:-1]
    for a, b in pairwise(edges):
        if b - a <= _NARROW * max(1.0, b):
            continue
        # From two points inside, not from the ends: a share of nothing costs no alpha.
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
    left = budget_bytes - sum(options[0].nbytes for options in items)
    heap = [(*step, i) for i, options in enumerate(items) if (step := _best_step(options, 0, left)) is not None]
    heapify(heap)
    while heap:
        _, wanted, i = heappop(heap)
        options, now = items[i], chosen[i]
        more = options[wanted].nbytes - options[now].nbytes
        if more <= left:
            chosen[i], left = wanted, left - more
        step = _best_step(options, chosen[i], left)
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


@dataclass(frozen=True, slots=True)
class Regime:
    """A lane's time for all of one product with n rows, where n <= `rows` (0: any): alpha_s + max(memory_s, n · row_s).

    Kernels for few rows have rates of their own. Table I of the paper has one β a multiply-add; it is that of reading a
    weight for one row, so for many rows it is far too slow, and it must not be used here.
    """

    rows: int
    alpha_s: float
    memory_s: float
    row_s: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """A block where `rows` tokens of a prompt are read, with decode's slices. `cpu`, `gpu`: regimes, one for any number
    of rows last."""

    lanes: Lanes
    rows: int
    r_cg: float
    r_gg: float
    cpu: tuple[Regime, ...]
    link: Line
    gpu: tuple[Regime, ...]

    def times(self, n_g: float) -> Times:
        """Eq. 15, where the device computes `n_g` of the rows with the CPU's weights too. (The paper's link carries n_W
        whatever r_GG; what is at home on the device need not cross.)"""
        r_cc = max(0.0, 1 - self.r_cg - self.r_gg)
        lifted = r_cc if n_g > 0 else 0.0
        launches = 2 * (self.r_cg > 0) + 2 * (lifted > 0) + (self.r_gg > 0)
        device = ((self.r_cg, float(self.rows)), (self.r_gg, float(self.rows)), (lifted, n_g))
        return Times(
            _seconds(self.cpu, r_cc, self.rows - n_g),
            self.link.at(self.r_cg) + self.link.at(lifted),
            sum(_seconds(self.gpu, share, rows) for share, rows in device),
            launches * self.lanes.launch_s,
        )


def best_n_g(prompt: Prompt) -> tuple[int, float]:
    """(n_g, t_fin): how many tokens of the prompt the device had best compute with the CPU's share of the weights.
    Among equals the fewest."""
    rows = prompt.rows
    edges = {0.0, float(rows)}
    for regimes, from_end in ((prompt.cpu, True), (prompt.gpu, False)):
        for regime in regimes:
            turns = [float(regime.rows)] if regime.rows else []
            turns += [regime.memory_s / regime.row_s] if regime.row_s > 0 else []
            edges.update(rows - n if from_end else n for n in turns)
    inside = sorted(n for n in edges if 0 <= n <= rows)
    points = {near for n in inside for near in (floor(n) - 1, floor(n), ceil(n), ceil(n) + 1)}
    for lo, hi in pairwise(inside):
        for at in _meetings(prompt.lanes, prompt.times, lo, hi):
            points |= {floor(at), ceil(at)}
    t_fin, n_g = min((finish_s(prompt.lanes, prompt.times(n)), n) for n in points if 0 <= n <= rows)
    return n_g, t_fin


def _seconds(regimes: tuple[Regime, ...], share: float, rows: float) -> float:
    if share <= 0 or rows <= 0:
        return 0.0
    regime = min((r for r in regimes if (r.rows or rows) >= rows), key=lambda r: r.rows or 2**31)
    return regime.alpha_s + share * max(regime.memory_s, rows * regime.row_s)
