"""Predicts the seconds of a server's passes, which have rows of answers, and of a prompt beside them. Measured seconds
of passes so far correct the predictions of similar passes."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.passes import MIXED
from penstock.graph.tasks import Pass, Stream
from penstock.planner.cost import Cost
from penstock.planner.routing import Replay
from penstock.planner.shorten import quick_s
from penstock.planner.simulate import WARM_PASSES, Simulator, lowered_pass
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan

_COUNTED_PASSES, _CACHE_PASSES = 2, 32
_FEW = 4  # up to so many answers each number is simulated
LEAST_PASSES = 4  # of a kind, before what they took is believed
_LATEST, _MOST_KINDS = 32, 64  # passes that are remembered of a kind, and kinds
# Times its kind's median that a pass counts for at most: a machine that stood still for a second tells nothing.
_LONGEST = 3.0
# How alike kinds are whose distance is small beside _FAR, and how much less than by itself a kind says of its like.
_FAR, _BESIDE = 0.25, 0.25

Kind = tuple[int, int]  # (answers, rows of prompts) of a pass


class TookPasses(NamedTuple):
    """What the latest passes of a kind took: their mean, and how many they are."""

    seconds: float
    passes: int


class PassTimes:
    """Predicted seconds of a plan's passes. A few sizes of a pass are simulated, and sizes in between lie on a line.
    `mixed`: the purpose of passes with rows of prompts beside answers."""

    def __init__(self, plan: Plan, machine: MachineSpec, mixed: str = MIXED) -> None:
        self._plan, self._machine, self._mixed = plan, machine, mixed
        self._known: dict[Kind, float] = {}
        self._took: dict[Kind, deque[float]] = {}  # what the latest passes of a kind took
        # Of kinds with LEAST_PASSES passes and more. It is replaced and never changed, since one thread notes passes
        # while another one foretells.
        self.measured: dict[Kind, TookPasses] = {}
        self._corrected: tuple[dict[Kind, TookPasses], dict[Kind, float]] = (self.measured, {})  # by `measured`

    def note(self, speaking: int, prompt_rows: int, seconds: float) -> None:
        """Notes how long a pass of this kind took. A call takes some 10 µs. Only one thread may call it."""
        kind = (speaking, prompt_rows)
        took = self._took.pop(kind, None) or deque(maxlen=_LATEST)
        took.append(seconds)
        self._took[kind] = took  # the kind seen last is last
        measured = dict(self.measured)
        if len(took) >= LEAST_PASSES:
            measured[kind] = TookPasses(_mean(took), len(took))
        if len(self._took) > _MOST_KINDS:
            gone = next(iter(self._took))
            del self._took[gone]
            measured.pop(gone, None)
        self.measured = measured

    def seconds(self, speaking: int, prompt_rows: int) -> float:
        """Seconds of a pass with a row of each of `speaking` answers and `prompt_rows` rows of prompts: the predicted
        seconds, times measured over predicted seconds of passes so far, with prompts if it has some. The more alike and
        the more these are, the more they count. One kind's own few passes may all come from a slow moment."""
        measured, known = self._corrected
        if measured is not self.measured:
            measured, known = self._corrected = (self.measured, {})
        kind = (speaking, prompt_rows)
        if kind not in known:
            known[kind] = self._predicted(*kind) * self._longer(kind, measured)
        return known[kind]

    def _longer(self, kind: Kind, measured: dict[Kind, TookPasses]) -> float:
        """How many times as long passes of a kind take as predicted, by what others took."""
        all_weight = all_longer = 0.0
        for other, took in measured.items():
            if (other[1] > 0) == (kind[1] > 0) and (predicted_s := self._predicted(*other)):
                weight = took.passes / (_BESIDE + (_distance(other, kind) / _FAR) ** 2)
                all_weight += weight
                all_longer += weight * took.seconds / predicted_s
        return all_longer / all_weight if all_weight else 1.0

    def _predicted(self, speaking: int, prompt_rows: int) -> float:
        most = self._plan.sequences
        speaking = min(speaking, most - (prompt_rows > 0))
        if not speaking and not prompt_rows:
            return 0.0
        low, high = (speaking, speaking) if speaking <= _FEW else _around(speaking, most - (prompt_rows > 0))
        first_s = self._with_rows(low, prompt_rows)
        return _between(first_s, self._with_rows(high, prompt_rows), low, high, speaking) if high > low else first_s

    def _with_rows(self, speaking: int, prompt_rows: int) -> float:
        size = self._plan.batch_seqs
        # A pass has as many rows of prompts as its batches have room for. Here one prompt is read, in one batch.
        most = max(self._plan.chunk_rows, size) - speaking % size
        prompt_rows = min(prompt_rows, most)
        if prompt_rows < 2:
            return self._of(speaking, prompt_rows)
        low, high = _around(prompt_rows, most)
        first_s = self._of(speaking, low)
        return _between(first_s, self._of(speaking, high), low, high, prompt_rows) if high > low else first_s

    def _of(self, speaking: int, prompt_rows: int) -> float:
        key = (speaking, prompt_rows)
        if key not in self._known:
            self._known[key] = quick_s(
                self._plan, lambda plan: pass_s(plan, self._machine, speaking, prompt_rows, self._mixed)
            )
        return self._known[key]


def pass_s(plan: Plan, machine: MachineSpec, speaking: int, prompt_rows: int, mixed: str = MIXED) -> float:
    """Predicted seconds of a pass with a row of each of `speaking` sequences and `prompt_rows` rows of another's
    prompt, where passes like it came before. `mixed`: the purpose of passes with both. Sequences are half-way through
    their context, or have half of their share of the pages."""
    lowering, simulator, replay = Lowering(plan), Simulator(Cost(machine)), Replay(plan)
    pause_s = Cost(machine).between_passes_s
    share = plan.kv_pages * plan.page_tokens // plan.sequences
    position = max(0, min((share or plan.context) // 2, plan.context - prompt_rows))
    p = passes.decode(plan, range(speaking), (position,) * speaking, passes.DECODE)
    if speaking:
        replay.warm(lowering, p, _CACHE_PASSES)
    if prompt_rows:
        p = _with_prompt(plan, p, speaking, position, prompt_rows, mixed if speaking else "prefill")
    if plan.guests:
        ends = [start + rows for batch in p.batches for start, rows in zip(batch.start, batch.rows, strict=True)]
        p = p._replace(pages_used=sum(-(-end // plan.page_tokens) for end in ends))
    seconds = []
    for _ in range(WARM_PASSES + _COUNTED_PASSES):
        start_s = simulator.now_s
        simulator.busy_s(*lowered_pass(lowering, p, replay.answer))
        simulator.pause(pause_s)
        seconds.append(simulator.now_s - start_s)
    return sum(seconds[WARM_PASSES:]) / _COUNTED_PASSES


def _with_prompt(plan: Plan, p: Pass, seq: int, position: int, rows: int, purpose: str) -> Pass:
    """The pass with rows of one more sequence, the last, whose prompt does not end."""
    number = seq // plan.batch_seqs
    batches = {batch.id: batch for batch in p.batches}
    before = batches.get(number, Batch(number, (), (), (), ()))
    batches[number] = Batch(
        number, (*before.seqs, seq), (*before.start, position), (*before.rows, rows), before.logits
    )  # fmt: skip
    together = tuple(batches.values())
    few = max(batch.total_rows for batch in together) <= plan.asking_rows
    return Pass(purpose, together, Stream(purpose, True, few), few)


def _mean(took: Collection[float]) -> float:
    """Seconds of a pass among others: those that take longer than most are a part of what all take. But none counts for
    more than _LONGEST medians."""
    most_s = _LONGEST * statistics.median(took)
    return sum(min(seconds, most_s) for seconds in took) / len(took)


def _distance(a: Kind, b: Kind) -> float:
    """How unlike two kinds of passes are."""
    return sum(abs(x - y) / max(x, y, 1) for x, y in zip(a, b, strict=True))


def _around(number: int, most: int) -> tuple[int, int]:
    """The powers of two around a number from 1 to `most`, the second at most `most`."""
    low = 1 << (number.bit_length() - 1)
    return low, min(2 * low, most)


def _between(first: float, last: float, low: int, high: int, position: int) -> float:
    return first + (last - first) * (position - low) / (high - low)
