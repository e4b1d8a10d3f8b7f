"""The argument of commands that read a text."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from penstock.store.files import MAX_TEXT_BYTES
from penstock.units import format_bytes

TEXT_HELP = f"A text, UTF-8, of at most {format_bytes(MAX_TEXT_BYTES)}."
TextFile = Annotated[str, Argument(metavar="FILE", help=TEXT_HELP)]
