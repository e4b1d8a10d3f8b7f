"""Corrects how many rows of prompts go along with answers, by the time that a server's passes take.

`planner.pace` chooses the rows by prediction. With the figures of a machine that was busy when it was probed, it chose
two rows where six would have been right, and a prompt of 512 tokens took 256 passes.
"""

from __future__ import annotations

import statistics
from collections import deque

from penstock.planner.pace import LONGEST_GAP, room_for_prompts
from penstock.spec.plan import Plan

# So many passes with rows of prompts are compared at a time, with at most as many passes without.
_COMPARED = 16
# So many passes without prompts have to be known.
_LEAST_ALONE = 8
# Rows may make a gap longer by LONGEST_GAP - 1. Their number is not changed as long as they make it longer by between
# these shares of that. With the same rows, a machine gave 1.44 times the gap in one spell, and 1.53 in the next.
_LITTLE, _MUCH = 0.6, 1.2
# A pass counts if so large a share of all sequences has answers under way. Beside one answer, a row makes the gap
# longer by a larger share than beside seven.
_BUSY_SHARE = 0.75
# After so many comparisons, a number of rows that was once too large is tried again: the machine may have had a slow
# spell.
_FORGOTTEN = 32


class MeasuredPace:
    """How many rows of prompts a pass has beside answers, on a server that runs `plan`. It begins with `rows`.
    `reason`: for the user, why the number was changed; None as long as it was not."""

    def __init__(self, plan: Plan, rows: int) -> None:
        self.rows = rows
        self.reason: str | None = None
        self._least, self._most = _range(plan, rows)
        self._speaking = max(1.0, _BUSY_SHARE * (plan.sequences - 1))
        # Seconds by the number of answers: of the latest passes without prompts, and of passes with `rows` rows of
        # prompts since this number was chosen.
        self._alone: dict[int, deque[float]] = {}
        self._beside: dict[int, list[float]] = {}
        self._too_many: int | None = None
        self._comparisons = 0  # since `_too_many` was found

    def note(self, speaking: int, prompt_rows: int, seconds: float) -> bool:
        """Notes the seconds of a pass with one row of each of `speaking` answers, and `prompt_rows` rows of prompts.
        Returns whether `rows` has changed."""
        if speaking < self._speaking:
            return False
        if not prompt_rows:
            self._alone.setdefault(speaking, deque(maxlen=_COMPARED)).append(seconds)
            return False
        if prompt_rows != self.rows:  # the last rows of a prompt are fewer
            return False
        beside = self._beside.setdefault(speaking, [])
        beside.append(seconds)
        alone = self._alone.get(speaking, ())
        if len(beside) < _COMPARED or len(alone) < _LEAST_ALONE:
            del beside[:-_COMPARED]
            return False
        ratio = statistics.median(beside) / statistics.median(alone)
        self._beside.clear()
        return self._follow(ratio, speaking)

    def _follow(self, ratio: float, speaking: int) -> bool:
        self._comparisons += 1
        if self._comparisons > _FORGOTTEN:
            self._too_many = None
        rows = self._better(ratio - 1)
        if rows == self.rows:
            return False
        self.reason = (
            f"with {self.rows} tokens of prompts a pass, gaps of {speaking} answers have become {ratio:.2f} times as"
            f" long: now {rows} are read a pass"
        )
        self.rows = rows
        return True

    def _better(self, longer: float) -> int:
        """How many rows to take if the present number makes gaps longer by the share `longer`. If passes are bound by
        arithmetic, each row costs the same. If weights stream, the first rows cost nothing; so one step at most doubles
        the rows."""
        most_longer = LONGEST_GAP - 1
        if _LITTLE * most_longer <= longer <= _MUCH * most_longer:
            return self.rows
        if longer > most_longer:
            if self.rows > self._least:  # the least rows are taken even if they are too many
                self._too_many, self._comparisons = self.rows, 0
            rows = min(self.rows - 1, int(self.rows * most_longer / longer))
        else:
            rows = 2 * self.rows if 2 * longer < most_longer else int(self.rows * most_longer / longer)
            if self._too_many is not None:
                rows = min(rows, (self.rows + self._too_many) // 2)
            rows = max(rows, self.rows)
        return max(self._least, min(rows, self._most))


def _range(plan: Plan, rows: int) -> tuple[int, int]:
    """The fewest and the most rows that may be taken in place of `rows`. Passes of up to `Plan.asking_rows` rows ask
    for records of neurons, and longer ones stream units whole. A pass foretells which of both the next one does. So a
    change of the rows must not lead from one to the other."""
    most, asking = room_for_prompts(plan), plan.asking_rows - plan.batch_seqs + 1
    return (1, min(most, asking)) if rows <= asking else (min(rows, max(1, asking + 1)), most)
