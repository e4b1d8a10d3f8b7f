"""Shares memory out among parts of a model: whole granules that stay, and slots for experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil

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


def split_granules(placed: Sequence[Part], shares: tuple[float, float, float]) -> dict[str, tuple[int, int]]:
    """Part key → (the end of its granules at home with the executor, the end of its granules in RAM). The others are on
    the disk.

    Of the layers up to any one, a faster tier never holds more than its share, and never less by more than a granule or
    two. Of each layer the FFN's granules leave the executor first, because they are smaller."""
    ends: dict[str, tuple[int, int]] = {}
    total = away = disk = 0
    for layer in sorted({part.layer for part in placed}):
        those = sorted((part for part in placed if part.layer == layer), key=lambda part: part.kind != "ffn")
        total += sum(part.nbytes for part in those)
        for part in those:
            owed = ((1 - shares[0]) * total - away) / part.granule_bytes - 1e-6
            leaves = max(0, min(part.granules, ceil(owed)))
            owed_to_disk = (shares[2] * total - disk) / part.granule_bytes - 1e-6
            far = max(0, min(leaves, ceil(owed_to_disk))) if shares[1] > 0 else leaves
            away, disk = away + leaves * part.granule_bytes, disk + far * part.granule_bytes
            ends[part.key] = (part.granules - leaves, part.granules - far)
    return ends


def most_that_fit(count: int, used: Callable[[int], int], room_bytes: int) -> int:
    """The largest number n up to `count` of which the bytes `used(n)` fit into `room_bytes`; 0 if there is none.

    Bytes rise nearly evenly with n, but for huge pages and scratch. So the next n to try is interpolated, which asks
    less often than halving does."""
    if used(count) <= room_bytes:
        return count
    lo, hi, at_lo, at_hi = 0, count, used(0), used(count)
    while hi - lo > 1:
        share = (room_bytes - at_lo) / max(1, at_hi - at_lo)
        guess = min(hi - 1, max(lo + 1, lo + int(share * (hi - lo))))
        nbytes = used(guess)
        if nbytes <= room_bytes:
            lo, at_lo = guess, nbytes
        else:
            hi, at_hi = guess, nbytes
    return lo
