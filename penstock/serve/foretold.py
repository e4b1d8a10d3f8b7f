"""Foretells what becomes of requests, by a scheduler on a virtual clock: its passes take as long as the planner
predicts. Nothing runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.graph.tasks import Pass
from penstock.planner.pass_times import PassTimes
from penstock.serve.pages import Ids
from penstock.serve.scheduler import Scheduler, all_rows
from penstock.serve.steps import Rows
from penstock.spec.plan import Plan

# Passes of one foretelling. They take 0.2 s. Simulating their kinds took up to 1.4 s the first time.
MOST_PASSES = 3000


class Arrival(NamedTuple):
    """A request: when it comes, and the numbers of tokens of its prompt and of its answer."""

    at_s: float
    prompt: int
    output: int


class ForetoldRequest(NamedTuple):
    """What becomes of a request: the seconds until it gets a sequence, until its first token, and until its last."""

    wait_s: float
    ttft_s: float
    all_s: float


class Newcomer(NamedTuple):
    """What a request would find if it came now.

    place           requests that are taken before it
    wait_s          seconds that it waits for a sequence
    ttft_s          seconds until its first token, None where that is further away than MOST_PASSES passes
    tokens_per_s    of its answer, after the first token; None as `ttft_s`, and for an answer of one token
    """

    place: int
    wait_s: float | None
    ttft_s: float | None
    tokens_per_s: float | None


def foretell(plan: Plan, times: PassTimes, prompt_rows: int, arrivals: Sequence[Arrival]) -> list[ForetoldRequest]:
    """What becomes of each request. `arrivals`: in the order in which they come."""
    scheduler = Scheduler(plan, prompt_rows, len(arrivals), _filler)
    clock = VirtualClock(scheduler, times, {})
    coming = 0
    while len(clock.end_s) < len(arrivals):
        while coming < len(arrivals) and arrivals[coming].at_s <= clock.now_s:
            at_s, prompt, output = arrivals[coming]
            clock.submit(coming, _filler(coming, 0, prompt), output, at_s)
            coming += 1
        if not clock.step():
            clock.now_s = arrivals[coming].at_s
    return [
        ForetoldRequest(clock.begin_s[i] - a.at_s, clock.first_s[i] - a.at_s, clock.end_s[i] - a.at_s)
        for i, a in enumerate(arrivals)
    ]


def newcomer(
    scheduler: Scheduler, times: PassTimes, left: Mapping[int, int], prompt: int, output: int, now_s: float
) -> Newcomer:
    """What a request of `prompt` tokens would find if it came now and its answer had `output` tokens. Half of the pass
    under way is taken to be over. Raises QueueFull.

    scheduler       a copy of the service's, since it is stepped here
    left            for each of its requests, the tokens of the answer after that pass
    """
    begin_s = now_s + _pass_s(scheduler.underway, times) / 2
    clock = VirtualClock(scheduler, times, left, begin_s)
    scheduler.end([request for request, tokens in left.items() if tokens <= 0])
    number = max(left, default=-1) + 1
    clock.submit(number, _filler(number, 0, prompt), output, now_s)
    place = scheduler.place(number, now_s)
    for _ in range(MOST_PASSES):
        if number in clock.end_s or not clock.step():
            break
    begun, first, end = (of.get(number) for of in (clock.begin_s, clock.first_s, clock.end_s))
    return Newcomer(
        place,
        None if begun is None else begun - now_s,
        None if first is None else first - now_s,
        (output - 1) / (end - first) if end is not None and first is not None and end > first else None,
    )


def first_passes(plan: Plan, prompt: Ids, count: int, output: int) -> list[Pass]:
    """The passes until `count` requests with one prompt, int32 [n], have their first tokens, where there are no other
    requests, and each answer has `output` tokens if the context has room. `count`: at most what the plan has room for
    at once."""

    def ids(_request: int, start: int, tokens: int) -> Ids:
        said = np.zeros(max(0, start + tokens - len(prompt)), np.int32)
        return np.concatenate([prompt[start : start + tokens], said])[:tokens]

    scheduler = Scheduler(plan, all_rows(plan), count, ids, mixed="prefill")
    most = max(1, min(output, plan.context - len(prompt) + 1))
    for request in range(count):
        scheduler.submit(request, prompt, 0, 0.0, most=most)
    firsts, waiting = list[Pass](), set(range(count))
    while waiting and (step := scheduler.next(0.0)) is not None:
        firsts.append(step.taken)
        waiting -= {each.request for each in step.every_row if each.says}
        scheduler.end([request for request, said in scheduler.said.items() if said == most])
    return firsts


class VirtualClock:
    """A scheduler and a clock that its passes move. For each request that was submitted here it knows when the request
    got a sequence, its first token and its last. `left`: for each request that the scheduler has from the start, the
    tokens of its answer that are still to come. `rows`, `over`: rows of the latest pass, and the requests that ended in
    it."""

    def __init__(self, scheduler: Scheduler, times: PassTimes, left: Mapping[int, int], now_s: float = 0.0) -> None:
        self._scheduler, self._times, self._left, self.now_s = scheduler, times, dict(left), now_s
        self.begin_s: dict[int, float] = {}
        self.first_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.rows, self.over = 0, list[int]()

    def submit(self, number: int, prompt: Ids, output: int, at_s: float) -> None:
        """Submits a request with a prompt int32 [n], whose answer will have `output` tokens."""
        self._scheduler.submit(number, prompt, 0, at_s)
        self._left[number] = output

    def step(self) -> bool:
        """Takes the next pass. False if no request wants one."""
        if (step := self._scheduler.next(self.now_s)) is None:
            return False
        rows = step.every_row
        for each in rows:
            self.begin_s.setdefault(each.request, self.now_s)
        self.now_s += _pass_s(rows, self._times)
        self.rows, self.over = sum(each.tokens for each in rows), []
        for each in rows:
            if each.says:
                self.first_s.setdefault(each.request, self.now_s)
            self._left[each.request] -= each.says
            if self._left[each.request] <= 0:
                self.over.append(each.request)
                self.end_s[each.request] = self.now_s
        self._scheduler.end(self.over)
        return True


def _pass_s(rows: Sequence[Rows], times: PassTimes) -> float:
    return times.seconds(sum(not r.reads for r in rows), sum(r.tokens for r in rows if r.reads))


def _filler(request: int, _start: int, count: int) -> Ids:
    """Ids of a made-up prompt, int32 [count], that has nothing in common with another one."""
    return np.full(count, -1 - request, np.int32)
