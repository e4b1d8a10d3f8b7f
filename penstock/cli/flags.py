"""Groups of flags: frozen dataclasses whose fields are flags, for commands that share them, or that have many.

`grouped` unfolds the groups among a command's parameters into the signature that typer reads. When the command is
called, it folds the values into the groups again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

from typer import Option

from penstock.cli.cache_flag import naming_cache_flag


def flag(name: str, metavar: str | None, help: str, default: Any = None, **how: Any) -> Any:
    """A field of a group, which is a flag. `metavar`: None for a flag without a value. `how`: as for typer's Option."""
    return dataclasses.field(default=default, metadata={"option": Option(name, metavar=metavar, help=help, **how)})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer: in place of each parameter that is a group, a parameter for every flag of the group."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
            continue
        group = groups[parameter.name]
        kinds = typing.get_type_hints(group)
        for f in dataclasses.fields(group):
            kind = Annotated[kinds[f.name], f.metadata["option"]]  # type: ignore[valid-type,name-defined]
            parameters.append(inspect.Parameter(f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=kind))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        naming = naming_cache_flag(values["cache"]) if "cache" in values else nullcontext()
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
        with naming:
            command(**values)

    del call.__dict__["__wrapped__"]  # by which inspect would find the folded signature
    call.__dict__["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__dict__["groups"] = tuple(groups.values())
    return call
