"""Which groups of neurons a device holds: PowerInfer's integer program (section 6, Eq. 2 to 8).

    maximise    Σ impact · a                                            Eq. 1, 2: impact is how often a group is active
    subject to  Σ bytes · a       ≤ the device's memory                 Eq. 3, 6: what is not there lies in RAM
                Σ bytes · (1 - a) ≤ the host's
                Σ a of a layer    ≥ least · y of the layer              Eq. 7: some use of the device, or none
                a                 ≤ y of the layer                      Eq. 8, a row per group: tighter than one with a
                                                                        big constant, and HiGHS solves it faster
                a, y              in 0, 1

A group is a granule, 64 neurons. HiGHS starts from a greedy answer and has so many seconds; the better one counts, with
the gap to the bound that HiGHS proved.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, inf

from penstock.planner.solve import highs

LIMIT_S = 10.0  # the paper's solver takes about 10 seconds (section 6.3.3)
CLOSE = 1e-4  # a gap at which HiGHS stops


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """A layer's groups: the impact of each, the bytes of one, and how many the device takes at least if any (C_l)."""

    impacts: tuple[float, ...]
    group_bytes: int
    least: int = 1


@dataclass(frozen=True, slots=True)
class Program:
    """`device_bytes`, `host_bytes`: what either memory has for groups."""

    layers: tuple[LayerGroups, ...]
    device_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(len(layer.impacts) * layer.group_bytes for layer in self.layers)


Chosen = tuple[frozenset[int], ...]  # of each layer, the groups that the device holds


@dataclass(frozen=True, slots=True)
class Placement:
    """`impact`: of what is chosen; no choice has more than `bound`. `found_by`: greedy or HiGHS; `status`: what HiGHS
    says of its run, or "not needed"."""

    chosen: Chosen
    impact: float
    bound: float
    found_by: str
    status: str

    @property
    def gap(self) -> float:
        """How much more there might be, as a share of the impact."""
        return (self.bound - self.impact) / self.impact if self.impact else (0.0 if self.bound <= 0 else inf)


def least_groups(neurons: int, device_s: float, host_s: float, sync_s: float) -> int:
    """C_l in groups (Eq. 4, 5): so many neurons that the device, with a synchronisation, is no slower than the CPU;
    more than any layer has where it always is. `neurons`: of a group, whose seconds on either are `device_s` and
    `host_s`."""
    saved_s = (host_s - device_s) / neurons
    return max(1, ceil(sync_s / saved_s / neurons)) if saved_s * 2**31 > sync_s else 2**31


def impact_of(program: Program, chosen: Chosen) -> float:
    return sum(layer.impacts[g] for layer, groups in zip(program.layers, chosen, strict=True) for g in sorted(groups))


def allowed(program: Program, chosen: Chosen) -> bool:
    """Whether a choice keeps Eq. 6 and 7."""
    used = sum(layer.group_bytes * len(groups) for layer, groups in zip(program.layers, chosen, strict=True))
    enough = all(not groups or len(groups) >= p.least for p, groups in zip(program.layers, chosen, strict=True))
    return enough and used <= program.device_bytes and program.total_bytes - used <= program.host_bytes


def solve(program: Program, limit_s: float = LIMIT_S) -> Placement | None:
    """The best placement found in `limit_s` seconds; None where there is none, or neither finds one. HiGHS is not asked
    where the greedy answer is as close to what Eq. 6 alone allows as HiGHS would stop at."""
    if program.device_bytes < 0 or program.total_bytes > program.device_bytes + program.host_bytes:
        return None
    order = _by_density(program)
    start, most = greedy(program, order), relaxed(program, order)
    if start is not None:
        impact = impact_of(program, start)
        if most - impact <= CLOSE * impact:
            return Placement(start, impact, max(most, impact), "greedy", "not needed")
    found, bound, status = _highs(program, start, limit_s)
    answers = [(impact_of(program, c), by, c) for by, c in (("HiGHS", found), ("greedy", start)) if c is not None]
    if not answers:
        return None
    impact, found_by, chosen = max(answers, key=lambda answer: answer[0])  # of equals HiGHS's
    return Placement(chosen, impact, max(min(bound, most), impact), found_by, status)


Order = list[tuple[int, int]]  # layer and group, the most impact per byte first


def greedy(program: Program, order: Order | None = None) -> Chosen | None:
    """By impact per byte. A layer that gets too few is filled up to its least, or left out: whichever of the two gives
    more. None where that is not allowed."""
    order = order or _by_density(program)
    answers = (_fill(program, order, filled_up) for filled_up in (False, True))
    found = [chosen for chosen in answers if allowed(program, chosen)]
    return max(found, key=lambda chosen: impact_of(program, chosen), default=None)


def relaxed(program: Program, order: Order) -> float:
    """A bound: the impact where the device's memory is all that counts and the last group may be cut."""
    left, impact = program.device_bytes, 0.0
    for i, g in order:
        layer = program.layers[i]
        impact += layer.impacts[g] * min(1.0, left / layer.group_bytes)
        left -= layer.group_bytes
        if left <= 0:
            break
    return impact


def _by_density(program: Program) -> Order:
    every = [(i, g) for i, layer in enumerate(program.layers) for g in range(len(layer.impacts))]
    return sorted(every, key=lambda at: -program.layers[at[0]].impacts[at[1]] / program.layers[at[0]].group_bytes)


def _fill(program: Program, order: Order, filled_up: bool) -> Chosen:
    """Until no layer has too few. `filled_up`: the hottest of those that have gets its least before others get any."""
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


def _highs(program: Program, start: Chosen | None, limit_s: float) -> tuple[Chosen | None, float, str]:
    """HiGHS's choice (None: it has none), the bound that it proved, and the status of its run."""
    columns = _columns(program)
    pairs = list(zip(program.layers, columns, strict=True))
    costs = [layer.impacts[g] for layer, groups in pairs for g in groups] + [0.0] * len(pairs)
    answer = highs.solve(
        costs, [0.0] * len(costs), [1.0] * len(costs), _rows(program, columns), maximise=True, whole=True,
        start=None if start is None else _values(columns, start), time_limit=limit_s, mip_rel_gap=CLOSE,
        # It finds nothing to leave out here, and takes 5 of the 5.3 seconds of 80 layers of 250 groups.
        presolve="off",
    )  # fmt: skip
    bound = min(answer.bound, sum(sum(layer.impacts) for layer in program.layers))
    if answer.values is None:
        return None, bound, answer.status
    values = iter(answer.values)
    chosen = tuple(frozenset([g for g in groups if next(values) > 0.5]) for groups in columns)
    # HiGHS's rows hold within a tolerance, ours hold.
    return (chosen if allowed(program, chosen) else None), bound, answer.status


def _columns(program: Program) -> list[list[int]]:
    """Each layer's groups that may be chosen: the hottest, as many as the device has room for, since they are of one
    size."""
    found = []
    for layer in program.layers:
        hottest = sorted(range(len(layer.impacts)), key=lambda g: -layer.impacts[g])
        found.append(hottest[: program.device_bytes // layer.group_bytes])
    return found


def _rows(program: Program, columns: list[list[int]]) -> list[highs.Row]:
    """The program's rows. Their columns are one for each of `columns`, and then one for the y of each layer."""
    unit = gcd(*(layer.group_bytes for layer in program.layers))  # so that numbers are small, and whole
    pairs = list(zip(program.layers, columns, strict=True))
    sizes = [float(layer.group_bytes // unit) for layer, groups in pairs for _ in groups]
    least_there = -((program.host_bytes - program.total_bytes) // unit)
    rows = [highs.Row(least_there, program.device_bytes // unit, range(len(sizes)), sizes)]
    at = 0
    for y, (layer, groups) in enumerate(pairs, start=len(sizes)):
        mine = range(at, at + len(groups))
        at += len(groups)
        least = float(min(layer.least, len(groups) + 1))  # more than there are is more than there are
        rows.append(highs.Row(0.0, inf, [*mine, y], [*([1.0] * len(groups)), -least]))
        rows += [highs.Row(-inf, 0.0, [a, y], [1.0, -1.0]) for a in mine]
    return rows


def _values(columns: list[list[int]], chosen: Chosen) -> list[float]:
    """A choice as HiGHS's columns."""
    found = [float(g in those) for groups, those in zip(columns, chosen, strict=True) for g in groups]
    return found + [float(bool(those)) for those in chosen]
