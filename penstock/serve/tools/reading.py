"""Takes an answer apart while it comes: what is said, what is thought, and calls of tools.

Answers with tools follow a grammar (`grammar`), so their calls are written exactly as their family writes them. If an
answer is cut by its length, its last call is incomplete. Text that looked like the beginning of a call and is none
counts as said. White space between text and a call belongs to neither: it is held back until more text comes, or until
no call can come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.serve.tools.writing import THINK, THOUGHT, Writing

_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True)
class _Text:
    """A part of an answer. Its class says what the text is."""

    text: str


class Said(_Text):
    """For the reader."""


class Thought(_Text):
    """From the model's thoughts."""


class CallBegun(_Text):
    """The name of a tool, whose call begins. The arguments follow."""


class CallMore(_Text):
    """More of the arguments of the call that began last. Together they are JSON."""


@dataclass
class ToolCall:
    """A whole call: the tool's name, and arguments as JSON."""

    name: str
    arguments: str = ""

    def arguments_object(self) -> dict[str, Any]:
        """The arguments, for clients that take no text. A call that was cut by the answer's length has none."""
        try:
            parsed = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}


@dataclass
class Collected:
    """All parts of an answer."""

    said: str = ""
    thought: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[AnswerPart]) -> Collected:
        for part in parts:
            match part:
                case Said(text):
                    self.said += text
                case Thought(text):
                    self.thought += text
                case CallBegun(name):
                    self.calls.append(ToolCall(name))
                case CallMore(arguments):
                    self.calls[-1].arguments += arguments
        return self


AnswerPart = Said | Thought | CallBegun | CallMore
_Steps = Generator[None, str, None]


class _NoMoreText(Exception):
    """No more text comes."""


class Reading:
    """Takes one answer apart.

    writing   how the answer may call tools; None if it may not
    thinks    the model's family marks its thoughts
    thinking  the prompt has opened the thoughts, so the answer begins within them
    """

    def __init__(self, writing: Writing | None = None, thinks: bool = False, thinking: bool = False) -> None:
        self._writing, self._text, self._parts = writing, "", list[AnswerPart]()
        self.calls = 0
        self._space = ""  # that was said last, and is held back
        self._in_calls = False  # behind the mark that calls begin with
        channels = writing is not None and writing.channels
        self._steps: _Steps | None = self._channels() if channels else self._plain(thinks, thinking)
        self._run(lambda steps: next(steps))

    def push(self, text: str) -> list[AnswerPart]:
        """Takes more text. Returns the parts that it makes certain."""
        return self._run(lambda steps: steps.send(text)) if text else []

    def whole(self, text: str) -> Collected:
        """All parts of an answer whose whole text is known."""
        return Collected().add([*self.push(text), *self.finish()])

    def finish(self) -> list[AnswerPart]:
        """The parts that become certain because no more text comes."""
        rest = self._run(lambda steps: steps.throw(_NoMoreText()))
        return [*rest, Said(self._space)] if self._space and not self.calls else rest

    def _run(self, step: Callable[[_Steps], object]) -> list[AnswerPart]:
        if self._steps is not None:
            try:
                step(self._steps)
            except (StopIteration, _NoMoreText):
                self._steps = None
        parts, self._parts = self._parts, []
        return parts if self._writing is None else [kept for part in parts for kept in self._without_space(part)]

    def _without_space(self, part: AnswerPart) -> Sequence[AnswerPart]:
        """A part without the white space at the end of what it says, and with the white space held back before."""
        if not isinstance(part, Said):
            return (part,)
        text = self._space + part.text
        self._space = text[len(text.rstrip()) :]
        return (Said(text.rstrip()),) if text.rstrip() else ()

    def _plain(self, thinks: bool, thinking: bool) -> _Steps:
        if thinks and not thinking:
            yield from self._skip_spaces()
            thinking = yield from self._may_begin(THINK)
        if thinking:
            yield from self._until((THOUGHT,), Thought)
            yield from self._skip_spaces()
        writing = self._writing
        if writing is None:
            yield from self._until((), Said)
            return
        if writing.lead:
            yield from self._may_begin(writing.lead)
        if writing.head:
            yield from self._until((writing.head,), Said)
            self._in_calls = True
            yield from self._may_begin(" ")  # SentencePiece's, behind a special token
            yield from self._may_begin(writing.open)
        elif not (yield from self._begins(writing.before)):
            yield from self._until((), Said)
            return
        while (yield from self._call(writing)):
            if writing.between is None or not (yield from self._may_begin(writing.between)):
                break
        yield from self._may_begin(writing.close)
        yield from self._until((), Said)

    def _channels(self) -> _Steps:
        """gpt-oss: `<|channel|>NAME<|message|>TEXT<|end|>` with `<|start|>assistant` between."""
        begun = False
        while True:
            try:
                while "<|message|>" not in self._text:
                    yield from self._more()
            except _NoMoreText:
                if not begun:  # no channel at all
                    self._say(Said, len(self._text))
                raise
            begun = True
            head, _, self._text = self._text.partition("<|message|>")
            if "to=functions." in head:
                self._begin(head.partition("to=functions.")[2].partition("<|")[0].strip())
                yield from self._json()
            else:
                final = "final" in head.rpartition("<|channel|>")[2]
                yield from self._until(_HARMONY_ENDS, Said if final else Thought)

    def _begin(self, name: str) -> None:
        self.calls += 1
        self._parts.append(CallBegun(name))

    def _call(self, writing: Writing) -> Generator[None, str, bool]:
        """One call. False where there is none here: then what is here is said."""
        if not (yield from self._may_begin(writing.before)):
            return False
        while writing.middle not in self._text:
            yield from self._more()
        name, _, self._text = self._text.partition(writing.middle)
        self._begin(name)
        yield from self._json()
        yield from self._may_begin(writing.after)
        return True

    def _json(self) -> _Steps:
        """An object of JSON, to its last brace."""
        depth, quoted, escaped = 0, False, False
        while True:
            for i, c in enumerate(self._text):
                if quoted:
                    quoted, escaped = escaped or c != '"', not escaped and c == "\\"
                elif c == '"':
                    quoted = True
                elif c in "{[":
                    depth += 1
                elif c in "}]":
                    depth -= 1
                    if not depth:
                        self._say(CallMore, i + 1)
                        return
            self._say(CallMore, len(self._text))
            yield from self._more()

    def _until(self, marks: tuple[str, ...], part: type[Said] | type[Thought]) -> _Steps:
        """Text up to the first of some marks, which is dropped. Only what may be the beginning of one is held back."""
        try:
            while True:
                places = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
                if places:
                    at, mark = min(places)
                    self._say(part, at)
                    self._text = self._text[len(mark) :]
                    return
                held = max((_overlap(self._text, mark) for mark in marks), default=0)
                self._say(part, len(self._text) - held)
                yield from self._more()
        except _NoMoreText:
            self._say(part, len(self._text))
            raise

    def _begins(self, literal: str) -> Generator[None, str, bool]:
        """Whether the text begins with this. Waits until that is certain, and takes nothing. Where the answer ends
        meanwhile, what came is said, but for the beginning of a call."""
        try:
            while len(self._text) < len(literal) and literal.startswith(self._text):
                yield from self._more()
        except _NoMoreText:
            if not self._in_calls:
                self._say(Said, len(self._text))
            raise
        return self._text.startswith(literal)

    def _may_begin(self, literal: str) -> Generator[None, str, bool]:
        """Takes this text if it comes next."""
        if not (begins := bool(literal) and (yield from self._begins(literal))):
            return False
        self._text = self._text[len(literal) :]
        return begins

    def _skip_spaces(self) -> _Steps:
        while not (rest := self._text.lstrip()):
            self._text = ""
            yield from self._more()
        self._text = rest

    def _say(self, part: type[Said] | type[Thought] | type[CallMore], count: int) -> None:
        text, self._text = self._text[:count], self._text[count:]
        if text:
            self._parts.append(part(text))

    def _more(self) -> _Steps:
        """Waits for more text."""
        self._text += yield


def _overlap(text: str, mark: str) -> int:
    """The longest end of the text that may be the beginning of the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
