"""Writes the frozen dataclasses of `spec` as JSON and reads them back, by their type hints.

A file's top object has a key `"schema"` with a name and a version. So an old file is refused with a clear line instead
of being misread.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from functools import lru_cache
from typing import Any, TypeVar, Union

from penstock.errors import BadRequest

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """A dataclass as plain dicts and lists, in field order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(cls: type[T], data: Any, where: str = "") -> T:
    """The inverse of `to_json`. Raises BadRequest naming the path of the first value that is wrong."""
    return typing.cast(T, _decode(cls, data, where or cls.__name__))


def dumps(value: Any, schema: str, version: int) -> str:
    """A whole document: the value with its schema name and version."""
    return json.dumps({"schema": f"{schema}/{version}", **to_json(value)}, indent=1, allow_nan=False)


def loads(cls: type[T], text: str, schema: str, version: int, where: str) -> T:
    """Reads what `dumps` wrote. Raises BadRequest for bad JSON, another schema or another version."""
    data = parse(text, where)
    schema_found = data.pop("schema", None)
    if schema_found != f"{schema}/{version}":
        raise BadRequest(f"{where} has schema {schema_found!r}; this version reads {schema}/{version}")
    return from_json(cls, data, where)


def loads_json(text: str, **how: Any) -> Any:
    """`json.loads` of a text that somebody else wrote. A byte-order mark at its beginning is skipped: some editors put
    one there.

    Raises ValueError and RecursionError as `json.loads` does. Raises ValueError also where a string holds half of a
    surrogate pair. Python takes that for a character, but it has no UTF-8, so no file, tokenizer or picture could take
    it.
    """
    value = json.loads(text.removeprefix("\ufeff"), **how)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a string holds half of a surrogate pair, which is no character") from None
    return value


def parse(text: str, where: str) -> dict[str, Any]:
    """A JSON object that somebody else wrote. Raises BadRequest."""
    try:
        data = loads_json(text, parse_constant=_reject_constant)
    except ValueError as error:
        raise BadRequest(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest(f"{where} is not JSON that anybody wrote: it nests too deep") from None
    if not isinstance(data, dict):
        raise BadRequest(f"{where} should hold a JSON object")
    return data


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _decode(hint: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in typing.get_args(hint):
            return None
        return _decode(_member(hint, data), data, where)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), data, where)
    if origin is dict:
        if not isinstance(data, dict):
            raise BadRequest(f"{where} should be an object, not {_short(data)}")
        item = typing.get_args(hint)[1]
        return {str(key): _decode(item, value, f"{where}.{key}") for key, value in data.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), data, where)
    return _decode_scalar(hint, data, where)


def _member(hint: Any, data: Any) -> Any:
    """The member of a union that `data` is decoded as: the first one that has all keys of the object, else the
    first."""
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if len(members) > 1 and isinstance(data, dict):
        return next((m for m in members if set(data) <= {f.name for f in dataclasses.fields(m)}), members[0])
    return members[0]


def _decode_tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise BadRequest(f"{where} should be a list, not {_short(data)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(args) != len(data):
        raise BadRequest(f"{where} should have {len(args)} entries, not {len(data)}")
    return tuple(_decode(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True)))


def _decode_dataclass(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise BadRequest(f"{where} should be an object, not {_short(data)}")
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = set(data) - set(fields)
    if unknown:
        raise BadRequest(f"{where} has no field {sorted(unknown)[0]!r}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise BadRequest(f"{where} lacks {name!r}")
    values = {name: _decode(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**values)
    except BadRequest as error:
        raise BadRequest(f"{where}: {error.message}") from None


@lru_cache
def _hints(cls: type) -> dict[str, Any]:
    """Resolving the annotations of a class costs more than decoding an object of it."""
    return typing.get_type_hints(cls)


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    hint = _plain(hint)
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        if abs(data) >= 2**1023:
            raise BadRequest(f"{where} should be a finite number")
        return float(data)
    if hint is float and isinstance(data, float) and not math.isfinite(data):
        raise BadRequest(f"{where} should be a finite number")
    if hint is Any or (isinstance(data, hint) and (hint is bool or not isinstance(data, bool))):
        return data
    raise BadRequest(f"{where} should be {hint.__name__}, not {_short(data)}")


def _plain(hint: Any) -> Any:
    """The type behind a NewType, which is all that is left of one at run time."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    return hint


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 40 else text[:37] + "..."
