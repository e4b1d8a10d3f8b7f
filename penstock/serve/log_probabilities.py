"""Log probabilities of tokens, from logits as the model computed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_LEAST_LOGPROB = np.float32(-9999)  # JSON has no infinity


class Likely(NamedTuple):
    """A token's log probability, and the likeliest tokens beside it with theirs, the likeliest first.

    `packed`: those beside it, int32 [n] and then float32 [n]. An answer keeps them until its end, and 20 of them take
    190 bytes so; as pairs of Python's numbers they take 2.5 KB."""

    token: int
    logprob: float
    packed: bytes

    @classmethod
    def of(cls, token: int, logprob: float, ids: NDArray[np.integer], logprobs: Floats) -> Likely:
        """`ids` [n] and `logprobs` float32 [n]: of the likeliest."""
        return cls(token, logprob, ids.astype(np.int32).tobytes() + logprobs.tobytes())

    @property
    def best(self) -> tuple[tuple[int, float], ...]:
        half = len(self.packed) // 2
        ids, logprobs = np.frombuffer(self.packed[:half], np.int32), np.frombuffer(self.packed[half:], np.float32)
        return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def ids_of(tokens: Iterable[Likely]) -> Iterator[int]:
    """The tokens, and the likeliest beside each."""
    for each in tokens:
        yield each.token
        yield from (token for token, _ in each.best)


def likely(logits: Floats, token: int, count: int) -> Likely:
    """Of logits float32 [V], as the model computed them: what `log_softmax` gives, without an array of all."""
    most = np.max(logits)
    with np.errstate(over="ignore"):
        rest = np.log(np.exp(logits - most).sum(dtype=np.float64)).astype(np.float32)
        if count <= 1:
            best = np.array([np.argmax(logits)])[:count]
        elif count < len(logits):
            best = np.argpartition(logits, len(logits) - count)[-count:]
        else:
            best = np.arange(len(logits))
        best = best[np.lexsort((best, -logits[best]))]
        log_probabilities = np.maximum(logits[np.append(best, token)] - most - rest, _LEAST_LOGPROB)
    return Likely.of(token, float(log_probabilities[-1]), best, log_probabilities[:-1])


def log_softmax(logits: Floats) -> Floats:
    """log p over the last axis: float32 [V] or [T, V], of the shape of the logits. The sum is taken in float64."""
    with np.errstate(over="ignore"):
        shifted = logits - np.max(logits, axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    result: Floats = shifted - np.log(total).astype(np.float32)
    return result
