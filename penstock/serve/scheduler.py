"""Decides what goes through the model next, for requests that come and go while others are answered.

It is pure: requests and a clock go in, passes come out. No model is needed to step it.

Every pass has one row of each sequence that is being answered, so that no answer waits for a prompt to end. Prompts
share the rows that are left of `prompt_rows`: weights that stream from a disk are read once a pass, whatever its rows.
The request that comes first reads its whole prompt first. Requests come in the order of their priority, and of equal
ones in the order in which they arrived. A request gains one step of priority in each AGING_S seconds that it waits, so
none waits for ever.

A sequence has room for the plan's whole context from its first row to its last token. As many requests are answered at
once as the plan has sequences; the others wait. What a sequence held when its request ended stays there, and a prompt
that begins with the same tokens goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from penstock.errors import BadRequest
from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.tasks import Pass, Stream
from penstock.serve.kept import FreeSequences, Ids
from penstock.spec.plan import Plan

AGING_S = 30.0


class QueueFull(BadRequest):
    """So many requests wait already that no more are taken. To be tried again later."""


class Rows(NamedTuple):
    """Rows of one request in a pass: `tokens` tokens from position `start` on. `reads`: they are tokens of its prompt,
    and not the last one of its answer. `logits`: of so many of the last rows logits are wanted. `says`: one of them
    gives a token."""

    request: int
    seq: int
    start: int
    tokens: int
    reads: bool
    logits: int
    says: bool


class Step(NamedTuple):
    """A pass, and whose rows its batches have: `rows[i]` are those of `taken.batches[i]`, in their order."""

    taken: Pass
    rows: tuple[tuple[Rows, ...], ...]


@dataclass
class _Request:
    id: int
    prompt: Ids  # int32 [n]
    owner: str
    priority: int
    arrived_s: float
    order: int  # in which requests arrived
    scores: bool  # logits of every token of the prompt are wanted
    seq: int = -1  # of the plan, once it has one
    read: int = 0  # tokens that need not go through the model any more
    said: int = 0  # tokens of the answer

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def reads(self) -> bool:
        """Whether tokens of the prompt are left to read."""
        return self.read < self.prompt_tokens


class Scheduler:
    """Requests of one loaded plan. `prompt_rows`: the most rows of prompts in a pass beside rows of answers; alone they
    fill the plan's chunks. `queue`: the most requests that may wait. `held`: the tokens whose keys and values a
    sequence holds, int32 [n]."""

    def __init__(self, plan: Plan, prompt_rows: int, queue: int, held: Callable[[int], Ids]) -> None:
        self._plan, self._prompt_rows, self._queue = plan, max(1, prompt_rows), queue
        self._free = FreeSequences(range(plan.batch_seqs * plan.batches_per_pass), held)
        self._requests: dict[int, _Request] = {}
        self._arrived = 0

    @property
    def running(self) -> int:
        """Requests that have a sequence."""
        return sum(request.seq >= 0 for request in self._requests.values())

    @property
    def waiting(self) -> int:
        """Requests that have none yet."""
        return len(self._requests) - self.running

    @property
    def free_sequences(self) -> int:
        return len(self._free)

    def place(self, request: int, now_s: float) -> int:
        """How many waiting requests come before this one; 0 where it waits no more."""
        line = [other.id for other in self._in_order(now_s) if other.seq < 0]
        return line.index(request) if request in line else 0

    def submit(
        self, request: int, prompt: Ids, priority: int, now_s: float, owner: str = "", scores: bool = False
    ) -> None:
        """Takes a request with a prompt int32 [n]. `owner`: who sent it; what one owner's prompts left behind is for no
        other. `scores`: logits of every token of the prompt are wanted, so all of them go through the model, in passes
        whose logits the plan has room for. Raises QueueFull."""
        if self.waiting - len(self._free) >= self._queue:
            raise QueueFull(f"{self.waiting} requests wait already, and {self._queue} may: try again later")
        assert request not in self._requests and 0 < len(prompt) <= self._plan.context
        self._requests[request] = _Request(request, prompt, owner, priority, now_s, self._arrived, scores)
        self._arrived += 1

    def end(self, requests: Collection[int]) -> None:
        """Requests have ended, by themselves or since nobody wants them any more. Their sequences are free. Not to be
        called while a pass is under way that has rows of theirs."""
        for number in requests:
            if (request := self._requests.pop(number, None)) is not None and request.seq >= 0:
                self._free.give(request.seq, request.owner)

    def next(self, now_s: float) -> Step | None:
        """The next pass; None where nobody wants one. Between two calls the pass must be run, and every request that
        ended in it be told to `end`."""
        speaking = sorted((r for r in self._requests.values() if r.seq >= 0 and not r.reads), key=lambda r: r.seq)
        rows = [self._said(request) for request in speaking]
        reading = self._reading(rows, now_s)
        if not rows and not reading:
            return None
        by_batch: list[list[Rows]] = [[] for _ in range(self._plan.batches_per_pass)]
        for each in sorted([*rows, *reading], key=lambda r: r.seq):
            by_batch[each.seq // self._plan.batch_seqs].append(each)
        batches = tuple(_batch(i, members) for i, members in enumerate(by_batch) if members)
        for each in (*rows, *reading):
            request = self._requests[each.request]
            request.read, request.said = max(request.read, each.start + each.tokens), request.said + each.says
        then = Stream("prefill", True) if any(r.reads for r in self._requests.values()) else passes.DECODE
        few = bool(reading) and max(batch.total_rows for batch in batches) <= self._plan.asking_rows
        taken = Pass("prefill" if reading else "decode", batches, then, few)
        return Step(taken, tuple(tuple(members) for members in by_batch if members))

    def _said(self, request: _Request) -> Rows:
        """The row of an answer's last token."""
        return Rows(request.id, request.seq, request.prompt_tokens + request.said - 1, 1, False, 1, True)

    def _reading(self, speaking: list[Rows], now_s: float) -> list[Rows]:
        """Rows of prompts for the next pass."""
        size = self._plan.batch_seqs
        room = [max(self._plan.chunk_rows, size)] * self._plan.batches_per_pass
        logits = [self._plan.logits_rows] * self._plan.batches_per_pass
        for each in speaking:
            room[each.seq // size] -= 1
            logits[each.seq // size] -= 1
        left = self._prompt_rows if speaking else sum(room)
        found: list[Rows] = []
        for request in self._in_order(now_s):
            if left <= 0:
                break
            if not request.reads:
                continue
            if request.seq < 0:
                if not (free := [s for s in self._free if room[s // size] > 0]):
                    continue
                known = request.prompt[:1] if request.scores else request.prompt
                request.seq, request.read = self._free.take(free, known, request.owner)
            seq, batch = request.seq, request.seq // size
            count = min(request.prompt_tokens - request.read, left, room[batch])
            if request.scores:
                count = min(count, logits[batch])
            elif not logits[batch]:  # its last row, which wants logits, waits for the next pass
                count = min(count, request.prompt_tokens - request.read - 1)
            if count <= 0:
                continue
            ends = request.read + count == request.prompt_tokens
            wanted = count if request.scores else int(ends)
            room[batch], logits[batch], left = room[batch] - count, logits[batch] - wanted, left - count
            found.append(Rows(request.id, seq, request.read, count, True, wanted, ends))
        return found

    def _in_order(self, now_s: float) -> list[_Request]:
        """All requests, the most urgent first."""

        def urgency(request: _Request) -> tuple[float, int]:
            return (-request.priority - (now_s - request.arrived_s) // AGING_S, request.order)

        return sorted(self._requests.values(), key=urgency)


def _batch(number: int, members: Iterable[Rows]) -> Batch:
    _, seqs, start, rows, _, wanted, _ = zip(*members, strict=True)
    last = zip(accumulate(rows), wanted, strict=True)
    logits = tuple(row for end, count in last for row in range(end - count, end))
    return Batch(number, seqs, start, rows, logits)
