"""Errors name what the user named, where another folder or file stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError


@contextmanager
def naming(called: Path | str, stand_in: Path | str) -> Iterator[None]:
    """Errors say `called` instead of the path `stand_in`, in their message, numbers and notes: a checkpoint instead of
    the folder that was made of its small files, a model's name instead of its place in somebody's store. Raises what it
    renames."""

    def named(value: Any) -> Any:
        return str(value).replace(str(stand_in), str(called)) if isinstance(value, str | Path) else value

    try:
        yield
    except PenstockError as error:
        renamed = type(error)(named(error.message), **{key: named(value) for key, value in error.numbers.items()})
        for line in getattr(error, "__notes__", ()):
            renamed.add_note(named(line))
        raise renamed from None
