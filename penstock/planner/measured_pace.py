"""Corrects how many rows of prompts go along with answers, by what a server's passes take.

`planner.pace` chooses the rows by prediction. On figures of a machine that was busy when it was probed it chose two
rows where six are right, and a prompt of 512 tokens then took 256 passes.
"""

from __future__ import annotations

import statistics
from collections import deque

from penstock.planner.pace import LONGEST_GAP, room_for_prompts
from penstock.spec.plan import Plan

# Passes with so many rows of prompts are compared at a time, with as many at most of those without.
_COMPARED = 16
# Of those without prompts so many have to be known.
_LEAST_ALONE = 8
# What rows may add to a gap is LONGEST_GAP - 1. While they add between these shares of it, they are left as they are:
# one spell of a machine gave 1.44 times the gap, and the next one 1.53, with the same rows.
_LITTLE, _MUCH = 0.6, 1.2
# A pass counts for what answers wait if so large a share of all sequences speaks. Beside one answer a row adds more of
# the gap than beside seven.
_BUSY_SHARE = 0.75
# After so many comparisons it is tried again what was once too many: the machine may have had a slow spell.
_FORGOTTEN = 32


class MeasuredPace:
    """The rows of prompts in a pass beside answers, of a server of `plan`: `rows` at first. `reason`: why they are no
    longer these, for the user; None while they are."""

    def __init__(self, plan: Plan, rows: int) -> None:
        self.rows = rows
        self.reason: str | None = None
        self._least, self._most = _range(plan, rows)
        self._speaking = max(1.0, _BUSY_SHARE * (plan.batch_seqs * plan.batches_per_pass - 1))
        self._alone: dict[int, deque[float]] = {}  # by the number of answers, seconds of the latest passes
        self._beside: dict[int, list[float]] = {}  # of passes with `rows` rows of prompts, since these were chosen
        self._too_many: int | None = None
        self._comparisons = 0  # since `_too_many` was found

    def note(self, speaking: int, prompt_rows: int, seconds: float) -> bool:
        """Notes what a pass took, with a row of each of `speaking` answers and `prompt_rows` rows of prompts. Returns
        whether `rows` has changed."""
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
        """The rows to take where so many as now make gaps longer by this share. Each row costs the same where passes
        are bound by arithmetic. Where weights stream the first rows cost nothing, and one step at most doubles them."""
        most_longer = LONGEST_GAP - 1
        if _LITTLE * most_longer <= longer <= _MUCH * most_longer:
            return self.rows
        if longer > most_longer:
            if self.rows > self._least:  # fewer are not taken, so it says nothing of more
                self._too_many, self._comparisons = self.rows, 0
            rows = min(self.rows - 1, int(self.rows * most_longer / longer))
        else:
            rows = 2 * self.rows if 2 * longer < most_longer else int(self.rows * most_longer / longer)
            if self._too_many is not None:
                rows = min(rows, (self.rows + self._too_many) // 2)
            rows = max(rows, self.rows)
        return max(self._least, min(rows, self._most))


def _range(plan: Plan, rows: int) -> tuple[int, int]:
    """The fewest and the most rows that may be taken in place of `rows`. A pass foretells whether the next one asks
    units for rows or takes them whole, which goes by the rows that both may have (`Plan.asking_rows`). So a change does
    not go from the one to the other."""
    most, asking = room_for_prompts(plan), plan.asking_rows - plan.batch_seqs + 1
    return (1, min(most, asking)) if rows <= asking else (min(rows, max(1, asking + 1)), most)
