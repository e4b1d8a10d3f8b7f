"""Chooses the groups of neurons that a device holds: PowerInfer's integer program (section 6, Eq. 2 to 8).

    maximise    Σ impact · a                            Eq. 1, 2
    subject to  Σ bytes · a       ≤ device_bytes        Eq. 3, 6
                Σ bytes · (1 - a) ≤ host_bytes          Eq. 3, 6
                Σ a of a layer    ≥ least · y           Eq. 7, for each layer
                a                 ≤ y                   Eq. 8, for each group
                a, y              in 0, 1

A group is a granule of 64 neurons. Its impact is how often it is active, and a = 1 if the device holds it; otherwise it
lies in RAM. A layer has y = 1 if the device holds any of its groups, and then it holds at least `least` of them. The
paper writes Eq. 8 as one row a layer with a big constant. A row a group is tighter, and HiGHS solves it faster.

The groups of a layer are of one size. So of any number of them the hottest are the best, and an answer is a number for
each layer.

HiGHS starts from a greedy answer and has a time limit. The better of the two answers is taken, with its gap to the
bound that HiGHS proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, gcd, inf

from penstock.planner.programs import highs

LIMIT_S = 10.0  # the paper's solver takes about 10 seconds (section 6.3.3)
CLOSE = 1e-4  # HiGHS stops at this gap, as a share of the impact


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """A layer's groups. `impacts`: of each group, the hottest first; `group_bytes`: of one group; `least`: the device
    holds at least so many groups or none (C_l in Eq. 7)."""

    impacts: tuple[float, ...]
    group_bytes: int
    least: int = 1


@dataclass(frozen=True, slots=True)
class NeuronProgram:
    """The integer program. `device_bytes`, `host_bytes`: the room that either memory has for groups."""

    layers: tuple[LayerGroups, ...]
    device_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(len(layer.impacts) * layer.group_bytes for layer in self.layers)

    @property
    def has_room(self) -> bool:
        """Whether both memories together hold all groups."""
        return self.device_bytes >= 0 and self.total_bytes <= self.device_bytes + self.host_bytes


Counts = tuple[int, ...]  # for each layer, how many groups the device holds


@dataclass(frozen=True, slots=True)
class Placement:
    """An answer. `impact`: the sum over the groups that the device holds; no answer has more than `bound`. `found_by`:
    "greedy" or "HiGHS". `status`: HiGHS's word for how it ended, or "not needed"."""

    counts: Counts
    impact: float
    bound: float
    found_by: str
    status: str

    @property
    def gap(self) -> float:
        """How much more impact another answer might have, as a share of this one's."""
        return (self.bound - self.impact) / self.impact if self.impact else (0.0 if self.bound <= 0 else inf)


def least_groups(neurons: int, device_s: float, host_s: float, sync_s: float) -> int:
    """C_l in groups (Eq. 4, 5): with so many, the device and a synchronisation take no longer than the CPU. If the
    device is always slower, it is 2^31, more than any layer has. `neurons`: of a group; `device_s`, `host_s`: seconds
    that a group takes on either executor; `sync_s`: of a synchronisation."""
    saved_s = (host_s - device_s) / neurons
    return max(1, ceil(sync_s / saved_s / neurons)) if saved_s * 2**31 > sync_s else 2**31


def impact_of(program: NeuronProgram, counts: Counts) -> float:
    """The sum of the impacts of the groups that the device holds."""
    return sum(sum(layer.impacts[:count]) for layer, count in zip(program.layers, counts, strict=True))


def allowed(program: NeuronProgram, counts: Counts) -> bool:
    """Whether an answer keeps Eq. 6 and 7."""
    pairs = list(zip(program.layers, counts, strict=True))
    used = sum(layer.group_bytes * count for layer, count in pairs)
    enough = all(not count or count >= layer.least for layer, count in pairs)
    return enough and used <= program.device_bytes and program.total_bytes - used <= program.host_bytes


def solve(program: NeuronProgram, limit_s: float = LIMIT_S) -> Placement | None:
    """The best placement that is found in `limit_s` seconds. None if none is allowed, or if none was found.

    HiGHS is not asked if the greedy answer is within CLOSE of its bound: HiGHS would stop there too. Raises
    InternalError if HiGHS fails."""
    if not program.has_room:
        return None
    counts, most = greedy(program)
    impact, start = impact_of(program, counts), counts if allowed(program, counts) else None
    if start is not None and most - impact <= CLOSE * impact:
        return Placement(start, impact, max(most, impact), "greedy", "not needed")
    by_highs, bound, status = _highs(program, start, limit_s)
    answers = [(impact_of(program, c), by, c) for by, c in (("HiGHS", by_highs), ("greedy", start)) if c is not None]
    if not answers:
        return None
    impact, found_by, counts = max(answers, key=lambda answer: answer[0])  # of equal answers HiGHS's
    return Placement(counts, impact, max(min(bound, most), impact), found_by, status)


def greedy(program: NeuronProgram) -> tuple[Counts, float]:
    """(groups of each layer by impact per byte, a bound of the impact of any answer that is allowed).

    A layer's first `least` groups come at once (Eq. 7), the others one by one, and what does not fit is passed over.
    RAM is not counted (Eq. 6), so the groups may be too few. The bound takes them in the same order, and cuts the one
    that does not fit any more."""
    steps: list[tuple[float, int, int, int]] = []  # (impact per byte, layer, groups before, groups after)
    for i, layer in enumerate(program.layers):
        ends = range(layer.least, len(layer.impacts) + 1)
        for before, after in pairwise((0, *ends)):
            density = sum(layer.impacts[before:after]) / ((after - before) * layer.group_bytes)
            steps.append((density, i, before, after))
    counts, left, room, bound = [0] * len(program.layers), program.device_bytes, program.device_bytes, 0.0
    for density, i, before, after in sorted(steps, key=lambda step: -step[0]):
        nbytes = (after - before) * program.layers[i].group_bytes
        bound, room = bound + density * min(nbytes, room), max(0, room - nbytes)
        if counts[i] == before and nbytes <= left:
            counts[i], left = after, left - nbytes
    return tuple(counts), bound


def _highs(program: NeuronProgram, start: Counts | None, limit_s: float) -> tuple[Counts | None, float, str]:
    """(HiGHS's answer or None, the bound that it proved, its word for how it ended).

    There is a column for the a of each group that the device has room for beside the hotter ones, then one for the y of
    each layer."""
    most = [min(len(layer.impacts), program.device_bytes // layer.group_bytes) for layer in program.layers]
    costs = [impact for layer, count in zip(program.layers, most, strict=True) for impact in layer.impacts[:count]]
    begins = [0, *accumulate(most)]
    costs += [0.0] * len(most)
    values: list[float] | None = None
    if start is not None:
        each = zip(most, start, strict=True)
        values = [float(i < count) for columns, count in each for i in range(columns)] + [float(n > 0) for n in start]
    answer = highs.solve(
        costs, [0.0] * len(costs), [1.0] * len(costs), _rows(program, begins), maximise=True, whole=True, start=values,
        # Presolving finds nothing to leave out, and takes 5 of the 5.3 seconds of a model of 80 layers of 250 groups.
        time_limit=limit_s, mip_rel_gap=CLOSE, presolve="off",
    )  # fmt: skip
    bound = min(answer.bound, sum(sum(layer.impacts) for layer in program.layers))
    if answer.values is None:
        return None, bound, answer.status
    counts = tuple(sum(value > 0.5 for value in answer.values[a:b]) for a, b in pairwise(begins))
    # HiGHS keeps its rows within a tolerance only.
    return (counts if allowed(program, counts) else None), bound, answer.status


def _rows(program: NeuronProgram, begins: Sequence[int]) -> list[highs.Row]:
    """The rows for HiGHS. `begins`: the first column of each layer's groups, then that of the layers."""
    unit = gcd(*(layer.group_bytes for layer in program.layers))  # bytes in this unit are small whole numbers
    pairs = [(layer, range(*edges)) for layer, edges in zip(program.layers, pairwise(begins), strict=True)]
    sizes = [float(layer.group_bytes // unit) for layer, mine in pairs for _ in mine]
    least_there = -((program.host_bytes - program.total_bytes) // unit)
    rows = [highs.Row(least_there, program.device_bytes // unit, range(begins[-1]), sizes)]
    for y, (layer, mine) in enumerate(pairs, start=begins[-1]):
        least = float(min(layer.least, len(mine) + 1))  # one more than the layer has forbids y = 1 as well
        rows.append(highs.Row(0.0, inf, [*mine, y], [*([1.0] * len(mine)), -least]))
        rows += [highs.Row(-inf, 0.0, [a, y], [1.0, -1.0]) for a in mine]
    return rows
