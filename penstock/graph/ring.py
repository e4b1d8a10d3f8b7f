"""A ring: the byte range that units stream through, and which of them it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from penstock.errors import InternalError
from penstock.graph.tasks import Slot

Piece = tuple[int, int, int]  # granules lo..hi of a unit: all of it, or experts of it that are in no cache
Streamed = tuple[Piece, int, int]  # a piece, its bytes, the block of the pass that computes it


class Ring:
    """Units, or pieces of them, enter in stream order at a cursor that wraps, and leave in the same order."""

    def __init__(self, arena: str, nbytes: int) -> None:
        self.arena, self.nbytes = arena, nbytes
        self._cursor = 0
        self._waiting: deque[Streamed] = deque()  # still to be loaded
        self._ahead: deque[tuple[Piece, Slot]] = deque()  # loaded, its calls not emitted yet
        self._taken: dict[Piece, Slot] = {}  # its calls are being emitted

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

    def holds_next(self, piece: Piece) -> bool:
        """Whether `take` of this piece would do."""
        return bool(self._ahead) and self._ahead[0][0] == piece

    def admit(self, last_block: float, at_hand: Callable[[Piece], bool]) -> tuple[Piece, Slot] | None:
        """The next piece to load and its slot, or None: nothing of the blocks to `last_block` waits, or it is not
        `at_hand` where it comes from, or its bytes are not free yet."""
        if not self._waiting or self._waiting[0][2] > last_block or not at_hand(self._waiting[0][0]):
            return None
        piece, nbytes, _ = self._waiting[0]
        if nbytes > self.nbytes:
            raise InternalError(f"{piece} of {nbytes} bytes is larger than {self.arena} of {self.nbytes}")
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
        self._ahead.append((piece, slot))
        self._cursor = slot.hi
        return piece, slot

    def take(self, piece: Piece) -> Slot:
        """The slot of the piece whose calls come next in the stream."""
        if not self._ahead or self._ahead[0][0] != piece:
            raise InternalError(f"{self.arena} holds {[each for each, _ in self._ahead]}, but {piece} is needed")
        _, self._taken[piece] = self._ahead.popleft()
        return self._taken[piece]

    def release(self, piece: Piece) -> None:
        del self._taken[piece]
