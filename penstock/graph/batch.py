"""A batch: the sequences that go through the model together in one pass, and the rows of each."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple


class _BatchFields(NamedTuple):
    id: int
    seqs: tuple[int, ...]
    start: tuple[int, ...]
    rows: tuple[int, ...]
    logits: tuple[int, ...]
    parent: tuple[int, ...] = ()
    pages: tuple[tuple[int, ...], ...] = ()
    hidden: bool = False
    some: bool = False


class Batch(_BatchFields):
    """Rows that go through the model together: `rows[i]` tokens of sequence `seqs[i]` from position `start[i]`.
    `logits`: rows (counted over the batch) whose logits are wanted. `parent`: () if each row follows the row before.
    `pages[i]`: the KV pages of sequence `seqs[i]` in the order of its positions, as many as start + rows need; () where
    each sequence has the consecutive pages of its number. `hidden`: of all rows the hidden state behind the final norm
    is wanted, as the head would have it. `some`: it stands for some rows of the pass's batch with this id, and has no
    positions, pages or logits of its own.

    Its sums are cached, because all layers ask for them: planning 10,000 sequences took minutes when each layer
    counted."""

    @cached_property
    def total_rows(self) -> int:
        return sum(self.rows)

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """Everything that decides the batch's tasks. Positions are data, so they and what follows from them are left
        out. If pages are given, three numbers are enough: of sequences, of rows, and of rows that want logits. Then it
        is data too which sequences these are, and how many rows each has."""
        if self.pages and not self.parent:
            return (self.id, len(self.seqs), self.total_rows, len(self.logits), self.hidden)
        seqs = len(self.seqs) if self.pages else self.seqs
        return (self.id, seqs, self.rows, self.logits, self.parent, self.hidden, self.some)

    @property
    def form(self) -> tuple[object, ...]:
        """Everything that decides which ops the batch's tasks have, and where their operands lie, for a caller that
        takes the numbers of rows, of rows with logits and of sequences as data too."""
        if self.parent:
            return self.shape
        seqs = () if self.pages else self.seqs
        return (bool(self.pages), bool(self.logits), *self._replace(seqs=seqs, start=(), rows=(), logits=(), pages=()))

    @cached_property
    def first_seq(self) -> int:
        return min(self.seqs)

    @cached_property
    def last_seq(self) -> int:
        return max(self.seqs)

    @cached_property
    def most_rows(self) -> int:
        """The most rows that one sequence has."""
        return max(self.rows)

    @cached_property
    def bound_rows(self) -> int:
        """The most rows that one sequence can have in any batch of this shape."""
        return self.total_rows - len(self.seqs) + 1 if self.pages and not self.parent else self.most_rows

    @cached_property
    def continues(self) -> bool:
        """Whether any of its rows has tokens before it in the KV cache."""
        return any(self.start)

    @cached_property
    def spans(self) -> Counter[tuple[int, int]]:
        """(start, rows) → how many of its sequences have this span. Sequences of equal length share one."""
        return Counter(zip(self.start, self.rows, strict=True))
