"""Looks at all requests of a batch before the model is loaded: how long they are, what they need, and in which order
they are best answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.runtime.host import Progress
from penstock.serve.api.errors import error_body
from penstock.serve.batch.journal import Journal
from penstock.serve.batch.lines import Lines, LineTooLong
from penstock.serve.batch.requests import LineRequest, NoRequest, custom_id_of, read
from penstock.serve.guides import has_guides
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.format import PAGE_TOKENS

CONTEXT_CODE = "context_length_exceeded"
_MOST_KEPT_TOKENS = 1 << 20


class Todo(NamedTuple):
    """A line that is to be answered.

    number         its place among the file's lines
    answers        the number of answers, to all of its prompts together
    prompt_tokens  the sum over its answers of the tokens of the answered prompt
    output_tokens  the most tokens of one answer
    beginning      a hash of the tokens in the first KV page of its first prompt. Lines with the same hash can
                   follow each other, so that the page is computed once. -1 if the prompt ends within the page
    prompts        the number of its prompts
    shared_tokens  its first prompt begins with so many tokens of the first line with the same `beginning`; 0 for that
                   first line itself
    """

    number: int
    answers: int
    prompt_tokens: int
    output_tokens: int
    beginning: int
    prompts: int = 1
    shared_tokens: int = 0


@dataclass
class Survey:
    """`todo`: the lines that are to be answered, in the order in which they are. `longest`: tokens of the longest
    prompt with its answer. `schemas`, `scores`: whether an answer follows a JSON schema, and whether the log
    probabilities of a prompt are wanted."""

    todo: list[Todo] = field(default_factory=list)
    longest: int = 1
    schemas: bool = False
    scores: bool = False

    @property
    def answers(self) -> int:
        return sum(each.answers for each in self.todo)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt, on average."""
        return max(1, -(-sum(each.prompt_tokens for each in self.todo) // max(1, self.answers)))

    @property
    def output_tokens(self) -> int:
        """The most tokens of an answer, on average."""
        return max(1, -(-sum(each.output_tokens * each.answers for each in self.todo) // max(1, self.answers)))


class AnswerJournal(Protocol):
    """A place where answers are written down: a file, or a list on its way to one."""

    def id_of(self, number: int) -> str:
        """The id of a line's answer."""

    def add(self, number: int, custom_id: str | None, response: Any, error: Any = None) -> None:
        """Adds a line's answer. Raises StorageFailed."""


def survey(
    lines: Lines, journal: Journal, names: Sequence[str], tokenizer: Tokenizer, most_tokens: int, context: int,
    on_progress: Progress | None = None,
) -> Survey:  # fmt: skip
    """Reads every line that has no answer yet. Lines that cannot be answered get their error at once.

    `names`: by which lines may call the model. `most_tokens`: of an answer whose line names no length. `context`: the
    most tokens of a prompt. Raises StorageFailed, and BadRequest where every line asks for another model."""
    surveyed, seen, beginnings = Survey(), set[int](), _Beginnings()
    others: dict[str, int] = {}
    refused: list[tuple[int, str, str, str | None]] = []  # line, code, message, custom_id
    for number in range(len(lines)):
        if on_progress is not None:
            on_progress("reading requests, lines", number, len(lines))
        try:
            text = lines.text(number)
            custom_id = custom_id_of(text)
            twice = custom_id is not None and hash(custom_id) in seen
            seen.add(hash(custom_id))
            if number in journal.done:
                continue
            if twice:
                raise NoRequest("invalid_line", "an earlier line has the same custom_id", custom_id)
            request = read(text, names, tokenizer)
            todo = _todo(number, request, surveyed, tokenizer.generation_config, most_tokens, context)
            surveyed.todo.append(todo._replace(shared_tokens=beginnings.shared(todo.beginning, request.prompts[0])))
        except NoRequest as error:
            if error.code == "model_not_found":
                others[error.message] = others.get(error.message, 0) + 1
            refused.append((number, error.code, error.message, error.custom_id))
        except LineTooLong as error:
            if number not in journal.done:
                refused.append((number, "invalid_line", error.message, None))
    if refused and not surveyed.todo and not journal.done and sum(others.values()) == len(lines):
        raise BadRequest(f"every line asks for another model: {next(iter(others))} (--name NAME: what lines call it)")
    if surveyed.schemas and not has_guides():
        raise BadRequest(
            "lines ask for answers by a JSON schema, which takes llguidance: pip install 'penstock[serve]'"
        )
    for number, code, message, custom_id in refused:
        refuse(journal, number, NoRequest(code, message, custom_id))
    surveyed.todo = ordered(surveyed.todo)
    return surveyed


def refuse(journal: AnswerJournal, number: int, error: NoRequest) -> None:
    """Writes down why a line has no answer: as the server would have answered, or, if the line is no request at all, as
    an error alone. Raises StorageFailed."""
    if error.code == "invalid_line":
        journal.add(number, error.custom_id, None, {"code": error.code, "message": error.message})
        return
    status = 404 if error.code == "model_not_found" else 400
    body = error_body("", 400, error.message, "invalid_request_error", error.code)
    journal.add(number, error.custom_id, response(journal, number, status, body))


def response(journal: AnswerJournal, number: int, status: int, body: Any) -> dict[str, Any]:
    """What a server would have answered to a line."""
    return {"status_code": status, "request_id": journal.id_of(number), "body": body}


def ordered(todo: Sequence[Todo]) -> list[Todo]:
    """The lines in the order in which they are answered. Lines that begin alike follow each other, so that their
    beginning is read once. The longest come first, so that short answers are left at the end, when places stay
    empty."""
    longest: dict[int, int] = {}
    for each in todo:
        longest[each.beginning] = max(longest.get(each.beginning, 0), _length(each))
    return sorted(todo, key=lambda each: (-longest[each.beginning], each.beginning, -_length(each), each.number))


def _length(todo: Todo) -> int:
    return todo.prompt_tokens + todo.answers * todo.output_tokens


def _todo(
    number: int, request: LineRequest, so_far: Survey, generation_config: dict[str, Any], most_tokens: int, context: int
) -> Todo:
    """The work of a line. `so_far`: the survey, which this line is added to. Raises NoRequest."""
    try:
        params = request.params(generation_config, most_tokens)
    except BadRequest as error:
        raise NoRequest("invalid_request", error.message, request.custom_id) from None
    longest = max(map(len, request.prompts))
    if longest > context:
        message = f"the prompt has {longest} tokens, and the context {context}"
        raise NoRequest(CONTEXT_CODE, message, request.custom_id)
    so_far.longest = max(so_far.longest, min(context, longest + params.max_tokens))
    so_far.schemas |= params.rule is not None
    so_far.scores |= params.prompt_logprobs is not None
    first = request.prompts[0]
    # A prompt that ends within its first page shares nothing.
    beginning = hash(tuple(first[:PAGE_TOKENS])) if len(first) > PAGE_TOKENS else -1
    answers = len(request.prompts) * request.count
    prompt_tokens = request.count * sum(map(len, request.prompts))
    output_tokens = max(1, min(params.max_tokens, context - longest + 1))
    return Todo(number, answers, prompt_tokens, output_tokens, beginning, len(request.prompts))


class _Beginnings:
    """How many tokens of a prompt the first one has too that began alike. Of a million tokens of such first prompts;
    those beyond share nothing that is known here."""

    def __init__(self) -> None:
        self._first: dict[int, NDArray[np.int32]] = {}  # beginning → the first prompt, [n]
        self._kept_tokens = 0

    def shared(self, beginning: int, ids: Sequence[int]) -> int:
        """`beginning`: -1 for a prompt that shares nothing."""
        if beginning == -1:
            return 0
        try:
            prompt = np.array(ids, np.int32)
        except OverflowError:  # ids of no model: the line gets its error when it is asked
            return 0
        if beginning not in self._first:
            if self._kept_tokens + len(prompt) <= _MOST_KEPT_TOKENS:
                self._first[beginning] = prompt
                self._kept_tokens += len(prompt)
            return 0
        both = min(len(prompt), len(self._first[beginning]))
        differ = np.flatnonzero(prompt[:both] != self._first[beginning][:both])
        return int(differ[0]) if len(differ) else both
