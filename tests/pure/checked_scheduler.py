"""A scheduler beside a model of what it may do, which looks at every row of every pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from penstock.graph.arenas import with_arenas
from penstock.serve.pages import Copied, Ids, Save
from penstock.serve.pooling import Pool
from penstock.serve.scheduler import Scheduler
from penstock.serve.steps import Rows, Step
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from tests.plans import resident_plan
from tests.pure.machine import model
from tests.pure.written_pages import WrittenPages

SPEC, WEIGHTS = model(layers=2), parse_format("float32")


def plan(
    seqs: int = 4, batches: int = 1, chunk: int = 8, context: int = 64, page: int = 64, kv_pages: int = 0,
    logits: int = 1, guests: bool = False,
) -> Plan:  # fmt: skip
    """`kv_pages`: 0 for as many as give every sequence its whole context. `guests`: weights may lie in pages that
    nobody has; here it is enough to say so."""
    rows = {"chunk_rows": chunk, "logits_rows": max(seqs, logits), "context": context}
    made = resident_plan(SPEC, WEIGHTS, batch_seqs=seqs, batches_per_pass=batches, **rows)
    return with_arenas(replace(made, page_tokens=page, kv_pages=kv_pages, guests=guests))


class Checked:
    """A scheduler, and what its requests have had so far."""

    def __init__(
        self, made: Plan, prompt_rows: int, queue: int = 1000, stores: bool = False, swaps: bool = False
    ) -> None:
        # Digest → what a page held; where pages are stored elsewhere, one of them after each pass.
        self.stores, self.store = stores, dict[bytes, list[tuple[int, str]]]()
        self.plan = made
        self.scheduler = Scheduler(made, prompt_rows, queue, self.of, self.store.__contains__, swaps)
        if made.guests:
            self.scheduler.pages._most_kept = 3  # passes: runs are short here
        self.prompt_rows = prompt_rows
        self.prompts: dict[int, int] = {}
        self.ids: dict[int, list[int]] = {}  # of prompt and answer
        self.owners: dict[int, str] = {}
        self.held: dict[tuple[int, int], tuple[int, str]] = {}  # page, position in it → its token, and whose it is
        self.written = WrittenPages(made)
        self.cached = self.copies = 0
        self.answers: dict[int, int] = {}  # tokens that are still to come
        self.scored: set[int] = set()  # requests that want logits of every token of the prompt
        self.pooled: dict[int, Pool] = {}  # and such as want hidden states, in place of any logits
        self.heard: Counter[int] = Counter()  # tokens of their prompts whose logits were had
        self.had: Counter[int] = Counter()  # tokens of prompt and answer that went through the model
        self.seqs: dict[int, int] = {}
        self.now_s = 0.0

    def submit(
        self,
        prompt: int,
        answer: int,
        priority: int = 0,
        word: int | None = None,
        owner: str = "",
        scores: bool = False,
        pools: Pool | None = None,
    ) -> int:
        """A prompt of so many tokens, that begins like others with the same `word`; all say 0 as an answer. One that
        is pooled has no answer: it ends with its prompt."""
        number = len(self.prompts)
        ids = [number + 100] * prompt if word is None else [*[0] * (prompt - word % prompt), *[word] * (word % prompt)]
        scores, answer = scores and pools is None, answer if pools is None else 1
        self.scheduler.submit(number, np.array(ids, np.int32), priority, self.now_s, owner, scores, pools=pools)
        self.pooled |= {number: pools} if pools else {}
        self.scored |= {number} if scores else set()
        self.ids[number], self.owners[number] = ids, owner
        self.prompts[number], self.answers[number] = prompt, min(answer, self.plan.context - prompt + 1)
        return number

    def end(self, numbers: list[int]) -> None:
        self.scheduler.end(numbers)
        for n in numbers:
            self.answers.pop(n, None)
            self.seqs.pop(n, None)

    def of(self, request: int, start: int, count: int) -> Ids:
        return np.array(self.ids[request][start : start + count], np.int32)

    def step(self, fails: bool = False, loses: bool = False) -> Step | None:
        """A pass, every row of which is looked at. `fails`: it fails, and its requests with it. `loses`: what was
        stored is gone, so that a pass that wants it does not begin."""
        before = self.scheduler.given_back
        step = self.scheduler.next(self.now_s)
        if step is None:
            assert not self.answers
            return None
        self.now_s += 0.1
        rows = [r for members in step.rows for r in members]
        assert len({r.request for r in rows}) == len(rows) == len({r.seq for r in rows})
        if any(not r.reads for r in rows):
            assert sum(r.tokens for r in rows if r.reads) <= self.prompt_rows
        if not self._move(step, loses):
            return step
        self._look_at_batches(step)
        given_back = self.scheduler.given_back - before
        left = set(self.seqs) - {r.request for r in rows}
        for r in rows:
            self._look_at(r, given_back)
        # Every answer that lacks its last token alone goes on in every pass, but for those that gave their pages back.
        gone = {n for n in left if len(self.ids[n]) > self.prompts[n] and self.had[n] == len(self.ids[n]) - 1}
        assert len(gone) <= given_back
        if given_back:
            waits = {n for n in left if self.scheduler._requests[n].seq < 0}
            self.seqs = {n: seq for n, seq in self.seqs.items() if n not in waits}
        assert len(set(self.seqs.values())) == len(self.seqs)
        pages = self.scheduler.pages
        free, kept = set(pages._free), set(pages._kept)
        assert pages.had >= 0 and not free & kept and len(free) == len(pages._free)
        if fails:
            self.scheduler.forget()
            self.held.clear()
            self.end([r.request for r in rows])
            self.seqs.clear()
            assert not pages.had and not pages.kept
        else:
            self.end([n for n, more in self.answers.items() if more == 0])
        if self.stores and (found := pages.unsaved()) is not None:
            self.store[found[1]] = [self.held[found[0], i] for i in range(self.plan.page_tokens)]
            pages.saved(found[1])
        return step

    def _move(self, step: Step, loses: bool) -> bool:
        """Does what a pass has done with pages before it begins. False where the store has lost a page: all forget what
        they had."""
        size = self.plan.page_tokens
        for move in step.moves:
            if isinstance(move, Save):
                self.store[move.digest] = [self.held[move.page, i] for i in range(size)]
            elif isinstance(move, Copied):
                self.written.copied(move.page, move.source)
                there = {i: self.held[move.source, i] for i in range(size) if (move.source, i) in self.held}
                self.held |= {(move.page, i): held for i, held in there.items()}
                self.copies += 1
            elif loses:
                self.store.clear()
                self.scheduler.forget()
                self.held.clear()
                self.seqs.clear()
                return False
            else:
                self.written.restored(move.page)
                self.held |= {(move.page, i): held for i, held in enumerate(self.store[move.digest])}
        if self.plan.guests:  # weights lie there now
            used = step.taken.pages_used
            assert used is not None
            self.held = {at: held for at, held in self.held.items() if at[0] < used}
        self.written.take(step.taken)
        return True

    def _look_at_batches(self, step: Step) -> None:
        """What rows see is what their request said before; then their own tokens are in the pages too."""
        size = self.plan.page_tokens
        for batch, members in zip(step.taken.batches, step.rows, strict=True):
            assert batch.seqs == tuple(r.seq for r in members) == tuple(sorted(batch.seqs))
            assert batch.rows == tuple(r.tokens for r in members)
            assert batch.start == tuple(r.start for r in members)
            assert batch.total_rows <= max(self.plan.chunk_rows, self.plan.batch_seqs)
            first = 0
            wanted: list[int] = []
            for r in members:
                wanted += range(first + r.tokens - r.logits, first + r.tokens)
                first += r.tokens
            assert batch.hidden == any(r.hidden for r in members)
            assert batch.logits == tuple(wanted) and len(wanted) <= self.plan.logits_rows
            assert {r.seq // self.plan.batch_seqs for r in members} == {batch.id}
            for r, pages in zip(members, batch.pages, strict=True):
                ids, owner = self.ids[r.request], self.owners[r.request]
                for at in range(r.start):
                    assert self.held[pages[at // size], at % size] == (ids[at], owner)
        for batch, members in zip(step.taken.batches, step.rows, strict=True):
            for r, pages in zip(members, batch.pages, strict=True):
                for at in range(r.start, r.start + r.tokens):
                    self.held[pages[at // size], at % size] = (self.ids[r.request][at], self.owners[r.request])

    def _look_at(self, r: Rows, given_back: int) -> None:
        """A request's rows: they go on where it was, and give the logits or hidden states that it wants."""
        assert r.request in self.answers
        if r.request not in self.had:
            self.cached += r.start
        elif r.request in self.seqs and not given_back:  # else it may have given its pages back, and begin anew
            assert r.start == self.had[r.request] and r.seq == self.seqs[r.request]
        self.seqs[r.request] = r.seq
        said = len(self.ids[r.request]) - self.prompts[r.request]
        self.had[r.request] = end = r.start + r.tokens
        assert end <= len(self.ids[r.request]) and end <= self.plan.context
        assert r.says == (end == len(self.ids[r.request])) and (r.reads or said)
        heard = self.heard[r.request]
        if (pools := self.pooled.get(r.request)) is not None:
            assert r.hidden == (r.tokens if pools == "mean" else r.says) and not r.logits
            if pools == "mean":  # all of its rows, whatever comes between
                assert r.start <= heard
                self.heard[r.request] = max(end, heard)
                assert not r.says or self.heard[r.request] == self.prompts[r.request]
        elif r.request in self.scored and not said:  # logits of each token of its prompt once
            assert r.start <= heard and r.logits == max(0, end - heard)
            self.heard[r.request] = max(heard, end)
        else:
            assert r.logits == r.says
        self.answers[r.request] -= r.says
        self.ids[r.request] += [0] * r.says

    def run(self) -> None:
        """Steps until no request is left."""
        most = 3000
        while self.step() is not None:
            most -= 1
            assert most, "somebody waits for ever"
        assert self.scheduler.running == self.scheduler.waiting == self.scheduler.pages.had == 0
