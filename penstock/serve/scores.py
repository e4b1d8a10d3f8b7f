"""Scores a given text: the log probability of each token after the tokens before it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.serve.log_probabilities import Likely, likely
from penstock.serve.sampling import check_finite


class Scores:
    """The scores of a prompt, int32 [T], as far as they were computed. `count`: so many of the likeliest tokens are
    kept beside each.

    Nothing comes before the first token, so it has no score. The others are in arrays: a prompt may be long, and
    objects would take ten times the memory."""

    def __init__(self, prompt: NDArray[np.int32], count: int) -> None:
        n = len(prompt) - 1
        self.prompt, self._count = prompt, count
        self.logprobs = np.full(n, np.nan, np.float32)  # [i]: of token i + 1
        self._ids, self._best = np.zeros((n, count), np.int32), np.zeros((n, count), np.float32)
        self._width = count  # the vocabulary may be smaller

    def take(self, start: int, logits: NDArray[np.float32]) -> None:
        """Logits float32 [n, V] of the positions from `start` on. Those of the last position say nothing of the prompt.
        Raises BrokenModel for logits that are not finite."""
        for i, row in zip(range(start, len(self.logprobs)), logits, strict=False):
            check_finite(row)
            each = likely(row, int(self.prompt[i + 1]), self._count)
            self.logprobs[i] = each.logprob
            self._width = len(each.best)
            for k, (token, logprob) in enumerate(each.best):
                self._ids[i, k], self._best[i, k] = token, logprob

    def tokens(self) -> list[Likely]:
        """The scores of all tokens after the first."""
        ids, best = self._ids[:, : self._width], self._best[:, : self._width]
        return [
            Likely.of(token, logprob, ids[i], best[i])
            for i, (token, logprob) in enumerate(zip(self.prompt[1:].tolist(), self.logprobs.tolist(), strict=True))
        ]
