"""Answers the lines of a batch by one engine, as many at once as its plan has room for.

A line is read again and tokenized when its turn comes, so that a few are in memory at a time. Its answer goes into the
journal as soon as it is whole. A place that an answer leaves is taken by the next one at the next pass.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.errors import BadRequest
from penstock.serve.api.shape import Shape, head_of, usage_of
from penstock.serve.batch.journal import Journal
from penstock.serve.batch.lines import Lines
from penstock.serve.batch.requests import NoRequest, Request, echoed, read
from penstock.serve.batch.survey import Survey, Todo, refuse, response
from penstock.serve.decode_clock import DecodeClock
from penstock.serve.engine import Engine
from penstock.serve.generation import Generation
from penstock.serve.service import Service
from penstock.serve.told import Cancelled, Ended, Failed, Told

_AHEAD = 16  # lines that wait beside those that are answered, so that no place stays empty


@dataclass
class _Open:
    """A line that is being answered. `whole`: its answers so far, by their places."""

    todo: Todo
    request: Request
    numbers: list[int] = field(default_factory=list)
    whole: dict[int, Generation] = field(default_factory=dict)


@dataclass
class Done:
    """What a run did. `seconds`: from the first request to the last answer. `failed`: lines that got an error."""

    clock: DecodeClock
    predicted_s: float
    lines: int = 0
    failed: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    bytes_moved: dict[str, int] = field(default_factory=dict)

    @property
    def generation_tokens_per_s(self) -> float:
        """Tokens of answers by the whole time, prompts included."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """In passes without rows of prompts; 0 where there were none."""
        return self.clock.tokens / self.clock.seconds if self.clock.seconds else 0.0


def predicted_s(engine: Engine, answers: int) -> float:
    """Seconds for so many answers of the ask's lengths, as many at once as the plan has room for, block after block."""
    at_once = engine.plan.at_once(engine.ask.batch, engine.ask.prompt_tokens + engine.ask.output_tokens)
    return engine.prediction.total_s * answers / max(1, min(at_once, answers))


class Batch:
    """`names`: by which lines may call the model, the first of which answers bear. `most_tokens`: of an answer whose
    line names no length. `on_progress`: is told of `Done` after each line, and after each pass that only decoded."""

    def __init__(
        self, engine: Engine, lines: Lines, journal: Journal, names: Sequence[str], most_tokens: int,
        on_progress: Callable[[Done], None] | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._lines, self._journal = engine, lines, journal
        self._names, self._most_tokens, self._on_progress = names, most_tokens, on_progress
        self._told: queue.SimpleQueue[tuple[int, int, Told]] = queue.SimpleQueue()
        self._open: dict[int, _Open] = {}

    def run(self, found: Survey) -> Done:
        """Answers all lines that the survey has found. What was answered before an error is in the journal. Raises
        StorageFailed, DamagedModel and DeviceFailed."""
        engine, before = self._engine, self._engine.session.bytes_moved()
        done = Done(DecodeClock(engine.session), predicted_s(engine, found.answers))
        places = engine.plan.at_once(engine.ask.batch, engine.ask.prompt_tokens + engine.ask.output_tokens)
        left = list(reversed(found.todo))
        start_s = time.perf_counter()
        with closing(Service.of_whole_answers(engine, on_pass=done.clock.hear)) as service:
            while left or self._open:
                while left and sum(len(each.numbers) for each in self._open.values()) < 2 * places + _AHEAD:
                    self._submit(service, left.pop(), done)
                if not self._open:
                    continue
                self._hear(service, done)
                done.seconds = time.perf_counter() - start_s
                moved = engine.session.bytes_moved()
                done.bytes_moved = {lane: count - before.get(lane, 0) for lane, count in moved.items()}
                if self._on_progress is not None:
                    self._on_progress(done)
        engine.session.drain()
        return done

    def _submit(self, service: Service, todo: Todo, done: Done) -> None:
        """Asks for the answers to a line. What is wrong with it alone goes into the journal."""
        engine = self._engine
        request = read(self._lines.text(todo.number), self._names, engine.tokenizer)
        opened = _Open(todo, request)
        try:
            params = request.body.params(engine.tokenizer.generation_config, self._most_tokens)
            if params.json_schema is not None:
                engine.guides.check(params.json_schema)
            for prompt in request.prompts:
                for i in range(request.count):
                    hear = partial(self._put, todo.number, len(opened.numbers))
                    opened.numbers.append(service.submit(prompt, params.nth(i), hear, streams=False))
        except BadRequest as error:
            self._fail(service, opened, error, done)
            return
        self._open[todo.number] = opened

    def _put(self, number: int, place: int, what: Told) -> None:
        self._told.put((number, place, what))

    def _hear(self, service: Service, done: Done) -> None:
        """Waits until an answer is whole. Raises what failed all of them."""
        number, place, what = self._told.get()
        opened = self._open.get(number)
        if opened is None:  # another answer of its line has failed
            return
        if isinstance(what, Ended):
            opened.whole[place] = what.answer
            if len(opened.whole) == len(opened.numbers):
                del self._open[number]
                self._keep(opened, done)
        elif isinstance(what, Failed) and isinstance(what.error, BadRequest):
            del self._open[number]
            self._fail(service, opened, what.error, done)
        elif isinstance(what, Failed):
            raise what.error
        elif isinstance(what, Cancelled):
            raise BadRequest("the batch was cancelled")

    def _keep(self, opened: _Open, done: Done) -> None:
        """Writes a line's answers into the journal."""
        request, number, tokenizer = opened.request, opened.todo.number, self._engine.tokenizer
        answers = [opened.whole[i] for i in range(len(opened.whole))]
        kind, prefix = ("chat.completion", "chatcmpl") if request.chats else ("text_completion", "cmpl")
        head = head_of(prefix, self._journal.id_of(number), self._names[0])
        shape = Shape(kind, head, tokenizer, echoed(request, tokenizer))
        usage = usage_of(sum(map(len, request.prompts)), answers, request.count)
        choices = [shape.choice(i, answer) for i, answer in enumerate(answers)]
        body: dict[str, Any] = {**head, "object": kind, "choices": choices, "usage": usage}
        self._journal.add(number, request.custom_id, response(self._journal, number, 200, body))
        done.lines += 1
        done.answers += len(answers)
        done.prompt_tokens += sum(answer.prompt_tokens for answer in answers)
        done.cached_tokens += sum(answer.cached_tokens for answer in answers)
        done.output_tokens += usage["completion_tokens"]

    def _fail(self, service: Service, opened: _Open, error: BadRequest, done: Done) -> None:
        for number in opened.numbers:
            service.cancel(number)
        why = NoRequest("invalid_request", error.message, opened.request.custom_id)
        refuse(self._journal, opened.todo.number, why)
        done.lines += 1
        done.failed += 1
