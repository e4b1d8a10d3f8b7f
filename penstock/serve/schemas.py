"""Checks a JSON schema that a client sent, before anybody compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.errors import BadRequest

MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH = 64 << 10, 64
_NESTED = (Mapping, list, tuple)
JSON_OBJECT = '{"type": "object"}'


def checked_schema(schema: Any) -> str:
    """A schema, as JSON or as the object, as JSON that is no longer and no deeper than may be. Raises BadRequest."""
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
