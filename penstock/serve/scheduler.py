"""Decides what goes through the model next, for requests that come and go while others are answered.

It is pure: requests and a clock go in, passes come out. No model is needed to step it.

Every pass has one row of each sequence that is being answered, so that no answer waits for a prompt to end. Prompts
share the rows that are left of `prompt_rows`: weights that stream from a disk are read once a pass, whatever its rows.
The request that comes first reads its whole prompt first. Requests come in the order of their priority, and of equal
ones in the order in which they arrived. A request gains one step of priority in each AGING_S seconds that it waits, so
none waits for ever.

A request is taken when pages are there for its prompt (`serve.pages`), and gets more of them as its answer grows. As
many requests are answered at once as the plan has sequences and pages for; the others wait. Where pages run out, the
least urgent request gives its own back and waits again. Later its prompt and what it has said so far go through the
model once more, or come back from where pages are stored, and the answer goes on. Pages whose request has ended keep
their content as long as no page is wanted, and a prompt that begins with the same tokens goes on from there. A prompt
whose beginning another request is just reading waits for that, to share it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate, islice

import numpy as np

from penstock.errors import BadRequest
from penstock.graph import passes
from penstock.graph.arenas import Layout
from penstock.graph.batch import Batch
from penstock.graph.tasks import Pass, Stream
from penstock.serve.pages import KEPT_PASSES, Ids, Pages
from penstock.serve.pooling import Pool
from penstock.serve.steps import Request, Rows, Step
from penstock.spec.plan import Plan

AGING_S = 30.0
_NO_IDS = np.empty(0, np.int32)


class QueueFull(BadRequest):
    """So many requests wait already that no more are taken. The client may try again later."""


class Ending(BadRequest):
    """No more requests are taken, however good they are: the server is ending. Another one may take them."""


def all_rows(plan: Plan) -> int:
    """How many rows of prompts a pass has room for. It is the `prompt_rows` of a service whose callers wait for whole
    answers, and not for the next token."""
    return plan.batches_per_pass * max(plan.chunk_rows, plan.batch_seqs)


class Scheduler:
    """Requests of one loaded plan. `prompt_rows`: the most rows of prompts in a pass beside rows of answers; alone they
    fill the plan's chunks. `queue`: the most requests that may wait. `ids(request, start, count)`: tokens of a
    request's prompt and answer, int32 [count]. `mixed`: the purpose of passes with rows of both. `stored(digest)`:
    whether a page lies elsewhere too, and `swaps`: whether pages are stored before they are given away, as for
    `Pages`."""

    def __init__(
        self, plan: Plan, prompt_rows: int, queue: int, ids: Callable[[int, int, int], Ids],
        stored: Callable[[bytes], bool] = lambda _: False, swaps: bool = False, mixed: str = passes.MIXED,
    ) -> None:  # fmt: skip
        self._plan, self._queue, self._ids = plan, queue, ids
        self.prompt_rows = max(1, prompt_rows)  # may be changed between two passes, as `planner.measured_pace` says
        self._mixed = mixed
        layout = Layout(plan)
        self._group, self._most_pages = layout.kv.page_group, layout.kv.pages_per_seq // layout.kv.page_group
        tokens, copies = plan.page_tokens * self._group, layout.kv.copies
        most_kept = KEPT_PASSES if plan.guests else None
        self.pages = Pages(layout.kv.pages // self._group, tokens, stored, swaps, copies, most_kept)
        self._free = set(range(plan.sequences))
        self._requests: dict[int, Request] = {}
        self._arrived = 0
        self._underway: list[tuple[Request, Rows]] = []  # the rows of the latest pass
        self.given_back = 0  # how often a request gave its pages back before its answer was whole

    def twin(self) -> Scheduler:
        """A scheduler in the same state, to foretell what this one will do. The tokens that its requests will say are
        made up."""

        prompts = {request.id: request.prompt for request in self._requests.values()}

        def ids(number: int, start: int, count: int) -> Ids:
            known = prompts.get(number, _NO_IDS)[start : start + count]
            return np.concatenate([known, np.full(count - len(known), -1 - number, np.int32)])

        # Prompts and the plan do not change, and the two functions belong to whoever made this scheduler.
        kept = [self._plan, self._ids, self.pages.stored, *prompts.values()]
        twin = copy.deepcopy(self, {id(each): each for each in kept})
        twin._ids = ids
        return twin

    @property
    def underway(self) -> list[Rows]:
        """The rows of the latest pass, until something says that it has ended."""
        return [rows for _, rows in self._underway]

    @property
    def said(self) -> dict[int, int]:
        """Request → tokens of its answer, with the one of the pass under way."""
        return {request.id: request.said for request in self._requests.values()}

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
        """How many waiting requests come before this one. 0 if it does not wait any more."""
        line = [other.id for other in self._in_order(now_s) if other.seq < 0]
        return line.index(request) if request in line else 0

    def submit(
        self, request: int, prompt: Ids, priority: int, now_s: float, owner: str = "", scores: bool = False,
        most: int | None = None, pools: Pool | None = None,
    ) -> None:  # fmt: skip
        """Takes a request with a prompt int32 [n].

        owner   who sent it. Owners share no pages
        scores  whether logits of every token of the prompt are wanted. Then all of them go through the model, in passes
                whose logits the plan has room for
        most    the most tokens of its answer, 1 or more. Give it only if no request will come after those that are
                here: then nothing is loaded behind the last pass
        pools   which hidden states of its prompt are wanted, in place of an answer

        Raises QueueFull."""
        if self.waiting - len(self._free) >= self._queue:
            raise QueueFull(f"{self.waiting} requests wait already, and {self._queue} may: try again later")
        assert request not in self._requests and 0 < len(prompt) <= self._plan.context
        self._requests[request] = Request(request, prompt, owner, priority, now_s, self._arrived, scores, most, pools)
        self._arrived += 1

    def end(self, requests: Collection[int]) -> None:
        """Ends requests, which are whole or which nobody wants any more. Their sequences and pages become free. Do not
        call it while a pass is under way that has rows of theirs."""
        self._settle()
        for number in requests:
            if (request := self._requests.pop(number, None)) is not None and request.seq >= 0:
                self._leave(request)

    def forget(self) -> None:
        """Forgets what pages hold, because the pass under way has failed or did not begin. Requests that have pages
        begin again."""
        for request, rows in self._underway:
            request.said -= rows.says
            if request.wants_scores:
                request.scored = min(request.scored, rows.start + rows.tokens - rows.logits)
        self._underway.clear()
        for request in self._requests.values():
            if request.table is not None:
                self.pages.drop(request.table)
                request.table = None
                self._leave(request)
        self.pages.forget()

    def next(self, now_s: float) -> Step | None:
        """The next pass; None if no request wants one. Between two calls the caller runs the pass, and passes every
        request that ended in it to `end`."""
        self._settle()
        self.pages.tick()
        order = self._in_order(now_s)
        rows = self._speaking(order)
        reading = self._reading(rows, order)
        if not rows and not reading:
            return None
        by_batch: list[list[Rows]] = [[] for _ in range(self._plan.batches_per_pass)]
        for each in sorted([*rows, *reading], key=lambda r: r.seq):
            by_batch[each.seq // self._plan.batch_seqs].append(each)
        batches = tuple(self._batch(i, members) for i, members in enumerate(by_batch) if members)
        for each in (*rows, *reading):
            request = self._requests[each.request]
            request.read = each.start + each.tokens
            request.scored = max(request.scored, request.read if request.wants_scores else 0)
            request.said += each.says
            self._underway.append((request, each))
        most = max(batch.total_rows for batch in batches)
        purpose = "decode" if not reading else self._mixed if rows else passes.purpose_of(self._plan, most)
        few = bool(reading) and most <= self._plan.asking_rows
        used = self.pages.top * self._group if self._plan.guests else None
        taken = Pass(purpose, batches, self._then(), few, used)
        moves = tuple(self.pages.moves)
        self.pages.moves.clear()
        return Step(taken, tuple(tuple(members) for members in by_batch if members), moves)

    def _then(self) -> Stream | None:
        """What the pass after this one will read, if no request comes, and none goes before its answer is whole."""
        requests = [each for each in self._requests.values() if not each.ends]
        if not requests:
            return None
        free = self._free or len(requests) < len(self._requests)
        if not any(request.reads and (request.table is not None or free) for request in requests):
            return passes.DECODE
        if any(request.table is not None and not request.reads for request in requests):
            few = self._plan.batch_seqs - 1 + self.prompt_rows <= self._plan.asking_rows
            return Stream(self._mixed, True, few)
        size, most, logits = self._plan.batch_seqs, max(self._plan.chunk_rows, self._plan.batch_seqs), False
        room = [most] * self._plan.batches_per_pass
        for request in requests:
            if request.table is not None:
                batch, left = request.seq // size, request.tokens - request.read
                logits |= (left <= room[batch] and not request.pools) or request.wants_scores
                room[batch] = max(0, room[batch] - left)
        if any(room) and any(request.table is None for request in requests):
            pools = all(request.pools for request in requests)
            begins = sum(request.tokens for request in requests if request.table is None)
            read = max(most - min(room), min(most, most - max(room) + begins))
            return Stream(passes.purpose_of(self._plan, read), not pools)  # one of these may begin, and end too
        read = most - min(room)
        return Stream(passes.purpose_of(self._plan, read), logits, read <= self._plan.asking_rows)

    def _settle(self) -> None:
        """Notes that the latest pass has ended, so that pages which it wrote can be shared."""
        for request, _ in self._underway:
            if request.table is not None:
                self.pages.wrote(request.table, request.read, partial(self._ids, request.id))
        self._underway.clear()

    def _speaking(self, order: Sequence[Request]) -> list[Rows]:
        """A row of the last token of each answer. An answer gets another page if it needs one. If no page is left, the
        least urgent request gives its pages back. The most urgent one always finds some, for the pools have pages for a
        context."""
        rows: list[Rows] = []
        for request in order:
            while request.table is not None and not request.reads:
                if request.read < len(request.table.pages) * self.pages.tokens or self.pages.extend(request.table):
                    rows.append(Rows(request.id, request.seq, request.read, 1, False, 1, True))
                    break
                self._leave(next(other for other in reversed(order) if other.seq >= 0))
                self.given_back += 1
        return rows

    def _leave(self, request: Request) -> None:
        """The request gives its sequence and its pages back."""
        if request.table is not None:
            self.pages.end(request.table, partial(self._ids, request.id))
        self._free.add(request.seq)
        request.seq, request.table, request.read, request.digests = -1, None, 0, ()

    def _reading(self, speaking: list[Rows], order: Sequence[Request]) -> list[Rows]:
        """Rows of prompts for the next pass."""
        size = self._plan.batch_seqs
        room = [max(self._plan.chunk_rows, size)] * self._plan.batches_per_pass
        logits = [self._plan.logits_rows] * self._plan.batches_per_pass
        for each in speaking:
            room[each.seq // size] -= 1
            logits[each.seq // size] -= 1
        left = self.prompt_rows if speaking else sum(room)
        rows: list[Rows] = []
        spoke = {each.request for each in speaking}
        admits, coming = True, set[bytes]()  # digests of pages that are being read
        for request in order:
            if left <= 0:
                break
            if request.seq < 0 and admits and (free := [s for s in self._free if room[s // size] > 0]):
                ids = self._begins(request)
                if not request.wants_all and self.pages.lacks(request.digests, ids) in coming:
                    continue
                admits = self._admit(request, ids, min(free, key=lambda seq: (-room[seq // size], seq)))
            if request.table is None or request.id in spoke:
                continue
            coming.update(request.digests[len(request.table.digests) :])
            seq, batch = request.seq, request.seq // size
            count = min(request.tokens - request.read, left, room[batch])
            silent = request.scored if request.wants_scores else request.tokens - 1  # tokens that want no logits
            silent_rows = max(0, silent - request.read)
            if not request.pools:  # rows without room for logits wait for the next pass
                count = min(count, silent_rows + logits[batch])
            if count <= 0:
                continue
            ends, wanted = request.read + count == request.tokens, 0 if request.pools else max(0, count - silent_rows)
            hidden = 0 if not request.pools else count if request.pools == "mean" else int(ends)
            room[batch], logits[batch], left = room[batch] - count, logits[batch] - wanted, left - count
            rows.append(Rows(request.id, seq, request.read, count, True, wanted, ends, hidden))
        return rows

    def _begins(self, request: Request) -> Ids:
        """All tokens that a request without pages has to read, int32 [n]."""
        ids = request.prompt if not request.said else self._ids(request.id, 0, request.tokens)
        request.digests = request.digests or self.pages.digests(request.owner, ids)
        return ids

    def _admit(self, request: Request, ids: Ids, seq: int) -> bool:
        """Gives the request a sequence and pages, if enough pages are left. One page is to be left for each request
        that may grow, so that none has to give its pages back at once. Requests that came later do not overtake this
        one."""
        tables = [other.table for other in self._requests.values() if other.table is not None]
        growing = sum(len(table.pages) < self._most_pages for table in tables)
        table = self.pages.begin(request.digests, ids, growing, reuse=not request.wants_all)
        if table is not None:
            self._free.remove(seq)
            request.seq, request.table, request.read = seq, table, table.written
        return table is not None

    def _batch(self, number: int, members: Sequence[Rows]) -> Batch:
        _, seqs, start, rows, _, wanted, _, hidden = zip(*members, strict=True)
        last = zip(accumulate(rows), wanted, strict=True)
        logits = tuple(row for end, count in last for row in range(end - count, end))
        pages = tuple(self._pages_of(each) for each in members)
        return Batch(number, seqs, start, rows, logits, (), pages, any(hidden))

    def _pages_of(self, rows: Rows) -> tuple[int, ...]:
        """The plan's pages of a request up to the end of its rows."""
        table, group = self._requests[rows.request].table, self._group
        assert table is not None
        pages = (page * group + i for page in table.pages for i in range(group))
        return tuple(islice(pages, -(-(rows.start + rows.tokens) // self._plan.page_tokens)))

    def _in_order(self, now_s: float) -> list[Request]:
        """All requests, the most urgent first."""

        def urgency(request: Request) -> tuple[float, int]:
            return (-request.priority - (now_s - request.arrived_s) // AGING_S, request.order)

        return sorted(self._requests.values(), key=urgency)
