"""Spares typer the conversion of values that need none: texts that stay texts, defaults, and flags that are not given.
Plain numbers without bounds are converted here.

Typer 0.26 imports pydantic before it converts anything, even None. That took 70 ms of each command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

_WHOLE = re.compile("-?(0|[1-9][0-9]{0,14})")
_DECIMAL = re.compile(f"{_WHOLE.pattern}([.][0-9]{{1,15}})?")


def let_through(command: Any, hints: Mapping[str, Any]) -> None:
    """Changes the parameters of a click command in place. `hints`: the type of each, `Annotated[TYPE, Option]`."""
    for param in command.params:
        kind, *options = get_args(hints[param.name]) if param.name in hints else (type(None),)
        bounded = any(getattr(o, "min", None) is not None or getattr(o, "max", None) is not None for o in options)
        _let_through(param, get_args(kind) or (kind,), bounded)
    make_help = command.get_help_option

    def help_option(ctx: Any) -> Any:
        """--help, which click adds when it parses."""
        made = make_help(ctx)
        return None if made is None else _let_through(made, ())

    command.get_help_option = help_option


def plain_number(text: str, kinds: tuple[type, ...]) -> int | float | str:
    """The number that a text spells plainly, if the flag may be a number; else the text."""
    if int in kinds and _WHOLE.fullmatch(text):
        return int(text)
    if float in kinds and _DECIMAL.fullmatch(text):
        return float(text)
    return text


def _let_through(param: Any, kinds: tuple[type, ...], bounded: bool = True) -> Any:
    """The parameter, changed so that it converts only values of none of these types. `bounded`: whether numbers have
    bounds, which typer checks."""
    convert = param.process_value

    def process(ctx: Any, value: Any) -> Any:
        if type(value) is str and not bounded and str not in kinds:
            value = plain_number(value, kinds)
        if type(value) not in kinds if value is not None else param.required:
            return convert(ctx, value)
        return value if param.callback is None else param.callback(ctx, param, value)

    def process_several(ctx: Any, value: Any) -> Any:
        return convert(ctx, value) if value is not None else ()

    if param.nargs == 1 and not param.multiple:
        param.process_value = process
    elif param.multiple and not param.required and param.callback is None:
        param.process_value = process_several  # values that are given are a list, which click does not make by itself
    return param
