"""Shares memory out among parts of a model: whole granules that stay, and slots for experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.spec.parts import Part

Resident = dict[str, int]  # part key → how many of its granules stay in a memory


def all_of(parts: Iterable[Part]) -> Resident:
    """All granules of these parts."""
    return {part.key: part.granules for part in parts}


def share_out(wanted: Sequence[Part], budget: int, rest: Mapping[str, int] | None = None) -> Resident:
    """The same share of every wanted part, as large as `budget` bytes allow. `rest`: part key → the granules that are
    left to share out; None: all of the part."""
    rest = all_of(wanted) if rest is None else rest
    total = sum(rest[part.key] * part.granule_bytes for part in wanted)
    share, taken = min(1.0, max(0, budget) / total) if total else 0.0, 0
    shares: Resident = {}
    for part in wanted:
        shares[part.key] = int(rest[part.key] * share) // part.least_granules * part.least_granules
        taken += shares[part.key] * part.granule_bytes
    for part in wanted:  # what rounding down has left, a granule at a time
        if taken + part.least_bytes <= budget and shares[part.key] < rest[part.key]:
            shares[part.key] += part.least_granules
            taken += part.least_bytes
    return shares


def share_slots(experts: Sequence[Part], budget: int) -> list[int]:
    """Slots of the cache of each of these parts: one, and even shares of what `budget` bytes hold besides."""
    each = [part.least_bytes for part in experts]
    slots = [1 + max(0, min(budget // sum(each), part.experts - 1)) for part in experts]
    budget -= sum((n - 1) * nbytes for n, nbytes in zip(slots, each, strict=True))
    for i, part in enumerate(experts):
        if each[i] <= budget and slots[i] < part.experts:
            slots[i], budget = slots[i] + 1, budget - each[i]
    return slots
