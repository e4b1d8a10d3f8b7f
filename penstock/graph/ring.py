"""The bookkeeping of a ring, the arena that units stream through: which units it holds, and which may come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from penstock.errors import InternalError
from penstock.graph.tasks import Slot

Piece = tuple[int, int, int]  # (unit, lo, hi): all granules of a unit, or those of its experts that are in no cache
Streamed = tuple[Piece, int, int]  # a piece, its bytes, the block of the pass that computes it
_KEPT = 8  # passes whose rounds are remembered


class Ring:
    """Units, or pieces of them, enter in stream order at a cursor that wraps, and leave in the same order.

    Each pass has its pieces where the pass before had them: then its tasks can be those of the pass before, and a
    device can record them. So the first piece of a pass goes to the beginning of the ring.

    `even`: the pieces of a pass fill the ring in rounds, as few as its size allows, and of about equal bytes. If the
    last round were a short one, the first loads of the next pass would wait for it, while the rest of the ring lay
    unused, which cost 3 % of a promise of Qwen2.5-32B. Rings of a device are not even: rounds of fewer bytes cost up to
    2.7 % there, and gained nothing."""

    def __init__(self, arena: str, nbytes: int, even: bool = False) -> None:
        self.arena, self.nbytes, self._even = arena, nbytes, even
        self._rounds: dict[tuple[int, ...], frozenset[int]] = {}  # bytes of a pass's pieces → `_firsts`
        self._cursor = 0
        # Pieces whose loads are not emitted yet, and whether a round begins with them.
        self._waiting: deque[tuple[Streamed, bool]] = deque()
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
        self._waiting = deque([*self._in_rounds(now)[kept:], *self._in_rounds(then)])

    def _in_rounds(self, pieces: list[Streamed]) -> list[tuple[Streamed, bool]]:
        """The pieces of a pass, and whether a round begins with each."""
        sizes = tuple([0 if piece in self._apart else nbytes for piece, nbytes, _ in pieces])
        firsts = self._rounds.get(sizes)
        if firsts is None:
            if len(self._rounds) >= _KEPT:
                self._rounds.clear()
            firsts = self._rounds[sizes] = self._firsts(sizes)
        return [(piece, i in firsts) for i, piece in enumerate(pieces)]

    def _firsts(self, sizes: tuple[int, ...]) -> frozenset[int]:
        """The numbers of the pieces that rounds begin with. `sizes`: the bytes of each piece, 0 for one that lies
        elsewhere."""
        if not self._even:
            return frozenset([i for i, nbytes in enumerate(sizes) if nbytes][:1])
        least, most = max(sizes, default=0), self.nbytes
        fewest = len(_filled(sizes, most))
        while least < most:  # the fewest bytes that a round may have
            middle = (least + most) // 2
            least, most = (least, middle) if len(_filled(sizes, middle)) <= fewest else (middle + 1, most)
        return frozenset(_filled(sizes, most))

    def rewind(self) -> None:
        """The next unit goes to the beginning of the ring. So its load waits for calls that still read from there."""
        self._cursor = 0

    @property
    def waiting(self) -> Iterable[Streamed]:
        """The pieces that are still to be loaded, in order."""
        return (piece for piece, _ in self._waiting)

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
        if not self._waiting:
            return None
        (piece, nbytes, block), begins = self._waiting[0]
        if block > last_block or not at_hand(piece):
            return None
        if (elsewhere := self._apart.get(piece)) is not None:
            self._waiting.popleft()
            self._ahead.append((piece, elsewhere))
            return piece, elsewhere
        if nbytes > self.nbytes:
            raise InternalError(f"{piece} of {nbytes} bytes is larger than {self.arena} of {self.nbytes}")
        lo = 0 if begins or self._cursor + nbytes > self.nbytes else self._cursor
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


def _filled(sizes: Iterable[int], most_bytes: int) -> list[int]:
    """The numbers of the pieces that begin a round, if each round takes as many pieces as `most_bytes` have room for.
    `sizes`: the bytes of each piece."""
    firsts: list[int] = []
    left = -1
    for number, nbytes in enumerate(sizes):
        if not nbytes:
            continue
        if nbytes > left:
            firsts.append(number)
            left = most_bytes
        left -= nbytes
    return firsts
