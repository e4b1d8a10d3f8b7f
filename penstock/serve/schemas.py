"""The rules that answers are held to: JSON schemas and grammars that clients send, checked before anybody compiles
them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from penstock.errors import BadRequest

MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH = 64 << 10, 64
_NESTED = (Mapping, list, tuple)
MAX_GRAMMAR_BYTES = 512 << 10  # with the schemas of many tools in it
JSON_OBJECT = '{"type": "object"}'
# How JSON is written. A space, or a new line and its indentation: a model that likes white space must not write it for
# ever.
STYLE = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r"( |\n[ \t]{0,32})?",
    "coerce_one_of": False,
    "lenient": False,
}


_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class Rule(NamedTuple):
    """What an answer has to follow. `kind`: whether the text is a JSON schema, or a grammar in llguidance's Lark or in
    llama.cpp's GBNF."""

    kind: Literal["schema", "lark", "gbnf"]
    text: str


def checked_grammar(text: str) -> str:
    """The grammar, if it is not too long. Raises BadRequest."""
    if not isinstance(text, str) or not text.strip():
        raise BadRequest("a grammar should be a text that is not empty")
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError:
        raise BadRequest("the grammar is not valid Unicode text (UTF-8)") from None
    if nbytes > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"the grammar has {nbytes} bytes; it may have {MAX_GRAMMAR_BYTES}")
    return text


def grammar_rule(text: str) -> Rule:
    """A grammar as a rule: GBNF is known by a rule of its own, at the beginning of a line."""
    return Rule("gbnf" if _GBNF.search(text) else "lark", text)


def checked_schema(schema: Any) -> str:
    """The JSON text of a schema, which is given as JSON or as an object. Raises BadRequest for one that is too long or
    too deep."""
    try:
        if isinstance(schema, str):
            if len(schema) > MAX_SCHEMA_BYTES:
                raise _too_long(len(schema))
            schema = json.loads(schema)
        if not isinstance(schema, Mapping):
            raise BadRequest(f"a JSON schema should be an object, not {type(schema).__name__}")
        _check_depth(schema)
        text = json.dumps(schema, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"a JSON schema should be JSON: {str(error)[:200]}") from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise _too_long(len(text))
    return text


def _check_depth(schema: object) -> None:
    level, depth = [schema], 0
    while level:
        if depth > MAX_SCHEMA_DEPTH:
            raise BadRequest(f"the JSON schema is deeper than {MAX_SCHEMA_DEPTH} levels")
        inner = (each.values() if isinstance(each, Mapping) else each for each in level if isinstance(each, _NESTED))
        level, depth = [each for values in inner for each in values], depth + 1


def _too_long(nbytes: int) -> BadRequest:
    return BadRequest(f"the JSON schema has {nbytes} bytes; it may have {MAX_SCHEMA_BYTES}")
