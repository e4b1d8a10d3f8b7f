"""Opens a file that the user named before the work begins, and writes one text to it at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cli.options import file_to_write
from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.store.files import Kind


@contextmanager
def writing(name: str | None, flag: str, kind: Kind) -> Iterator[Callable[[str], None] | None]:
    """Yields a function that writes the text, once; None where no file is wanted. Where no text was written no file is
    left, and one that was there before stays. Raises BadRequest at once where the file cannot be written, or holds
    something else than this kind."""
    if name is None:
        yield None
        return
    from penstock.store.files import Output

    try:
        output = Output(file_to_write(name, flag), kind)
    except OSError as error:
        raise BadRequest(f"{flag} {name} cannot be written: {error.strerror}") from None

    def write(text: str) -> None:
        try:
            output.stream.write(text.encode())
            output.commit()
        except OSError as error:
            raise BadRequest(f"{flag} {name} cannot be written: {error.strerror}") from None

    with output:
        yield write
