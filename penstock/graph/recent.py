"""Which records of neurons lie in the slots of a unit that is asked for (`Unit.recent_slots`), and which one leaves.

The neurons that passes ask for most often stay. Each pass that asks for a neuron is a use of it, and a use counts half
after HALF_LIFE passes. A missing neuron takes the slot of the neuron that was used least, if it was itself used more.
So a neuron that is asked for once pushes no other one out. Rejected: the slot of the neuron whose last use is longest
ago. On text that trained models read, that made passes read 4 to 13 % more records (docs/LOG.md).

What a slot holds depends on the passes before alone, so a run's tasks can be derived again from its answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

HALF_LIFE = 64.0
_MOST_USES = 1e30  # of float32's 3e38. Beyond, all uses are made smaller by one factor, which changes no order.

# (neuron, slot) of each: uint32 one after the other, since tuples of them would take 15 times as much, and a simulation
# keeps those of many tokens.
Placed = bytes
PAIR_BYTES = 8


def pairs(placed: Placed) -> list[tuple[int, int]]:
    """The same as (neuron, slot)."""
    numbers = memoryview(placed).cast("I").tolist()
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class RecentRecords:
    """The slots of one unit. `lo`, `hi`: its neurons. 8 bytes a neuron."""

    def __init__(self, slots: int, lo: int, hi: int) -> None:
        assert 0 < slots <= hi - lo, f"{slots} slots for {hi - lo} neurons"
        self._lo, self._slots = lo, slots
        self._slot_of = array("i", [-1]) * (hi - lo)
        self._uses = array("f", [0.0]) * (hi - lo)
        self._held: list[int] = []  # slot → neuron, both from 0 on
        self._use = 1.0  # what a use of the latest pass counts

    @property
    def held(self) -> tuple[int, ...]:
        """The neuron in each slot that is taken."""
        return tuple(self._lo + n for n in self._held)

    def ask(self, neurons: Sequence[int]) -> tuple[Placed, list[int]]:
        """Notes that a pass wants these neurons, in rising order. Returns those in slots, and those to be read."""
        self._use *= 2 ** (1 / HALF_LIFE)
        if self._use > _MOST_USES:
            self._uses = array("f", (uses / self._use for uses in self._uses))
            self._use = 1.0
        lo, slot_of, uses, use = self._lo, self._slot_of, self._uses, self._use
        placed, missing = array("I"), list[int]()
        for neuron in neurons:
            n = neuron - lo
            uses[n] += use
            slot = slot_of[n]
            if slot < 0:
                missing.append(neuron)
            else:
                placed.extend((neuron, slot))
        return placed.tobytes(), missing

    def admit(self, neurons: Sequence[int], missing: Iterable[int]) -> Placed:
        """Gives slots to some of the missing neurons. `neurons`: all that this pass asked for. None of them leaves its
        slot."""
        lo, held, slot_of, uses = self._lo, self._held, self._slot_of, self._uses
        coming = [n - lo for n in missing]
        placed = array("I")
        free = coming[: self._slots - len(held)]
        for n in free:
            slot_of[n] = len(held)
            placed.extend((lo + n, len(held)))
            held.append(n)
        coming = sorted(coming[len(free) :], key=lambda n: (-uses[n], n))
        if not coming:
            return placed.tobytes()
        asked = {n - lo for n in neurons}
        leaving = sorted((n for n in held if n not in asked), key=lambda n: (uses[n], n))
        for n, old in zip(coming, leaving, strict=False):
            if uses[n] <= uses[old]:
                break
            slot = slot_of[old]
            slot_of[old], slot_of[n], held[slot] = -1, slot, n
            placed.extend((lo + n, slot))
        return placed.tobytes()

    def warm(self, rates: Sequence[float]) -> None:
        """Fills the slots as they are after many passes that asked for each neuron at its rate: with the neurons of the
        highest rates."""
        weight = self._use / (1 - 2 ** (-1 / HALF_LIFE))
        self._uses = array("f", (rate * weight for rate in rates))
        self._held = sorted(range(len(rates)), key=rates.__getitem__, reverse=True)[: self._slots]
        self._slot_of = array("i", [-1]) * len(rates)
        for slot, n in enumerate(self._held):
            self._slot_of[n] = slot
