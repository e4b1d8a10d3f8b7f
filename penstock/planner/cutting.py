"""Cuts the granules of a model's parts to units, and says what room in a ring units want together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from penstock.spec.parts import FFNS, Part
from penstock.spec.places import Executor, Tier
from penstock.spec.plan import Unit

# (lo, hi, home, executor of decode, executor of prefill, the most bytes of a unit) of granules lo..hi of a part.
Run = tuple[int, int, Tier, Executor, Executor, int]


def units(every: Iterable[Part], runs: Callable[[Part], Iterable[Run]], fired: float = 1.0) -> list[Unit]:
    """The units of some parts. `runs`: the runs of a part. A run of no granules gives no units. `fired`: the share of
    neurons that are expected to fire (`Unit.active`), in parts that lie by neurons. `filled` sets it too, in a
    unit after the other: with 23,000 of them, OPT-175B in whole records, that is four fifths of making a plan."""
    cut: list[Unit] = []
    for part in every:
        active = fired if part.by_neurons else 1.0
        for lo, hi, home, decode, prefill, unit_bytes in runs(part):
            if lo < hi:
                cut += _cut(part.key, lo, hi, home, decode, prefill, *_steps(part, unit_bytes), active)
    return cut


@lru_cache(maxsize=8192)  # solvers try many plans, and most runs of a plan are in another one too
def _cut(
    key: str, lo: int, hi: int, home: Tier, decode: Executor, prefill: Executor, per_unit: int, step: int, active: float
) -> list[Unit]:
    """The units of one run. `per_unit`, `step`: as `_steps` gives them."""
    return [Unit(key, *edges, home, decode, prefill, active) for edges in _even(lo, hi, per_unit, step)]


def _steps(part: Part, unit_bytes: int) -> tuple[int, int]:
    """(the most granules of a unit, the step): units begin at multiples of the step."""
    least = part.least_granules
    per_unit = max(1, unit_bytes // part.least_bytes) * least
    if least > 1:
        return per_unit, least
    return per_unit, part.sum_granules if part.kind in FFNS and per_unit >= 4 * part.sum_granules else 1


@lru_cache(maxsize=1024)  # the layers of a model are alike, and so are many of its plans
def _even(lo: int, hi: int, per_unit: int, step: int) -> tuple[tuple[int, int], ...]:
    """Ranges lo..hi of at most `per_unit` granules that begin at multiples of `step`."""
    count = 1 if per_unit >= hi - lo else -(-(hi - lo) // (per_unit - step + 1))
    inner = ((lo + (hi - lo) * i // count) // step * step for i in range(1, count))
    return tuple(pairwise([lo, *(edge for edge in dict.fromkeys(inner) if edge > lo), hi]))


def most_together(units: Sequence[Unit], parts: Mapping[str, Part]) -> int:
    """Bytes of a ring in which all units of any layer's attention that stream have room at once."""
    by_part: dict[str, list[int]] = {}
    for unit in units:
        if parts[unit.part].kind == "attn" and unit.home != unit.decode:
            by_part.setdefault(unit.part, []).append((unit.hi - unit.lo) * parts[unit.part].granule_bytes)
    return max((sum(sizes) + max(sizes) for sizes in by_part.values()), default=0)
