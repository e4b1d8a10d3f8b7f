"""The bookkeeping of a ring, the arena that units stream through: which units it holds, and which may come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from penstock.errors import InternalError
from penstock.graph.tasks import Slot

Piece = tuple[int, int, int]  # (unit, lo, hi): all granules of a unit, or those of its experts that are in no cache
Streamed = tuple[Piece, int, int]  # a piece, its bytes, the block of the pass that computes it


class Ring:
    """Units, or pieces of them, enter in stream order at a cursor that wraps, and leave in the same order.

    `restarts`: the first piece of a pass goes to the beginning of the ring. So each pass has its pieces where the pass
    before had them, and a device can record its tasks. That leaves at most one piece's room unused, once a pass."""

    def __init__(self, arena: str, nbytes: int, restarts: bool = False) -> None:
        self.arena, self.nbytes, self._restarts = arena, nbytes, restarts
        self._firsts: tuple[Piece, ...] = ()  # that a pass begins with, where it restarts
        self._cursor = 0
        self._waiting: deque[Streamed] = deque()  # pieces whose loads are not emitted yet
        self._ahead: deque[tuple[Piece, Slot]] = deque()  # pieces whose loads are emitted, and their calls not yet
        self._taken: dict[Piece, Slot] = {}  # pieces whose calls are being emitted
        self._apart: Mapping[Piece, Slot] = {}  # slots of pieces of this pass that need no room in the ring

    def begin(self, now: list[Streamed], then: list[Streamed], apart: Mapping[Piece, Slot] | None = None) -> None:
        """A pass starts that streams `now`, and the pass after it streams `then`. Pieces that were loaded ahead for a
        pass other than this one are dropped. That wastes at most one ring of reads. `apart`: pieces of this pass that
        come in their turn, and to slots elsewhere."""
        self._apart = apart or {}
        kept = 0
        while kept < min(len(self._ahead), len(now)) and self._ahead[kept][0] == now[kept][0]:
            kept += 1
        while len(self._ahead) > kept:
            self._ahead.pop()
        self._waiting = deque([*now[kept:], *then])
        self._firsts = tuple(pieces[0][0] for pieces in (now, then) if pieces and self._restarts)

    def rewind(self) -> None:
        """The next unit goes to the beginning of the ring. So its load waits for calls that still read from there."""
        self._cursor = 0

    @property
    def waiting(self) -> Iterable[Streamed]:
        """The pieces that are still to be loaded, in order."""
        return self._waiting

    @property
    def held(self) -> tuple[object, ...]:
        """The cursor and the pieces that the ring holds: all that one pass leaves for the next."""
        return self._cursor, *self._ahead

    def holds_next(self, piece: Piece) -> bool:
        """Whether this piece is the next that `take` would give."""
        return bool(self._ahead) and self._ahead[0][0] == piece

    def admit(self, last_block: float, at_hand: Callable[[Piece], bool]) -> tuple[Piece, Slot] | None:
        """The next piece to load and its slot. None where no piece of the blocks up to `last_block` waits, or where the
        piece's source is not filled yet (`at_hand`), or where its bytes in the ring are not free yet.

        Raises InternalError if the piece is larger than the ring."""
        if not self._waiting or self._waiting[0][2] > last_block or not at_hand(self._waiting[0][0]):
            return None
        piece, nbytes, _ = self._waiting[0]
        if (elsewhere := self._apart.get(piece)) is not None:
            self._waiting.popleft()
            self._ahead.append((piece, elsewhere))
            return piece, elsewhere
        if nbytes > self.nbytes:
            raise InternalError(f"{piece} of {nbytes} bytes is larger than {self.arena} of {self.nbytes}")
        lo = self._cursor if self._cursor + nbytes <= self.nbytes and piece not in self._firsts else 0
        slot = Slot(self.arena, lo, lo + nbytes)
        hi = slot.hi
        for arena, held_lo, held_hi in self._taken.values():
            if held_lo < hi and lo < held_hi and arena == self.arena:
                return None
        for _, (arena, held_lo, held_hi) in self._ahead:
            if held_lo < hi and lo < held_hi and arena == self.arena:
                return None
        self._waiting.popleft()
        self._ahead.append((piece, slot))
        self._cursor = slot.hi
        return piece, slot

    def take(self, piece: Piece) -> Slot:
        """The slot of the piece whose calls come next in the stream. Raises InternalError if the ring holds another
        piece first."""
        if not self._ahead or self._ahead[0][0] != piece:
            raise InternalError(f"{self.arena} holds {[piece for piece, _ in self._ahead]}, but {piece} is needed")
        _, self._taken[piece] = self._ahead.popleft()
        return self._taken[piece]

    def release(self, piece: Piece) -> Slot:
        """The calls of a piece are emitted. Returns where it lies."""
        return self._taken.pop(piece)
