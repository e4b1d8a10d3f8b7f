"""What the sequences of a plan hold where each has its own pages: the keys and values of tokens that went through the
model.

A chat sends all that was said so far with every turn. Where a sequence still holds the beginning of a prompt, only the
rest of the prompt has to go through the model. (A server's sequences share pages: `serve.pages`.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.graph.tasks import Pass

Ids = NDArray[np.int32]


class Held:
    """The tokens whose keys and values each sequence of a plan holds. They follow from the passes that ran."""

    def __init__(self) -> None:
        self._ids: dict[int, array[int]] = {}

    def note(self, p: Pass, tokens: Sequence[Ids]) -> None:
        """Notes a pass that has ended well. `tokens[i]`, int32 [T]: the ids of its batch i. If sequences share pages, a
        number has no pages of its own, and nothing is held."""
        if any(batch.pages for batch in p.batches):
            self._ids.clear()
            return
        for batch, ids in zip(p.batches, tokens, strict=True):
            first = 0
            for seq, start, rows in zip(batch.seqs, batch.start, batch.rows, strict=True):
                held = self._ids.setdefault(seq, array("i"))
                del held[start:]
                if len(held) == start:
                    held.extend(ids[first : first + rows].tolist())
                first += rows

    def broke_off(self, p: Pass) -> None:
        """Notes a pass that Ctrl-C broke off. It has written nothing before the rows that it computes. So its sequences
        still hold what lies before these rows."""
        if any(batch.pages for batch in p.batches):
            self._ids.clear()
            return
        for batch in p.batches:
            for seq, start in zip(batch.seqs, batch.start, strict=True):
                del self._ids.setdefault(seq, array("i"))[start:]

    def forget(self) -> None:
        """Forgets what sequences hold. After a pass that failed nobody knows it."""
        self._ids.clear()

    def of(self, seq: int) -> Ids:
        """The ids of the first positions of a sequence, int32 [n]."""
        return np.array(self._ids.get(seq, ()), np.int32)


def common(prompt: Ids, held: Ids) -> int:
    """How many tokens of a prompt need not go through the model where a sequence holds `held`, both int32 [n]: at most
    all but the last, since logits are wanted of that one."""
    n = min(len(held), len(prompt) - 1)
    differ = np.flatnonzero(held[:n] != prompt[:n])
    return int(differ[0]) if len(differ) else n
