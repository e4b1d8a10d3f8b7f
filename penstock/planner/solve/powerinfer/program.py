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

HiGHS starts from a greedy answer and has a time limit. The better of the two answers is taken, with its gap to the
bound that HiGHS proved.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, inf

from penstock.planner.solve import highs

LIMIT_S = 10.0  # the paper's solver takes about 10 seconds (section 6.3.3)
CLOSE = 1e-4  # HiGHS stops at this gap, as a share of the impact


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """A layer's groups. `impacts`: of each group; `group_bytes`: of one group; `least`: the device holds at least so
    many groups or none (C_l in Eq. 7)."""

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


Chosen = tuple[frozenset[int], ...]  # for each layer, the groups that the device holds


@dataclass(frozen=True, slots=True)
class Placement:
    """An answer. `impact`: the sum over the chosen groups; no choice has more than `bound`. `found_by`: "greedy" or
    "HiGHS". `status`: HiGHS's word for how it ended, or "not needed"."""

    chosen: Chosen
    impact: float
    bound: float
    found_by: str
    status: str

    @property
    def gap(self) -> float:
        """How much more impact another choice might have, as a share of this one's."""
        return (self.bound - self.impact) / self.impact if self.impact else (0.0 if self.bound <= 0 else inf)


def least_groups(neurons: int, device_s: float, host_s: float, sync_s: float) -> int:
    """C_l in groups (Eq. 4, 5): with so many, the device and a synchronisation take no longer than the CPU. If the
    device is always slower, it is 2^31, more than any layer has. `neurons`: of a group; `device_s`, `host_s`: seconds
    that a group takes on either executor; `sync_s`: of a synchronisation."""
    saved_s = (host_s - device_s) / neurons
    return max(1, ceil(sync_s / saved_s / neurons)) if saved_s * 2**31 > sync_s else 2**31


def impact_of(program: NeuronProgram, chosen: Chosen) -> float:
    """The sum of the impacts of the chosen groups."""
    return sum(layer.impacts[g] for layer, groups in zip(program.layers, chosen, strict=True) for g in sorted(groups))


def allowed(program: NeuronProgram, chosen: Chosen) -> bool:
    """Whether a choice keeps Eq. 6 and 7."""
    used = sum(layer.group_bytes * len(groups) for layer, groups in zip(program.layers, chosen, strict=True))
    enough = all(not groups or len(groups) >= p.least for p, groups in zip(program.layers, chosen, strict=True))
    return enough and used <= program.device_bytes and program.total_bytes - used <= program.host_bytes


def solve(program: NeuronProgram, limit_s: float = LIMIT_S) -> Placement | None:
    """The best placement that is found in `limit_s` seconds. None if none is allowed, or if none was found.

    HiGHS is not asked if the greedy answer is within CLOSE of the bound that Eq. 6 alone gives: HiGHS would stop there
    too. Raises InternalError if HiGHS fails."""
    if program.device_bytes < 0 or program.total_bytes > program.device_bytes + program.host_bytes:
        return None
    order = _by_density(program)
    start, most = greedy(program, order), relaxed(program, order)
    if start is not None:
        impact = impact_of(program, start)
        if most - impact <= CLOSE * impact:
            return Placement(start, impact, max(most, impact), "greedy", "not needed")
    by_highs, bound, status = _highs(program, start, limit_s)
    answers = [(impact_of(program, c), by, c) for by, c in (("HiGHS", by_highs), ("greedy", start)) if c is not None]
    if not answers:
        return None
    impact, found_by, chosen = max(answers, key=lambda answer: answer[0])  # of equal answers HiGHS's
    return Placement(chosen, impact, max(min(bound, most), impact), found_by, status)


Order = list[tuple[int, int]]  # (layer, group), the most impact per byte first


def greedy(program: NeuronProgram, order: Order | None = None) -> Chosen | None:
    """A choice by impact per byte. Layers with too few groups for Eq. 7 are left out, or filled up to their least: both
    are tried, and the better one is taken. None if neither is allowed."""
    order = order or _by_density(program)
    answers = (_fill(program, order, filled_up) for filled_up in (False, True))
    kept = [chosen for chosen in answers if allowed(program, chosen)]
    return max(kept, key=lambda chosen: impact_of(program, chosen), default=None)


def relaxed(program: NeuronProgram, order: Order) -> float:
    """An upper bound of the impact. Only the device's memory counts, and the last group may be cut."""
    left, impact = program.device_bytes, 0.0
    for i, g in order:
        layer = program.layers[i]
        impact += layer.impacts[g] * min(1.0, left / layer.group_bytes)
        left -= layer.group_bytes
        if left <= 0:
            break
    return impact


def _by_density(program: NeuronProgram) -> Order:
    def density(place: tuple[int, int]) -> float:
        layer = program.layers[place[0]]
        return -layer.impacts[place[1]] / layer.group_bytes

    return sorted(((i, g) for i, layer in enumerate(program.layers) for g in range(len(layer.impacts))), key=density)


def _fill(program: NeuronProgram, order: Order, filled_up: bool) -> Chosen:
    """Fills device memory in `order`, again and again until no layer has too few groups for Eq. 7. Each time one layer
    with too few is treated: the one of least impact is left out, or, with `filled_up`, the one of most impact gets its
    least number of groups before all others."""
    hottest: list[list[int]] = [[] for _ in program.layers]
    for i, g in order:
        hottest[i].append(g)
    smallest = min(layer.group_bytes for layer in program.layers)
    open_layers = {i for i, layer in enumerate(program.layers) if layer.least <= len(layer.impacts)}
    first: list[int] = []
    while True:
        chosen: list[set[int]] = [set() for _ in program.layers]
        left = program.device_bytes
        for i in first:
            layer = program.layers[i]
            if i in open_layers and layer.least * layer.group_bytes <= left:
                chosen[i].update(hottest[i][: layer.least])
                left -= layer.least * layer.group_bytes
        for i, g in order:
            if left < smallest:
                break
            if i in open_layers and program.layers[i].group_bytes <= left and g not in chosen[i]:
                chosen[i].add(g)
                left -= program.layers[i].group_bytes
        short = [i for i, layer in enumerate(program.layers) if 0 < len(chosen[i]) < layer.least]
        if not short:
            return tuple(frozenset(groups) for groups in chosen)
        worth = {i: sum(program.layers[i].impacts[g] for g in chosen[i]) for i in short}
        wanted = [i for i in short if i not in first]
        if filled_up and wanted:
            first.append(max(wanted, key=worth.__getitem__))
        else:
            open_layers.discard(min(short, key=worth.__getitem__))


def _highs(program: NeuronProgram, start: Chosen | None, limit_s: float) -> tuple[Chosen | None, float, str]:
    """(HiGHS's choice or None, the bound that it proved, its word for how it ended)."""
    columns = _columns(program)
    pairs = list(zip(program.layers, columns, strict=True))
    costs = [layer.impacts[g] for layer, groups in pairs for g in groups] + [0.0] * len(pairs)
    answer = highs.solve(
        costs, [0.0] * len(costs), [1.0] * len(costs), _rows(program, columns), maximise=True, whole=True,
        start=None if start is None else _values(columns, start), time_limit=limit_s, mip_rel_gap=CLOSE,
        # Presolving finds nothing to leave out, and takes 5 of the 5.3 seconds of a model of 80 layers of 250 groups.
        presolve="off",
    )  # fmt: skip
    bound = min(answer.bound, sum(sum(layer.impacts) for layer in program.layers))
    if answer.values is None:
        return None, bound, answer.status
    values = iter(answer.values)
    chosen = tuple(frozenset([g for g in groups if next(values) > 0.5]) for groups in columns)
    # HiGHS keeps its rows within a tolerance only.
    return (chosen if allowed(program, chosen) else None), bound, answer.status


def _columns(program: NeuronProgram) -> list[list[int]]:
    """For each layer, the groups that may be chosen. A layer's groups are of one size, so only the hottest that the
    device has room for can be in the best answer."""
    columns = []
    for layer in program.layers:
        hottest = sorted(range(len(layer.impacts)), key=lambda g: -layer.impacts[g])
        columns.append(hottest[: program.device_bytes // layer.group_bytes])
    return columns


def _rows(program: NeuronProgram, columns: list[list[int]]) -> list[highs.Row]:
    """The rows for HiGHS. There is a column for the a of each group in `columns`, then one for the y of each layer."""
    unit = gcd(*(layer.group_bytes for layer in program.layers))  # bytes in this unit are small whole numbers
    pairs = list(zip(program.layers, columns, strict=True))
    sizes = [float(layer.group_bytes // unit) for layer, groups in pairs for _ in groups]
    least_there = -((program.host_bytes - program.total_bytes) // unit)
    rows = [highs.Row(least_there, program.device_bytes // unit, range(len(sizes)), sizes)]
    first = 0
    for y, (layer, groups) in enumerate(pairs, start=len(sizes)):
        mine = range(first, first + len(groups))
        first += len(groups)
        least = float(min(layer.least, len(groups) + 1))  # one more than the layer has forbids y = 1 as well
        rows.append(highs.Row(0.0, inf, [*mine, y], [*([1.0] * len(groups)), -least]))
        rows += [highs.Row(-inf, 0.0, [a, y], [1.0, -1.0]) for a in mine]
    return rows


def _values(columns: list[list[int]], chosen: Chosen) -> list[float]:
    """The values of HiGHS's columns for a choice."""
    values = [float(g in those) for groups, those in zip(columns, chosen, strict=True) for g in groups]
    return values + [float(bool(those)) for those in chosen]
