"""How keys and values of a batch's own rows lie apart from the cache: on a device that projects them for attention on
the CPU (`graph.attention`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.graph.batch import Batch


class FreshRows(NamedTuple):
    """Pages of `page_tokens` that hold the rows of `batch`, whose sequence i has the pages `pages[i]`.

    If all rows begin prompts, these are pages as the cache has them, and each sequence has its own. Attention reads
    them there, and they are saved whole. Other rows lie in one page, row after row, as if they were one sequence's. So
    no byte but theirs crosses the link."""

    page_tokens: int
    batch: Batch
    pages: Sequence[Sequence[int]]

    @property
    def page_count(self) -> int:
        return sum(map(len, self.pages))


def fresh_rows(batch: Batch, page_tokens: int) -> FreshRows:
    """The fresh rows of a batch. `page_tokens`: tokens of a page of the cache."""
    if batch.continues:
        t = batch.total_rows
        return FreshRows(t, Batch(batch.id, (0,), (0,), (t,), ()), ((0,),))
    pages, first = [], 0
    for rows in batch.rows:
        count = -(-rows // page_tokens)
        pages.append(range(first, first + count))
        first += count
    return FreshRows(page_tokens, batch, pages)


def most_fresh_tokens(rows: int, seqs: int, page_tokens: int) -> int:
    """Room for the fresh rows of any batch of up to so many rows and sequences, in tokens."""
    seqs = min(rows, seqs)
    return max(rows, (rows + seqs * (page_tokens - 1)) // page_tokens * page_tokens)
