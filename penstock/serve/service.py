"""Answers the requests of many threads together: one thread steps the model, as `Scheduler` says.

A request is submitted with a function that is told what happens to it: text as it becomes certain, then the end. A
request that is cancelled leaves at the next pass. A request that fails, fails alone. If a pass fails, all requests with
rows in it fail. Requests that wait go on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from penstock.graph.passes import MIXED
from penstock.planner.measured_pace import MeasuredPace
from penstock.planner.pass_times import PassTimes
from penstock.serve.answering import checked_ids
from penstock.serve.counts import Counts, Tally
from penstock.serve.engine import Engine
from penstock.serve.failures import Failures
from penstock.serve.foretold import Newcomer, newcomer
from penstock.serve.generation import Generation
from penstock.serve.keeper import Keeper
from penstock.serve.kv_store import KvStore
from penstock.serve.open_requests import OpenRequest, OpenRequests, failure
from penstock.serve.pages import Move
from penstock.serve.pooling import Pooled, Pooling
from penstock.serve.reply import Reply
from penstock.serve.sampling import SamplingParams
from penstock.serve.scheduler import Ending, Scheduler, all_rows
from penstock.serve.steps import Rows, Step
from penstock.serve.told import AnswerPiece, Cancelled, Ended, Failed, Tell, Told, require_answer

MOST_REQUESTS = 1000  # beside which a newcomer's time is foretold
_SAVING_S = 10.0  # in which pages are still kept when the service ends


class Service:
    """Serves one loaded engine until `close`. While requests are here, the engine answers nobody else.

    `prompt_rows`: the most rows of prompts in a pass beside rows of answers, and `mixed`: the purpose of such a pass.
    `queue`: the most requests that wait. `store`: where pages are kept while nobody asks, and at the end; prompts go on
    from them. `swaps`: pages are also kept there before they are given to another request. `times`: of the plan's
    passes, if they were asked before. `follows`: what passes take corrects the rows of prompts (`MeasuredPace`).
    `threaded`: without it `generate` takes the passes in its caller's thread, and nobody else may ask. `on_pass`: is
    called with each pass after its tokens were handed out. `failures`: notes errors of passes."""

    def __init__(
        self,
        engine: Engine,
        *,
        prompt_rows: int,
        queue: int,
        store: KvStore | None = None,
        swaps: bool = False,
        times: PassTimes | None = None,
        mixed: str = MIXED,
        follows: bool = False,
        threaded: bool = True,
        on_pass: Callable[[Step], None] | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.engine, self._threaded, self._on_pass = engine, threaded, on_pass
        self.failures = failures or Failures()
        self._open, self._keeper = OpenRequests(engine.tokenizer), Keeper(engine.session, store)
        swaps = swaps and store is not None
        self._scheduler = Scheduler(
            engine.plan, prompt_rows, queue, self._open.known, self._keeper.stored, swaps, mixed
        )
        self._changed = threading.Condition()  # guards all that follows, and the scheduler
        self._next_id = 0
        self._refuses: str | None = None  # why no more requests are taken
        self._tally = Tally()
        self._passes = engine.session.passes  # of the session, when the service took the latest one
        self._free_s = 0.0  # when the thread had told of its latest pass, or began to look for one
        self._saves_until_s = inf
        self.pass_times = times or PassTimes(engine.plan, engine.machine, mixed)
        self._pace = MeasuredPace(engine.plan, prompt_rows) if follows else None
        self._thread: threading.Thread | None = None  # lives while requests are here
        self._at_end: Callable[[], None] = lambda: None  # what the thread calls last

    @property
    def counts(self) -> Counts:
        with self._changed:
            return self._tally.with_work(self._scheduler)

    @property
    def prompt_rows(self) -> int:
        """The most rows of prompts in a pass beside rows of answers, as it is now."""
        return self._scheduler.prompt_rows

    @property
    def pace_reason(self) -> str | None:
        """Why `prompt_rows` is not what it was at first. None while it is."""
        return None if self._pace is None else self._pace.reason

    @property
    def free_sequences(self) -> int:
        """Sequences of the plan that nobody has."""
        with self._changed:
            return self._scheduler.free_sequences

    @classmethod
    def of_whole_answers(
        cls, engine: Engine, threaded: bool = True, on_pass: Callable[[Step], None] | None = None
    ) -> Service:
        """A service for callers who wait for whole answers, any number of them. Prompts are read in the plan's chunks,
        and by the executors for prefill."""
        rows = all_rows(engine.plan)
        return cls(engine, prompt_rows=rows, queue=1 << 60, mixed="prefill", threaded=threaded, on_pass=on_pass)

    def submit(
        self, prompt_ids: Sequence[int] | NDArray[np.int32], params: SamplingParams | Pooling, tell: Tell,
        priority: int = 0, owner: str = "", streams: bool = True,
    ) -> int:  # fmt: skip
        """Takes a request with a prompt, int32 [T] or a list, and returns its number. `tell` is called by the service's
        own thread, and must not wait. `params`: with `Pooling` it is for an embedding, and nothing is told before its
        end. `owner`: what a prompt leaves in memory is shared with prompts of the same owner. `streams`: whether text
        is wanted as soon as it is certain, and not only at the end.

        Raises BadRequest for prompts that are no ids of this model or do not fit the context; QueueFull; Ending after
        `refuse`."""
        engine = self.engine
        ids = checked_ids(prompt_ids, engine.plan)
        reply: Reply | Pooled
        scores, pools = False, None
        if isinstance(params, Pooling):
            reply, pools = Pooled(ids, params, engine.plan.context), params.pool
        else:
            about = {"batch": 1, "context": engine.plan.context}
            reply = Reply(engine.tokenizer, ids, params, **about, streams=streams, guide=engine.guide(params))
            scores = params.prompt_logprobs is not None
        most = None if self._threaded else max(1, reply.limit)
        now_s = time.perf_counter()
        with self._changed:
            if self._refuses is not None:
                raise Ending(self._refuses)
            number = self._next_id
            self._scheduler.submit(number, ids, priority, now_s, owner, scores, most, pools)
            self._next_id += 1
            self._open[number] = OpenRequest(reply, tell, priority, now_s, now_s)
            self._changed.notify_all()
            if self._thread is None and self._threaded:
                self._thread = threading.Thread(target=self._work, name="penstock-serve", daemon=True)
                self._thread.start()
        return number

    def cancel(self, number: int) -> None:
        """Cancels a request: it leaves at the next pass, waiting or not. To cancel one that has ended is no error."""
        with self._changed:
            if (request := self._open.get(number)) is not None:
                request.cancelled = True
                self._changed.notify_all()

    def place(self, number: int) -> int:
        """How many waiting requests come before this one."""
        with self._changed:
            return self._scheduler.place(number, time.perf_counter())

    def newcomer(self, prompt_tokens: int, output_tokens: int) -> Newcomer:
        """What a request would find if it came now, and each answer took all the tokens that it may. Raises QueueFull.
        Passes wait only while the scheduler is copied, which takes 70 µs a request. With more than MOST_REQUESTS here,
        only the place is told."""
        now_s = time.perf_counter()
        with self._changed:
            if len(self._open) > MOST_REQUESTS:
                return Newcomer(self._scheduler.waiting, None, None, None)
            twin = self._scheduler.twin()
            # An answer of no tokens has a pass that says one, too.
            left = {n: 0 if each.cancelled else max(1, each.reply.limit) for n, each in self._open.items()}
            left = {number: tokens - twin.said[number] for number, tokens in left.items()}
        return newcomer(twin, self.pass_times, left, prompt_tokens, output_tokens, now_s)

    def refuse(self, why: str) -> None:
        """Takes no more requests from now on. Requests that are here go on."""
        with self._changed:
            self._refuses = why

    def idle(self, within_s: float) -> bool:
        """Waits until no request is left, at most so many seconds. Returns whether none is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, within_s)

    def abandon(self) -> None:
        """Cancels all requests that are here."""
        with self._changed:
            for request in self._open.values():
                request.cancelled = True
            self._changed.notify_all()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Pooling | Sequence[SamplingParams]
    ) -> list[Generation]:
        """Waits for the answers to some prompts, in their order. `params`: of all, or of each. Threads that call it
        share passes. If one answer fails, the others are cancelled. Raises as `submit`, and the error that ended an
        answer; BadRequest where this thread holds an open stream of the engine, and after `close`."""
        self.engine.require_no_stream()
        told: queue.SimpleQueue[tuple[int, Told]] = queue.SimpleQueue()
        numbers: list[int] = []
        answers: dict[int, Generation] = {}

        def hear(i: int, what: Told) -> None:
            told.put((i, what))
            for number in numbers if isinstance(what, Failed) else ():
                self.cancel(number)

        try:
            each = [params] * len(prompts) if isinstance(params, SamplingParams | Pooling) else params
            for i, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                numbers.append(self.submit(prompt, one, partial(hear, i), streams=False))
            if not self._threaded:
                self._work()
            while len(answers) < len(numbers):
                i, what = told.get()
                require_answer(what)
                if isinstance(what, Ended):
                    answers[i] = what.answer
        finally:  # Ctrl-C too
            for number in numbers:
                self.cancel(number)
        return [answers[i] for i in range(len(numbers))]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """The answer to a prompt in pieces, as they become certain. It begins with the first piece that is asked for.
        Closing the iterator cancels it. Raises as `generate`."""
        self.engine.require_no_stream()
        told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        number = self.submit(prompt, params, told.put)
        try:
            while not isinstance(what := told.get(), Ended):
                require_answer(what)
                if isinstance(what, AnswerPiece) and what.text:
                    yield what.text
        finally:  # Ctrl-C too
            self.cancel(number)

    def close(self, why: str = "the server is ending") -> None:
        """Cancels the requests that are left, and returns when the last pass has ended. The engine is free again, and
        still open."""
        self.refuse(why)
        self.abandon()
        with self._changed:
            self._saves_until_s = time.perf_counter() + _SAVING_S
            self._changed.wait_for(lambda: self._thread is None)

    def leave(self, then: Callable[[], None]) -> None:
        """Cancels the requests that are left, and does not wait. `then` is called after the last pass, by the service's
        thread if it lives. Garbage collection may call this, in the middle of a pass of that thread too."""
        self.abandon()
        with self._changed:
            if self._thread is not None:
                self._at_end = then
                return
        then()

    # -- the service's own thread ---------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self.engine.held():
                if self.engine.session.passes != self._passes:
                    with self._changed:  # passes of others wrote over pages
                        self._scheduler.forget()
                try:
                    self._answer_all()
                except Exception as error:  # a mistake of ours, and still nobody may wait for ever
                    self._fail_all(error)
                self._passes = self.engine.session.passes
            with self._changed:
                if not self._open:
                    self._thread = None
                    self._changed.notify_all()
                    break
        self._at_end()

    def _answer_all(self) -> None:
        """Takes passes until no request is here, and then keeps pages until one comes."""
        self._free_s = time.perf_counter()
        while True:
            with self._changed:
                left = [number for number, request in self._open.items() if request.cancelled]
                self._scheduler.end(left)
                told = [(self._open.pop(number).tell, Cancelled(self._refuses)) for number in left]
                self._tally.cancelled += len(left)
                step = self._scheduler.next(time.perf_counter())
                self._changed.notify_all()
            for tell, what in told:
                tell(what)
            if step is not None:
                self._take(step)
            elif self._unsaved():
                self._save()
                self._free_s = time.perf_counter()
            else:
                return

    def _fail_all(self, error: Exception) -> None:
        """Ends all requests that are here with an error."""
        self.failures.note(error, self.engine.packs_again)
        with self._changed:
            self._scheduler.forget()
            self._scheduler.end(list(self._open))
            tells = [request.tell for request in self._open.values()]
            self._tally.failed += len(tells)
            self._open.clear()
            self._changed.notify_all()
        for tell in tells:
            tell(failure(error))

    def _unsaved(self) -> bool:
        """Whether a page is left to be stored, and time is left to do so: a service that ends stores pages for some
        seconds only."""
        in_time = time.perf_counter() < self._saves_until_s
        return self._keeper.saves and in_time and self._scheduler.pages.unsaved() is not None

    def _save(self) -> None:
        """Stores a page, if one is left to be stored."""
        if (unsaved := self._scheduler.pages.unsaved()) is not None:
            self._keeper.keep(*unsaved)
            self._scheduler.pages.saved(unsaved[1])

    def _move_pages(self, moves: Sequence[Move]) -> bool:
        """Moves pages as a pass asks for. False if a stored page is not what was stored: all requests begin again."""
        if not self._keeper.move(moves):
            with self._changed:
                self._scheduler.forget()
            return False
        return True

    def _take(self, step: Step) -> None:
        """Moves pages, runs a pass, and tells each request's client what came of it. If a stored page is gone, no pass
        runs, and all requests begin again without it."""
        session, start_s = self.engine.session, time.perf_counter()
        ended: dict[int, Told] = {}
        told: list[tuple[Tell, Told]] = []
        begin = [r for rows in step.rows for r in rows if not self._open[r.request].begun]
        try:
            if not self._move_pages(step.moves):
                self._free_s = time.perf_counter()
                return
            for r in begin:
                request = self._open[r.request]
                answer, request.begun = request.reply.answer, True
                answer.cached_tokens, answer.wait_s = r.start, start_s - request.arrived_s
            tokens = [np.concatenate([self._open.ids(r) for r in rows]) for rows in step.rows]
            logits_of_batches = session.step(step.taken, tokens)
        except Exception as error:  # whatever it is, nobody may wait for ever
            self.failures.note(error, self.engine.packs_again)
            ended = {r.request: failure(error) for rows in step.rows for r in rows}
            with self._changed:
                self._scheduler.forget()
            self._free_s = time.perf_counter()
        else:
            speaking: list[Rows] = []
            results = zip(step.rows, logits_of_batches, session.best, session.hidden, strict=True)
            for rows, logits, best, hidden in results:
                speaking += self._open.hear(rows, logits, best, hidden, ended)
            told = self._open.say(speaking, ended)
            self._note(step)
            if self._on_pass is not None:
                self._on_pass(step)
        taken_s = time.perf_counter() - start_s
        with self._changed:
            self._scheduler.end(ended)
            self._count(step, ended, sum(r.start for r in begin), taken_s)
            told += [(self._open.pop(number).tell, what) for number, what in ended.items()]
            self._changed.notify_all()
        for tell, what in told:
            tell(what)

    def _count(self, step: Step, ended: dict[int, Told], cached_tokens: int, taken_s: float) -> None:
        rows = [r for rows in step.rows for r in rows]
        failed = sum(isinstance(what, Failed) for what in ended.values())
        self._tally.failed += failed
        self._tally.answered += len(ended) - failed
        silent = sum(r.says and not self._open[r.request].reply.limit for r in rows)
        self._tally.take(step, silent, cached_tokens, taken_s)

    def _note(self, step: Step) -> None:
        """Notes how long a pass took, from the end of the pass before. So the time to tell clients and to choose the
        next pass is a part of it."""
        now_s = time.perf_counter()
        if (kind := step.kind) is not None:
            self.pass_times.note(*kind, now_s - self._free_s)
            if self._pace is not None and self._pace.note(*kind, now_s - self._free_s):
                with self._changed:
                    self._scheduler.prompt_rows = self._pace.rows
        self._free_s = now_s
