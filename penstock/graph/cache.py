"""The cache of a layer's experts: which of them lie in its slots, and which one leaves for another.

A ring holds units that come in a known order. A cache holds experts that were asked for. The slot that a missing expert
takes is a function of the requests before alone, so a run's tasks can be derived again from its routers' answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable

POLICIES = ("lru", "lfu")
# Passes after which an expert's past uses count half ("lfu"). docs/LOG.md has the cost of other values.
HALF_LIFE = 64.0


class ExpertCache:
    """The slots of one layer. `policy` says which expert leaves. With "lru" it is the one that was unused for longest.
    With "lfu" it is the one that was used least, where a use counts half after HALF_LIFE passes. Of equals the one with
    the lowest number leaves."""

    def __init__(self, slots: int, policy: str) -> None:
        assert slots > 0 and policy in POLICIES, f"{slots} slots, {policy}"
        self.slots, self.policy = slots, policy
        self._slot_of: dict[int, int] = {}  # expert → slot; the longest unused first, those of one pass by numbers
        self._asked: list[int] = []  # experts that the latest pass asked for, in rising order
        self._held: list[int | None] = [None] * slots  # slot → expert
        self._now = 0  # passes so far
        self._used_at: dict[int, int] = {}  # expert → its last pass
        self._uses: dict[int, float] = {}  # expert → its uses, decayed up to that pass

    @property
    def held(self) -> tuple[int | None, ...]:
        """The expert in each slot."""
        return tuple(self._held)

    def slot(self, expert: int) -> int | None:
        """The slot of an expert, None if it is missing."""
        return self._slot_of.get(expert)

    def ask(self, experts: Iterable[int]) -> None:
        """A pass wants these experts. To be called once for each pass, before `admit`."""
        self._now += 1
        self._asked = sorted(experts)
        for expert in self._asked:
            slot = self._slot_of.pop(expert, None)
            if slot is not None:
                self._slot_of[expert] = slot
            if self.policy == "lfu":
                self._uses[expert] = self._decayed(expert) + 1
                self._used_at[expert] = self._now

    def admit(self, expert: int, keep: Collection[int]) -> int | None:
        """The slot that a missing expert takes: a free one, or that of the expert that leaves. None where all slots
        hold experts to `keep`."""
        slot = len(self._slot_of) if len(self._slot_of) < self.slots else self._victim(keep)
        if slot is None:
            return None
        leaving = self._held[slot]
        if leaving is not None:
            del self._slot_of[leaving]
        self._held[slot], self._slot_of[expert] = expert, slot
        for later in self._asked[bisect_right(self._asked, expert) :]:
            if (later_slot := self._slot_of.pop(later, None)) is not None:
                self._slot_of[later] = later_slot
        return slot

    def _victim(self, keep: Collection[int]) -> int | None:
        may_leave = (expert for expert in self._slot_of if expert not in keep)
        if self.policy == "lru":
            leaving = next(may_leave, None)
        else:
            leaving = min(may_leave, key=lambda expert: (self._decayed(expert), expert), default=None)
        return None if leaving is None else self._slot_of[leaving]

    def _decayed(self, expert: int) -> float:
        """The uses of an expert so far, weighted as they count now."""
        uses = self._uses.get(expert, 0.0)
        return uses * 0.5 ** ((self._now - self._used_at[expert]) / HALF_LIFE) if uses else 0.0
