"""The cache of a layer's experts: which of them lie in its slots, and which one leaves for another.

A ring holds units that come in a known order. A cache holds experts that were asked for. The slot that a missing expert
takes is a function of the requests before alone, so a run's tasks can be derived again from its routers' answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heappop, heappush, heapreplace
from math import exp2, inf, log2

from penstock.spec.places import Executor

POLICIES = ("lru", "lfu")
# Passes after which an expert's past uses count half ("lfu"). docs/EXPERTS.md has hit rates of other values.
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
        self._guessed: list[int] = []  # experts that were admitted for the coming pass by a guess
        self._now = 0  # passes so far
        # Expert → log2 of its uses, each of which counts 2^(pass / HALF_LIFE). So the order of two experts changes only
        # when one of them is used, and nothing has to decay.
        self._uses: dict[int, float] = {}
        # ("lfu") An entry for each expert that is held: (its uses, or what they were before they rose, expert).
        self._ranked: list[tuple[float, int]] = []

    @property
    def held(self) -> tuple[int | None, ...]:
        """The expert in each slot."""
        return tuple(self._held)

    def slot(self, expert: int) -> int | None:
        """The slot of an expert, None if it is missing."""
        return self._slot_of.get(expert)

    def missing(self, experts: Iterable[int]) -> list[int]:
        """Those of some experts that are in no slot, in the given order."""
        slot_of = self._slot_of
        return [expert for expert in experts if expert not in slot_of]

    def ask(self, experts: Iterable[int]) -> None:
        """A pass wants these experts. To be called once for each pass, before `admit`."""
        self._now += 1
        asked = self._asked = sorted(experts)
        if self.policy == "lfu":
            uses, use = self._uses, self._now / HALF_LIFE
            for expert in asked:
                uses[expert] = use + log2(1 + exp2(uses.get(expert, -inf) - use))
            self._guessed = []
            return
        wrong = {expert: self._slot_of.pop(expert) for expert in self._guessed if expert not in asked}
        self._slot_of = {**wrong, **self._slot_of} if wrong else self._slot_of  # they leave first
        self._guessed = []
        for expert in asked:
            slot = self._slot_of.pop(expert, None)
            if slot is not None:
                self._slot_of[expert] = slot

    def admit(self, expert: int, keep: Collection[int], first: Collection[int | None] = ()) -> int | None:
        """The slot that a missing expert takes: a free one, or that of the expert that leaves. None where all slots
        hold experts to `keep`. `first`: experts that leave before all others."""
        slot = self._taken(expert, keep, first)
        by_age = slot is not None and self.policy == "lru"
        for later in self._asked[bisect_right(self._asked, expert) :] if by_age else ():
            if (later_slot := self._slot_of.pop(later, None)) is not None:
                self._slot_of[later] = later_slot
        return slot

    def guess(self, expert: int, keep: Collection[int]) -> int | None:
        """The slot that a missing expert takes which the coming pass is likely to ask for. To be called before `ask`.
        If the pass does not ask for it, it is the first to leave with "lru"; with "lfu" its earlier uses decide. None
        where all slots hold experts to `keep`."""
        slot = self._taken(expert, keep)
        if slot is not None:
            self._guessed.append(expert)
        return slot

    def _taken(self, expert: int, keep: Collection[int], first: Collection[int | None] = ()) -> int | None:
        """Puts an expert into a free slot, or into that of the expert that leaves."""
        slot = len(self._slot_of) if len(self._slot_of) < self.slots else self._victim(keep, first)
        if slot is None:
            return None
        leaving = self._held[slot]
        if leaving is not None:
            del self._slot_of[leaving]
        self._held[slot], self._slot_of[expert] = expert, slot
        if self.policy == "lfu":
            heappush(self._ranked, (self._uses.get(expert, -inf), expert))
        return slot

    def _victim(self, keep: Collection[int], first: Collection[int | None]) -> int | None:
        """The slot of the expert that leaves."""
        if self.policy == "lru":
            may_leave = [expert for expert in self._slot_of if expert not in keep]
            if first:
                may_leave = [expert for expert in may_leave if expert in first] or may_leave
            leaving = may_leave[0] if may_leave else None
        else:
            leaving = self._least_used(keep, first)
        return None if leaving is None else self._slot_of[leaving]

    def _least_used(self, keep: Collection[int], first: Collection[int | None]) -> int | None:
        """The expert that was used least, which is ranked no longer. Uses only rise, so an expert whose entry says less
        than its uses is ranked anew when it comes first."""
        ranked, uses, passed = self._ranked, self._uses, list[tuple[float, int]]()
        leaving = None
        while ranked:
            noted, expert = ranked[0]
            if noted != (now := uses.get(expert, noted)):
                heapreplace(ranked, (now, expert))
                continue
            heappop(ranked)
            if expert not in keep and (not first or expert in first):
                leaving = expert
                break
            passed.append((noted, expert))
        if leaving is None and first:  # of all others, as none of `first` may leave
            leaving = next((expert for _, expert in passed if expert not in keep), None)
        for entry in passed:
            if entry[1] != leaving:
                heappush(ranked, entry)
        return leaving


# `_native.ExpertCache`, which decides for whole passes, has the same methods, and counts as an ExpertCache.
NewCache = Callable[[int, str], ExpertCache]  # from slots and policy
Caches = Mapping[tuple[int, Executor], ExpertCache]  # by layer, and the executor in whose memory the slots lie
