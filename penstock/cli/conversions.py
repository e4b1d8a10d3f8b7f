"""Lets values through that typer need not convert: texts that are to be texts, defaults, and flags that are not given.

Typer 0.26 imports pydantic before it converts anything, None too, which took 70 ms of each command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args


def let_through(command: Any, hints: Mapping[str, Any]) -> None:
    """Changes the parameters of a click command in place. `hints`: the type of each, `Annotated[TYPE, Option]`."""
    for param in command.params:
        kind = get_args(hints[param.name])[0] if param.name in hints else type(None)
        _let_through(param, get_args(kind) or (kind,))
    make_help = command.get_help_option

    def help_option(ctx: Any) -> Any:
        """--help, which click adds when it parses."""
        made = make_help(ctx)
        return None if made is None else _let_through(made, ())

    command.get_help_option = help_option


def _let_through(param: Any, kinds: tuple[type, ...]) -> Any:
    """The parameter, which converts only what is of none of these types."""
    convert = param.process_value

    def process(ctx: Any, value: Any) -> Any:
        if type(value) not in kinds if value is not None else param.required:
            return convert(ctx, value)
        return value if param.callback is None else param.callback(ctx, param, value)

    if param.nargs == 1 and not param.multiple:  # several values are a list, which click does not make by itself
        param.process_value = process
    return param
