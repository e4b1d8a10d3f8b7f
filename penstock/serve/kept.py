"""What sequences hold when nobody needs them any more: the keys and values of tokens that went through the model.

A chat sends all that was said so far with every turn. Where a sequence still holds the beginning of a prompt, only the
rest of the prompt has to go through the model.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.graph.tasks import Pass

Ids = NDArray[np.int32]


class Held:
    """The tokens whose keys and values each sequence of a plan holds, by what passes did."""

    def __init__(self) -> None:
        self._ids: dict[int, array[int]] = {}

    def note(self, p: Pass, tokens: Sequence[Ids]) -> None:
        """A pass has ended well. `tokens[i]`, int32 [T]: the ids of its batch i. Where sequences share pages, the pages
        of every number are taken, and nothing is held."""
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

    def forget(self) -> None:
        """What sequences hold is not known any more: a pass failed."""
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


class FreeSequences:
    """The sequences of a plan that nobody has: all of them at first. `held`: what a sequence holds, int32 [n]."""

    def __init__(self, seqs: Iterable[int], held: Callable[[int], Ids]) -> None:
        self._held = held
        self._since = dict.fromkeys(seqs, 0)  # counts up, so what is low has been free for long
        self._owners: dict[int, str] = {}
        self._given = 0

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._since))

    def give(self, seq: int, owner: str) -> None:
        """The sequence is free. `owner`: who sent what it holds."""
        self._given += 1
        self._since[seq], self._owners[seq] = self._given, owner

    def take(self, seqs: Iterable[int], prompt: Ids, owner: str) -> tuple[int, int]:
        """One of the free sequences `seqs` for a prompt, int32 [n], and how many tokens of the prompt it holds. What
        another owner sent is never shared: how long a prompt takes would tell what the other one said.

        A sequence is taken for its content if the prompt has at least half of it. Of a long chat whose first words
        alone are the same, more would be lost than gained. Else an empty one is taken, or the one longest free."""

        def worth(seq: int) -> tuple[int, int, int]:
            held = self._held(seq)
            same = common(prompt, held) if self._owners.get(seq) == owner else 0
            return (same if 2 * same >= len(held) else 0, -self._since[seq] if len(held) else 0, -seq)

        seq = max(seqs, key=worth)
        same = common(prompt, self._held(seq)) if self._owners.get(seq) == owner else 0
        del self._since[seq]
        return seq, same
