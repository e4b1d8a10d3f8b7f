"""A grammar, in llguidance's Lark, that holds an answer to the calls that a family of models writes (`writing`).

Text before a call is free. From the first sign of a call on, names are those of the tools, and arguments follow their
schemas. A mark that is a token of its own is named by its id, so text can neither have it nor be taken for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from penstock.serve.schemas import STYLE
from penstock.serve.tools.asked import Tool, Tools
from penstock.serve.tools.writing import THINK, THOUGHT, Writing

_RULES = (
    r"TEXT: /(.|\n)*/",
    r"SPACES: /[ \n]{0,3}/",  # between thoughts and what follows them
    r"NO_BRACE: /([^{ \n](.|\n)*)?/",  # text of families whose calls begin with a brace
    r"NO_ANGLE: /([^< \n](.|\n)*)?/",  # text of families whose thoughts begin with an angle bracket
)


def grammar(writing: Writing, tools: Tools, marks: Mapping[str, int], thinks: bool, thinking: bool) -> str:
    """The grammar of an answer.

    marks     ids of the marks that are special tokens of this vocabulary
    thinks    the model may think first. A mark within thoughts begins no call
    thinking  the prompt has opened the thoughts, so the answer begins within them
    """
    literal = _Literals(writing, marks)
    names = [f"tool_{i}" for i in range(len(tools.offered))]
    rules = [_rule(name, tool, writing, literal) for name, tool in zip(names, tools.offered, strict=True)]
    more = f" ({literal(writing.between)} named)*" if writing.between is not None and tools.parallel else ""
    space = '" "?' if writing.head in marks else ""  # SentencePiece's, behind a special token
    calls = f"{space} {literal(writing.open)} named{more} {literal(writing.close)}"
    rules += [f"named: {' | '.join(names)}", f"calls: {calls}"]
    start = _channels(tools, literal) if writing.channels else _start(writing, tools, literal, thinks, thinking)
    return "\n".join([*start, *rules, *_RULES])


def _start(writing: Writing, tools: Tools, literal: _Literals, thinks: bool, thinking: bool) -> list[str]:
    if thinking:
        after = _after(writing, tools, literal, "SPACES ")
        return [f"start: thought ({after})", *_thought(literal), *_to_call(writing, literal)]
    if not thinks:
        return [f"start: {_after(writing, tools, literal)}", *_to_call(writing, literal)]
    opened = f"SPACES {literal(THINK)} thought ({_after(writing, tools, literal, 'SPACES ')})"
    if literal(THINK).startswith("<["):
        without = _after(writing, tools, literal)
    else:  # the mark is plain text: an answer that begins with it must be a thought, and nothing else
        without = _at_once(writing, tools, literal)
    return [f"start: {opened} | {without}", *_thought(literal), *_to_call(writing, literal)]


def _after(writing: Writing, tools: Tools, literal: _Literals, spaces: str = "") -> str:
    """What may follow thoughts and `spaces`, or begin an answer without thoughts: text, or text and calls."""
    head = literal(writing.head) or f"{literal.mark(writing.lead)}"
    if tools.choice == "required":
        return f"{spaces}{head} calls"
    if not writing.head:
        return f"{spaces}(NO_BRACE | {head} calls)"
    return f"TEXT | TEXT {head} calls" if head.startswith("<[") else "TEXT | text_to_call calls"


def _at_once(writing: Writing, tools: Tools, literal: _Literals) -> str:
    """As `_after`, for an answer that has no thoughts although it might have begun with them: its text begins with no
    angle bracket."""
    if tools.choice == "required" or not writing.head:
        return _after(writing, tools, literal)
    head = literal(writing.head)
    call = f"NO_ANGLE {head} calls" if head.startswith("<[") else f"plain_to_call calls | {head} calls"
    return f"NO_ANGLE | {call}"


def _thought(literal: _Literals) -> list[str]:
    """Thoughts up to their end."""
    end = literal(THOUGHT)
    return [f"thought: TEXT {end}"] if end.startswith("<[") else [f"thought[lazy]: TEXT {end}"]


def _to_call(writing: Writing, literal: _Literals) -> list[str]:
    """Text up to the mark of a call. A lazy rule ends as soon as it can, so from there on the answer is a call."""
    head = literal(writing.head)
    if not head or head.startswith("<["):
        return []
    return [f"text_to_call[lazy]: TEXT {head}", rf"plain_to_call[lazy]: /[^< \n](.|\n)*/ {head}"]


def _channels(tools: Tools, literal: _Literals) -> list[str]:
    """Of gpt-oss: perhaps a channel of thoughts, then a call or the final channel."""
    think = f"{literal('<|channel|>analysis<|message|>')} TEXT {literal('<|end|><|start|>assistant')}"
    last = "to_call calls" if tools.choice == "required" else "to_call calls | final"
    return [
        f"start: think? ({last})",
        f"think: {think}",
        f"to_call: {literal('<|channel|>commentary to=functions.')}",
        f"final: {literal('<|channel|>final<|message|>')} TEXT",
    ]


def _rule(name: str, tool: Tool, writing: Writing, literal: _Literals) -> str:
    before, after = literal(f"{writing.before}{tool.name}{writing.middle}"), literal(writing.after)
    schema = json.dumps({**tool.parameters, "x-guidance": {**STYLE, "lenient": not tool.strict}})
    return f"{name}: {before} %json {schema} {after}"


class _Literals:
    """Fixed text as Lark: strings, and ids of tokens in between."""

    def __init__(self, writing: Writing, marks: Mapping[str, int]) -> None:
        known = [mark for mark in (*writing.marks, THINK, THOUGHT) if mark in marks]
        self._marks = marks
        self._cut = re.compile("|".join(map(re.escape, known))) if known else None

    def mark(self, text: str) -> str:
        """A mark as optional, if it is a token of its own; else "": such a mark is not allowed."""
        return f"{self(text)}?" if text in self._marks else ""

    def __call__(self, text: str) -> str:
        parts, end = list[str](), 0
        for found in self._cut.finditer(text) if self._cut is not None else ():
            parts += [_quoted(text[end : found.start()]), f"<[{self._marks[found[0]]}]>"]
            end = found.end()
        return " ".join(part for part in [*parts, _quoted(text[end:])] if part)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
