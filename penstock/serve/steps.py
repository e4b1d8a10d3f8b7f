"""A request as the scheduler knows it, and a pass with rows of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from penstock.graph.tasks import Pass
from penstock.serve.pages import Ids, Move, Table
from penstock.serve.pooling import Pool


class Rows(NamedTuple):
    """Rows of one request in a pass: `tokens` tokens from position `start` on.

    reads   whether they are tokens to read: of the prompt, or of an answer begun before the request gave its pages
            back. Else there is one row, of the answer's last token
    logits  so many of the last rows are to have logits
    says    whether the last row gives a token, or ends a prompt that is pooled
    hidden  so many of the last rows are to have hidden states
    """

    request: int
    seq: int
    start: int
    tokens: int
    reads: bool
    logits: int
    says: bool
    hidden: int = 0


class Step(NamedTuple):
    """A pass, and whose rows its batches have: `rows[i]` are the rows of `taken.batches[i]`, in their order. `moves`:
    what is to be done with pages before the pass, in this order."""

    taken: Pass
    rows: tuple[tuple[Rows, ...], ...]
    moves: tuple[Move, ...] = ()

    @property
    def every_row(self) -> list[Rows]:
        """The rows of all batches."""
        return [each for rows in self.rows for each in rows]

    @property
    def kind(self) -> tuple[int, int] | None:
        """(answers, rows of prompts). None where pages move, or hidden states or logits of more than the last row are
        wanted: the time of such a pass belongs to no prompt and no answer."""
        every = self.every_row
        if self.moves or any(r.hidden or r.logits > 1 for r in every):
            return None
        return sum(not r.reads for r in every), sum(r.tokens for r in every if r.reads)


@dataclass
class Request:
    """A request that has not ended."""

    id: int
    prompt: Ids  # int32 [n]
    owner: str
    priority: int
    arrived_s: float
    order: int  # the order in which requests arrived
    scores: bool  # logits of every token of the prompt are wanted
    most: int | None  # the most tokens of its answer, where no pass is expected after the last request's
    pools: Pool | None  # which hidden states of its prompt are wanted, in place of logits
    seq: int = -1  # the plan's sequence that it has, if any
    table: Table | None = None  # its pages, while it has a sequence
    read: int = 0  # so many first tokens need not go through the model any more
    scored: int = 0  # so many first tokens of the prompt have had their logits, where these are wanted
    said: int = 0  # tokens of the answer
    digests: Sequence[bytes] = ()  # digests of its tokens, page by page, while it waits or reads

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + self.said

    @property
    def ends(self) -> bool:
        """Whether the pass under way is known to be its last one."""
        return self.said >= (1 if self.pools else self.most or inf)

    @property
    def wants_scores(self) -> bool:
        """Whether some logits of its prompt are wanted that were not computed yet."""
        return self.scores and not self.said

    @property
    def wants_all(self) -> bool:
        """Whether every token of the prompt has to go through the model."""
        return self.wants_scores or self.pools == "mean"

    @property
    def reads(self) -> bool:
        """Whether more tokens have still to go through the model than the last one of its answer."""
        return not self.said or self.read < self.tokens - 1
