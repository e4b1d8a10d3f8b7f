"""Answers the lines of a batch by one engine, as many at once as its plan has room for.

A line is read again and tokenized when its turn comes, so that a few are in memory at a time. Its answer goes into the
journal as soon as it is whole. A place that an answer leaves is taken by the next one at the next pass.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from penstock.errors import BadRequest
from penstock.serve.api.embeddings import Vectors, openai_body
from penstock.serve.api.shape import Shape, head_of
from penstock.serve.api.wire import EmbeddingRequest
from penstock.serve.batch.foretelling import AHEAD, Foretelling
from penstock.serve.batch.requests import NoRequest, echoed, read
from penstock.serve.batch.survey import AnswerJournal, Survey, Todo, refuse, response
from penstock.serve.counts import TokenCounts
from penstock.serve.decode_clock import DecodeClock
from penstock.serve.engine import Engine
from penstock.serve.generation import Generation, used
from penstock.serve.pooling import NOT_MADE, Pooling, chosen_pooling, require_dimensions, stacked
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.told import AnswerPiece, Cancelled, Ended, Failed, Told
from penstock.serve.tools.reading import Reading
from penstock.spec.places import Lane

_AHEAD_TOKENS = 1 << 18  # of prompts that wait or are answered, beyond one for each place: each takes 40 bytes
_MOST_NUMBERS = 1 << 20  # of a line's embeddings: 32 bytes each while they are written
_LOOK_S = 0.5  # between two looks at how far it is


class Requests(Protocol):
    """A source of lines."""

    def text(self, number: int) -> bytes:
        """A line's bytes. Raises BadRequest if the line has changed since it was surveyed."""


@dataclass
class _OpenLine:
    """A line that is being answered. `echoed`: the text before each answer. `whole`: its whole answers so far, by
    place. `reading`: takes the answers of a chat apart; None for texts. `vectors`: the embeddings that it asks for."""

    todo: Todo
    custom_id: str
    reading: Callable[[], Reading] | None
    vectors: EmbeddingRequest | None
    count: int
    prompt_tokens: int
    echoed: tuple[str, ...]
    numbers: list[int] = field(default_factory=list)
    whole: dict[int, Generation] = field(default_factory=dict)


@dataclass
class Done:
    """What a run did. `seconds`: from the first request to the last answer. `failed`: lines that got an error.
    `foretold`: the promise for it."""

    clock: DecodeClock
    foretold: Foretelling
    lines: int = 0
    failed: int = 0
    answers: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    seconds: float = 0.0
    bytes_moved: dict[Lane, int] = field(default_factory=dict)

    @property
    def generation_tokens_per_s(self) -> float:
        """Tokens of answers by the whole time, prompts included."""
        return self.tokens.output / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second in passes without rows of prompts; 0 if there were no such passes."""
        return self.clock.tokens / self.clock.seconds if self.clock.seconds else 0.0


class BatchRun:
    """`names`: names by which lines may call the model. Answers bear the first one. `most_tokens`: of an answer whose
    line names no length. `foretold`: the promise for the lines that `run` gets. `on_progress`: is told of `Done` twice
    a second."""

    def __init__(
        self, engine: Engine, lines: Requests, journal: AnswerJournal, names: Sequence[str], most_tokens: int,
        foretold: Foretelling, on_progress: Callable[[Done], None] | None = None,
    ) -> None:  # fmt: skip
        self._foretold = foretold
        self._engine, self._lines, self._journal = engine, lines, journal
        self._names, self._most_tokens, self._on_progress = names, most_tokens, on_progress
        self._told: queue.SimpleQueue[tuple[int, int, Told]] = queue.SimpleQueue()
        self._open: dict[int, _OpenLine] = {}
        self._waiting = self._ahead_tokens = 0  # answers that are not whole; tokens of prompts of lines that are open

    def run(self, surveyed: Survey) -> Done:
        """Answers all lines that the survey has found. What was answered before an error is in the journal. Raises
        StorageFailed, DamagedModel and DeviceFailed."""
        engine, before = self._engine, self._engine.session.bytes_moved()
        done = Done(DecodeClock(engine.session), self._foretold)
        places = engine.plan.at_once(engine.ask.batch, engine.ask.sequence_tokens)
        left = list(reversed(surveyed.todo))
        start_s, told_s = time.perf_counter(), 0.0
        with closing(Service.of_whole_answers(engine, on_pass=done.clock.hear)) as service:
            while left or self._open:
                while left and self._has_room(places):
                    self._submit(service, left.pop(), done)
                if self._open:
                    self._hear(service, done)
                done.seconds = time.perf_counter() - start_s
                if self._on_progress is not None and done.seconds - told_s > _LOOK_S:
                    told_s = done.seconds
                    done.bytes_moved = self._moved(before)
                    self._on_progress(done)
        engine.session.drain()
        done.bytes_moved = self._moved(before)
        return done

    def _moved(self, before: Mapping[Lane, int]) -> dict[Lane, int]:
        return {lane: count - before.get(lane, 0) for lane, count in self._engine.session.bytes_moved().items()}

    def _has_room(self, places: int) -> bool:
        """Whether another line is to be asked for."""
        waits = self._waiting < 2 * places + AHEAD
        return waits and (self._waiting < places or self._ahead_tokens < _AHEAD_TOKENS)

    def _submit(self, service: Service, todo: Todo, done: Done) -> None:
        """Submits a line. An error that is the line's own goes into the journal."""
        engine = self._engine
        try:
            request = read(self._lines.text(todo.number), self._names, engine.tokenizer)
        except NoRequest as error:  # the survey found it right, so little memory must be left
            self._fail(service, todo, [], error, done)
            return
        body, tokens = request.body, sum(map(len, request.prompts))
        vectors = body if isinstance(body, EmbeddingRequest) else None
        opened = _OpenLine(
            todo, request.custom_id, None, vectors, request.count, tokens, echoed(request, engine.tokenizer)
        )
        try:
            params: SamplingParams | Pooling
            if isinstance(body, EmbeddingRequest):
                params = self._pooling(body, len(request.prompts))
            else:
                params = request.params(engine.tokenizer.generation_config, self._most_tokens)
            if request.chat is not None:
                assert isinstance(params, SamplingParams)
                opened.reading = partial(request.chat.reading, params)
            if isinstance(params, SamplingParams) and params.rule is not None:
                engine.guides.check(params.rule)
            for prompt in request.prompts:
                for i in range(request.count):
                    hear = partial(self._put, todo.number, len(opened.numbers))
                    taken = service.submit(prompt, params.nth(i), hear, body.priority, streams=False)
                    opened.numbers.append(taken)
        except BadRequest as error:
            why = NoRequest("invalid_request", error.message, request.custom_id)
            self._fail(service, todo, opened.numbers, why, done)
            return
        self._open[todo.number] = opened
        self._waiting += len(opened.numbers)
        self._ahead_tokens += todo.prompt_tokens

    def _pooling(self, body: EmbeddingRequest, inputs: int) -> Pooling:
        """How the texts of a line are pooled. Raises BadRequest where their vectors would take much memory."""
        has = self._engine.plan.target.spec.d_embed
        width = require_dimensions(body.dimensions, has)
        if inputs * width > _MOST_NUMBERS:
            raise BadRequest(f"a line may have {_MOST_NUMBERS // width} inputs for this model, not {inputs}")
        return chosen_pooling(body.pooling, self._engine.pooling)

    def _put(self, number: int, place: int, what: Told) -> None:
        if not isinstance(what, AnswerPiece):
            self._told.put((number, place, what))

    def _hear(self, service: Service, done: Done) -> None:
        """Waits until an answer is whole, or until it is time to report progress. Raises an error that ended all
        answers."""
        try:
            number, place, what = self._told.get(timeout=_LOOK_S)
        except queue.Empty:
            return
        opened = self._open.get(number)
        if opened is None:  # another answer of its line has failed
            return
        if isinstance(what, Ended):
            opened.whole[place] = what.answer
            self._waiting -= 1
            if len(opened.whole) == len(opened.numbers):
                self._forget(opened)
                self._keep(opened, done)
        elif isinstance(what, Failed) and isinstance(what.error, BadRequest):
            self._waiting -= len(opened.numbers) - len(opened.whole)
            self._forget(opened)
            why = NoRequest("invalid_request", what.error.message, opened.custom_id)
            self._fail(service, opened.todo, opened.numbers, why, done)
        elif isinstance(what, Failed):
            raise what.error
        elif isinstance(what, Cancelled):
            raise BadRequest("the batch was cancelled")

    def _forget(self, opened: _OpenLine) -> None:
        del self._open[opened.todo.number]
        self._ahead_tokens -= opened.todo.prompt_tokens

    def _keep(self, opened: _OpenLine, done: Done) -> None:
        """Writes a line's answers into the journal."""
        number, tokenizer = opened.todo.number, self._engine.tokenizer
        answers = [opened.whole[i] for i in range(len(opened.whole))]
        if opened.vectors is not None:
            self._keep_vectors(opened, opened.vectors, answers, done)
            return
        kind, prefix = ("text_completion", "cmpl") if opened.reading is None else ("chat.completion", "chatcmpl")
        head = head_of(prefix, self._journal.id_of(number), self._names[0])
        tokens = used(opened.prompt_tokens, answers, opened.count)
        body = Shape(kind, head, tokenizer, opened.reading or Reading, opened.echoed).whole(answers, tokens)
        self._add(opened, body, answers, done)
        done.tokens.output += tokens.output

    def _keep_vectors(self, opened: _OpenLine, asked: EmbeddingRequest, answers: list[Generation], done: Done) -> None:
        width = require_dimensions(asked.dimensions, self._engine.plan.target.spec.d_embed)
        vectors = list(stacked(answers, True, width))
        note = NOT_MADE if self._engine.pooling is None else None
        embedded = Vectors(self._names[0], vectors, opened.prompt_tokens, note)
        self._add(opened, openai_body(embedded, asked.encoding_format == "base64"), answers, done)

    def _add(self, opened: _OpenLine, body: dict[str, Any], answers: Sequence[Generation], done: Done) -> None:
        number = opened.todo.number
        self._journal.add(number, opened.custom_id, response(self._journal, number, 200, body))
        done.lines += 1
        done.answers += len(answers)
        done.tokens.prompt += sum(answer.prompt_tokens for answer in answers)
        done.tokens.cached += sum(answer.cached_tokens for answer in answers)

    def _fail(self, service: Service, todo: Todo, numbers: Sequence[int], why: NoRequest, done: Done) -> None:
        for number in numbers:
            service.cancel(number)
        refuse(self._journal, todo.number, why)
        done.lines += 1
        done.failed += 1
