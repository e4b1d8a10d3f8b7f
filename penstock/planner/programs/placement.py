"""Chooses how many groups of each layer's neurons a device holds by the seconds that a token takes, as measured: the
integer program of `neurons` with its constraint of communication (Eq. 4, 5, 7, 8) as a time.

    minimise    Σ t                                         over layers
    subject to  t ≥ begin_s + Σ device_s · impact · a       the device computes the active neurons of its groups
                t ≥ sync_s · y + Σ host_s · impact · (1 - a)  meanwhile the CPU computes those of the other groups
                y ≥ 1 - a                                   Eq. 8: a layer is synchronised if the CPU has any group
                Σ bytes · a ≤ device_bytes                  Eq. 3, 6
                a, y in 0, 1

Eq. 7 asks for at least C_l groups of a layer on the device, or none. That is right if a layer without any needs no
synchronisation. Here activations are on the device, so a layer needs none only if *all* its groups are there. So the
program gathers some layers whole, as long as that saves more than other groups in the same room would.

Of any number of a layer's groups the hottest are the best, so an answer is a number for each layer. A price for bytes
makes layers independent of each other: each takes the number of groups that costs it least. The least price whose
answer fits is found by halving. The sum at a price, less the price of the room, is a bound that no answer beats
(Lagrangian relaxation), and the room that is left is filled where it saves most.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.planner.programs.neurons import Counts, LayerGroups, NeuronProgram

_HALVINGS = 60  # of a price; a float has no more
# Hottest first is taken unless an answer saves more than this share of its time. The program leaves out effects of that
# size, such as the rounding of scratch and units.
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Seconds of a token. `device_s`, `host_s`: of a group all of whose neurons are active, on either executor.
    `sync_s`: of a layer that both executors compute, what the CPU's part waits for and is waited for. `begin_s`: of the
    device's part of a layer, if it has any."""

    device_s: float
    host_s: float
    sync_s: float
    begin_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placed:
    """An answer: for each layer how many groups the device holds, and the seconds of all layers. No answer takes less
    than `bound_s`."""

    counts: Counts
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """How much less another answer might take, as a share of this one's time."""
        return (self.seconds - self.bound_s) / self.seconds if self.seconds else 0.0


def layer_times(layer: LayerGroups, rates: TokenTimes) -> list[float]:
    """Seconds of a layer where the device holds 0, 1, … of its groups, the hottest first."""
    there = [0.0, *accumulate(layer.impacts)]
    whole = len(layer.impacts)
    return [
        max(
            rates.device_s * there[n] + rates.begin_s * (n > 0),
            0.0 if n == whole else rates.sync_s + rates.host_s * max(0.0, there[whole] - there[n]),
        )
        for n in range(whole + 1)
    ]


def fastest(program: NeuronProgram, rates: Sequence[TokenTimes]) -> Placed | None:
    """The answer that takes the fewest seconds, within `gap`. `rates`: of each layer. None if the memories do not hold
    all groups."""
    if not program.has_room:
        return None
    layers, room = program.layers, program.device_bytes
    times = [layer_times(layer, each) for layer, each in zip(layers, rates, strict=True)]
    sizes = [layer.group_bytes for layer in layers]

    def seconds(counts: Sequence[int]) -> float:
        return sum(t[n] for t, n in zip(times, counts, strict=True))

    def used(counts: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(counts, sizes, strict=True))

    def priced(price: float) -> list[int]:
        return [
            min(range(len(t)), key=lambda n: (t[n] + price * size * n, n)) for t, size in zip(times, sizes, strict=True)
        ]

    hot = hottest_first(program)
    counts, bound_s = priced(0.0), seconds(priced(0.0))
    if used(counts) > room:
        low, high = 0.0, max(t[0] for t in times) / min(sizes) + 1e-30  # at such a price nobody takes a group
        for _ in range(_HALVINGS):
            price = (low + high) / 2
            counts = priced(price)
            bound_s = max(bound_s, seconds(counts) + price * (used(counts) - room))
            low, high = (price, high) if used(counts) > room else (low, price)
        counts = priced(high)
        _take(counts, priced(low), times, sizes, room - used(counts))
    _fill(counts, times, sizes, room - used(counts))
    _must(counts, layers, program.total_bytes - program.host_bytes - used(counts))
    taken = tuple(counts)
    if used(taken) > room or seconds(taken) > seconds(hot) * (1 - _WORTH):
        taken = hot
    return Placed(taken, seconds(taken), min(bound_s, seconds(taken)))


def seconds_of(program: NeuronProgram, rates: Sequence[TokenTimes], counts: Counts) -> float:
    """Seconds of all layers by an answer."""
    each = zip(program.layers, rates, counts, strict=True)
    return sum(layer_times(layer, rate)[n] for layer, rate, n in each)


def hottest_first(program: NeuronProgram) -> Counts:
    """The hottest groups of all layers, as many as the device has room for."""
    groups = [(-impact / layer.group_bytes, i) for i, layer in enumerate(program.layers) for impact in layer.impacts]
    return _in_order(program, [i for _, i in sorted(groups)])


def at_random(program: NeuronProgram) -> Counts:
    """Groups that are drawn at random, always the same, as many as the device has room for."""
    groups = [i for i, layer in enumerate(program.layers) for _ in layer.impacts]
    random.Random(0).shuffle(groups)
    return _in_order(program, groups)


def _in_order(program: NeuronProgram, order: Sequence[int]) -> Counts:
    """Takes a group of each layer that is named, in this order, while there is room."""
    counts, left = [0] * len(program.layers), program.device_bytes
    for i in order:
        if program.layers[i].group_bytes <= left:
            left -= program.layers[i].group_bytes
            counts[i] += 1
    return tuple(counts)


def _take(
    counts: list[int], more: Sequence[int], times: Sequence[Sequence[float]], sizes: Sequence[int], left: int
) -> int:  # fmt: skip
    """Gives layers what they have in `more`, those first that want the fewest bytes, while there is room."""
    for i in sorted(range(len(counts)), key=lambda i: (more[i] - counts[i]) * sizes[i]):
        nbytes = (more[i] - counts[i]) * sizes[i]
        if 0 < nbytes <= left and times[i][more[i]] < times[i][counts[i]]:
            counts[i], left = more[i], left - nbytes
    return left


def _fill(counts: list[int], times: Sequence[Sequence[float]], sizes: Sequence[int], left: int) -> None:
    """Gives the `left` bytes to layers, one group or as many as fit, where a byte saves most. Changes `counts`."""

    def gain(i: int, n: int) -> float:
        return (times[i][counts[i]] - times[i][n]) / ((n - counts[i]) * sizes[i])

    while True:
        best: tuple[float, int, int] = (0.0, -1, 0)
        for i, n in enumerate(counts):
            most = min(len(times[i]) - 1, n + left // sizes[i])
            for to in {n + 1, most} if most > n else ():
                best = max(best, (gain(i, to), i, to))
        if best[0] <= 0:
            return
        _, i, to = best
        left -= (to - counts[i]) * sizes[i]
        counts[i] = to


def _must(counts: list[int], layers: Sequence[LayerGroups], wanted_bytes: int) -> None:
    """Gives the device groups that RAM has no room for, the coldest of all."""
    for i, layer in enumerate(layers):
        if wanted_bytes <= 0:
            return
        more = min(len(layer.impacts) - counts[i], -(-wanted_bytes // layer.group_bytes))
        counts[i], wanted_bytes = counts[i] + more, wanted_bytes - more * layer.group_bytes
