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
from penstock.serve.tools.writing import THOUGHT, Writing

_TEXT = r"TEXT: /(.|\n)*/"
_NO_CALL = r"TEXT: /([^{](.|\n)*)?/"  # where a call begins with the answer's first character, a brace


def grammar(writing: Writing, tools: Tools, marks: Mapping[str, int], thinking: bool) -> str:
    """The grammar of an answer. `marks`: ids of the marks that are special tokens of this vocabulary. `thinking`: the
    answer begins in the middle of what the model thinks."""
    literal = _Literals(writing, marks)
    names = [f"tool_{i}" for i in range(len(tools.offered))]
    rules = [_rule(name, tool, writing, literal) for name, tool in zip(names, tools.offered, strict=True)]
    more = f" ({literal(writing.between)} named)*" if writing.between is not None and tools.parallel else ""
    space = '" "?' if writing.head in marks else ""  # SentencePiece's, behind a special token
    calls = f"{space} {literal(writing.open)} named{more} {literal(writing.close)}"
    rules += [f"named: {' | '.join(names)}", f"calls: {calls}"]
    if writing.channels:
        return "\n".join([*_channels(tools, literal), *rules, _TEXT])
    if not writing.head:
        lead = f"{literal(writing.lead)}?" if writing.lead in marks else ""
        start = f"{lead} calls" if tools.choice == "required" else f"TEXT | {lead} calls"
        return "\n".join([f"start: {start}", *rules, _NO_CALL])
    return "\n".join([*_start(writing, tools, literal, thinking), *rules, _TEXT])


def _start(writing: Writing, tools: Tools, literal: _Literals, thinking: bool) -> list[str]:
    head = literal(writing.head)
    if tools.choice == "required":
        thought = 'thought " "? NEWLINES' if thinking else ""
        rules = [f"start: {thought} {head} calls", r"NEWLINES: /\n*/"]
        return [*rules, f"thought[lazy]: TEXT {json.dumps(THOUGHT)}"] if thinking else rules[:1]
    if head.startswith("<["):
        return [f"start: TEXT | TEXT {head} calls"]
    # A lazy rule ends as soon as it can, so from here on the answer is a call.
    return ["start: TEXT | text_to_call calls", f"text_to_call[lazy]: TEXT {head}"]


def _channels(tools: Tools, literal: _Literals) -> list[str]:
    """gpt-oss: perhaps what it thinks, then a call, or an answer."""
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
    schema = json.dumps({**tool.parameters, "x-guidance": STYLE})
    return f"{name}: {before} %json {schema} {after}"


class _Literals:
    """Fixed text as Lark: strings, and ids of tokens in between."""

    def __init__(self, writing: Writing, marks: Mapping[str, int]) -> None:
        known = [mark for mark in writing.marks if mark in marks]
        self._marks = marks
        self._cut = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        parts, end = list[str](), 0
        for found in self._cut.finditer(text) if self._cut is not None else ():
            parts += [_quoted(text[end : found.start()]), f"<[{self._marks[found[0]]}]>"]
            end = found.end()
        return " ".join(part for part in [*parts, _quoted(text[end:])] if part)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
