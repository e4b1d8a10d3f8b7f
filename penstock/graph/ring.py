"""A ring: the byte range that units stream through, and which of them it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from penstock.errors import InternalError
from penstock.graph.tasks import Slot

Streamed = tuple[int, int, int]  # unit, its bytes, the block of the pass that computes it


class Ring:
    """Units enter in stream order at a cursor that wraps, and leave in the same order."""

    def __init__(self, arena: str, nbytes: int) -> None:
        self.arena, self.nbytes = arena, nbytes
        self._cursor = 0
        self._waiting: deque[Streamed] = deque()  # still to be loaded
        self._ahead: deque[tuple[int, Slot]] = deque()  # loaded, its calls not emitted yet
        self._taken: dict[int, Slot] = {}  # its calls are being emitted

    def begin(self, now: list[Streamed], then: list[Streamed]) -> None:
        """A pass starts that streams `now`; `then` follows it. What was loaded ahead for another pass than
        this one is dropped, at most one ring of reads."""
        kept = 0
        while kept < min(len(self._ahead), len(now)) and self._ahead[kept][0] == now[kept][0]:
            kept += 1
        while len(self._ahead) > kept:
            self._ahead.pop()
        self._waiting = deque([*now[kept:], *then])

    def rewind(self) -> None:
        """The next unit is loaded to the beginning, so that it waits for what is computed from there."""
        self._cursor = 0

    @property
    def waiting(self) -> Iterable[Streamed]:
        """What is still to be loaded, in order."""
        return self._waiting

    @property
    def held(self) -> tuple[object, ...]:
        """Where it goes on, and what it holds: all that one pass leaves for the next."""
        return self._cursor, *self._ahead

    def holds_next(self, unit: int) -> bool:
        """Whether `take` of this unit would do."""
        return bool(self._ahead) and self._ahead[0][0] == unit

    def admit(self, last_block: float, at_hand: Callable[[int], bool]) -> tuple[int, Slot] | None:
        """The next unit to load and its slot, or None: nothing of the blocks to `last_block` waits, or it is not
        `at_hand` where it comes from, or its bytes are not free yet."""
        if not self._waiting or self._waiting[0][2] > last_block or not at_hand(self._waiting[0][0]):
            return None
        unit, nbytes, _ = self._waiting[0]
        if nbytes > self.nbytes:
            raise InternalError(f"unit {unit} of {nbytes} bytes is larger than {self.arena} of {self.nbytes}")
        lo = self._cursor if self._cursor + nbytes <= self.nbytes else 0
        slot = Slot(self.arena, lo, lo + nbytes)
        hi = slot.hi
        for _, held_lo, held_hi in self._taken.values():
            if held_lo < hi and lo < held_hi:
                return None
        for _, (_, held_lo, held_hi) in self._ahead:
            if held_lo < hi and lo < held_hi:
                return None
        self._waiting.popleft()
        self._ahead.append((unit, slot))
        self._cursor = slot.hi
        return unit, slot

    def take(self, unit: int) -> Slot:
        """The slot of the unit whose calls come next in the stream."""
        if not self._ahead or self._ahead[0][0] != unit:
            raise InternalError(f"{self.arena} holds {[u for u, _ in self._ahead]}, but unit {unit} is needed")
        _, self._taken[unit] = self._ahead.popleft()
        return self._taken[unit]

    def release(self, unit: int) -> None:
        del self._taken[unit]
