"""Embeddings: the hidden states behind a model's final norm, pooled to one vector of a text.

Which states count is the model's to say. Models made for embeddings say it in a file of their own, which packing keeps
(`store.pooling`). Others were never trained for it: of a causal model the last token alone has seen the whole text, so
`last` is what they get, as in other servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, BrokenModel
from penstock.serve.generation import Generation

Pool = Literal["last", "mean"]
POOLS: tuple[Pool, ...] = get_args(Pool)
NOT_MADE = "this model was not made for embeddings: texts that mean the same may lie far apart"


@dataclass(frozen=True)
class Pooling:
    """What is wanted in place of an answer. `pool`: last is the last token's hidden state, mean the mean of all."""

    pool: Pool

    def nth(self, _: int) -> Pooling:
        return self


class Pooled:
    """A prompt, int32 [T], and its embedding so far. It has no tokens of an answer, so `limit` is 0."""

    limit = 0

    def __init__(self, prompt: NDArray[np.int32], pooling: Pooling, context: int) -> None:
        self.prompt, self.answer = prompt, Generation(len(prompt), 1, context, finish_reason="stop")
        self._pool, self._had = pooling.pool, 0
        self._sum: NDArray[np.float64] | None = None  # [D]

    def rows(self, start: int, count: int) -> NDArray[np.int32]:
        """Ids of the positions from `start` on, int32 [count]."""
        return self.prompt[start : start + count]

    def take(self, start: int, hidden: NDArray[np.float32]) -> None:
        """Hidden states float32 [n, D] of the positions from `start` on. A request that gave its pages back reads its
        prompt again: what was had already does not count twice. Raises BrokenModel for states that are not finite."""
        new = hidden[max(0, self._had - start) :] if self._pool == "mean" else hidden[-1:]
        if not np.isfinite(new).all():
            raise BrokenModel("the model's hidden states are not finite: its weights are damaged, or overflow")
        self._had = max(self._had, start + len(hidden))
        added = new.sum(axis=0, dtype=np.float64)
        self._sum = added if self._sum is None or self._pool == "last" else self._sum + added
        if self._had == len(self.prompt):
            count = len(self.prompt) if self._pool == "mean" else 1
            self.answer.embedding = (self._sum / count).astype(np.float32)


def chosen_pooling(asked: str | None, made_for: str | None) -> Pooling:
    """`asked`: what the user names. `made_for`: what the model's files say. Raises BadRequest."""
    for pool in POOLS:
        if pool == (asked or made_for or "last"):
            return Pooling(pool)
    raise BadRequest(f"pooling is {asked!r}; it should be one of {', '.join(POOLS)}")


def stacked(answers: Sequence[Generation], normalize: bool, width: int) -> NDArray[np.float32]:
    """The first `width` numbers of the embeddings of whole answers, float32 [answers, width]."""
    embeddings = [answer.embedding for answer in answers if answer.embedding is not None]
    assert len(embeddings) == len(answers)
    if not embeddings:
        return np.empty((0, width), np.float32)
    return np.stack([unit(each, width) if normalize else each[:width] for each in embeddings])


def require_dimensions(dimensions: int | None, has: int) -> int:
    """Numbers of an embedding. Raises BadRequest where the model's have fewer, or for none."""
    if dimensions is not None and not 1 <= dimensions <= has:
        raise BadRequest(f"dimensions is {dimensions}; an embedding of this model has {has} numbers")
    return has if dimensions is None else dimensions


def unit(vector: NDArray[np.float32], dimensions: int | None = None) -> NDArray[np.float32]:
    """The first `dimensions` numbers of a vector float32 [D], or all, at length 1. A vector of zeros stays. Raises
    BadRequest where it has fewer numbers."""
    cut = vector[: require_dimensions(dimensions, len(vector))].astype(np.float64)
    length = float(np.sqrt(np.square(cut).sum()))
    return (cut / length if length else cut).astype(np.float32)
