"""What a server's scheduler would do with requests that arrive at given times, on a virtual clock: its passes take as
long as the planner predicts. Nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.cost import Cost
from penstock.planner.simulate import Simulator
from penstock.serve.pages import Ids
from penstock.serve.scheduler import Scheduler
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan

_WARM_PASSES = 2


class Arrival(NamedTuple):
    """A request: when it comes, its prompt's tokens and its answer's."""

    at_s: float
    prompt: int
    output: int


class Foretold(NamedTuple):
    """Of a request: seconds that it waits for a sequence, until its first token, and until its last."""

    wait_s: float
    ttft_s: float
    all_s: float


class PassTimes:
    """Predicted seconds of a pass with so many rows of answers and of one prompt, half-way through the context."""

    def __init__(self, plan: Plan, machine: MachineSpec) -> None:
        self._plan, self._cost = plan, Cost(machine)
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, speaking: int, prompt_rows: int) -> float:
        """Between two powers of two of prompt rows the time is on a line."""
        if prompt_rows < 2:
            return self._of(speaking, prompt_rows)
        low = 1 << (prompt_rows.bit_length() - 1)
        # Rows of a pass: those of answers, and of the prompt at most as many as there is room left.
        high = min(2 * low, max(self._plan.chunk_rows, self._plan.batch_seqs) - speaking)
        first, last = self._of(speaking, low), self._of(speaking, high)
        return first + (last - first) * (prompt_rows - low) / (high - low) if high > low else first

    def _of(self, speaking: int, prompt_rows: int) -> float:
        key = (speaking, prompt_rows)
        if key not in self._known:
            lowering, simulator = Lowering(self._plan), Simulator(self._cost, self._plan.units)
            p = self._pass(speaking, prompt_rows)
            for _ in range(_WARM_PASSES + 1):
                start_s = simulator.now_s
                simulator.busy_s(lowering.step(p))
                simulator.pause(self._cost.between_passes_s)
            self._known[key] = simulator.now_s - start_s
        return self._known[key]

    def _pass(self, speaking: int, prompt_rows: int) -> Pass:
        plan = self._plan
        at = max(0, min(plan.context // 2, plan.context - prompt_rows))
        seqs, rows = list(range(speaking)), [1] * speaking
        if prompt_rows:
            seqs, rows = [*seqs, speaking], [*rows, prompt_rows]
        assert plan.batches_per_pass == 1
        batch = Batch(0, tuple(seqs), (at,) * len(seqs), tuple(rows), tuple(range(speaking)))
        return Pass("prefill" if prompt_rows else "decode", (batch,), passes.DECODE)


def foretell(plan: Plan, times: PassTimes, prompt_rows: int, arrivals: Sequence[Arrival]) -> list[Foretold]:
    """What becomes of each request. `arrivals`: in the order in which they come."""

    def ids(request: int, _start: int, count: int) -> Ids:  # prompts have nothing in common
        return np.full(count, request, np.int32)

    scheduler = Scheduler(plan, prompt_rows, len(arrivals), ids)
    now_s, coming = 0.0, 0
    begun: dict[int, float] = {}
    first: dict[int, float] = {}
    said = [0] * len(arrivals)
    ends: dict[int, float] = {}
    while len(ends) < len(arrivals):
        while coming < len(arrivals) and arrivals[coming].at_s <= now_s:
            scheduler.submit(coming, ids(coming, 0, arrivals[coming].prompt), 0, arrivals[coming].at_s)
            coming += 1
        if (step := scheduler.next(now_s)) is None:
            now_s = arrivals[coming].at_s
            continue
        rows = [each for members in step.rows for each in members]
        for each in rows:
            begun.setdefault(each.request, now_s)
        now_s += times.seconds(sum(not r.reads for r in rows), sum(r.tokens for r in rows if r.reads))
        over = []
        for each in rows:
            said[each.request] += each.says
            if each.says:
                first.setdefault(each.request, now_s)
            if said[each.request] >= arrivals[each.request].output:
                over.append(each.request)
                ends[each.request] = now_s
        scheduler.end(over)
    return [
        Foretold(begun[i] - a.at_s, first[i] - a.at_s, ends[i] - a.at_s) for i, a in enumerate(arrivals)
    ]  # fmt: skip
