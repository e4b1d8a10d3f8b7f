"""Prints for all commands: the JSON line, notes and progress on stderr, the line of predicted beside measured."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.units import format_bytes, format_left, format_rate, format_seconds

if TYPE_CHECKING:
    from threading import Event

    from penstock.planner.predict import Prediction
    from penstock.runtime.host import Progress
    from penstock.serve.generation import Generation

# Seconds until progress is shown, and between two updates of a terminal, or of a file.
_FIRST_S, _TTY_S, _PLAIN_S = 0.5, 0.1, 5.0

_LONGEST_LINE, _KEPT_END = 1000, 200  # characters
_SPEED_COLUMNS = 79 - len("penstock: ")
_LEAST_COLUMNS = 20  # a narrower terminal breaks lines itself
_LONG_S = 100.0  # longer times are told in minutes


def print_json(data: Any) -> None:
    """Prints data as JSON on one line. Only ASCII, so that no locale can spoil it; NaN and infinity become null."""
    print(json.dumps(_finite(data), allow_nan=False), flush=True)


def say(text: str, end: str = "\n") -> None:
    """Prints text to stderr. Where that fails, on a full disk or a closed pipe, the work goes on."""
    with suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """A text as one line that is safe to print. Line ends become spaces. Characters that are not printable are escaped,
    for they might move the cursor or turn the text round. Of more than 1000 characters the middle is left out; the end
    stays, for errors end with the way out."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.splitlines()))
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE - _KEPT_END - 3]} … {line[-_KEPT_END:]}"


def fitted(text: str, columns: int | None = None) -> str:
    """A text for stdout whose lines are no longer than the terminal is wide, or `columns`: they are broken between
    words, and go on below indented. Tables that are too wide lose padding first, all their rows alike where that will
    do. A word that is longer stays whole. Where stdout is no terminal the text stays as it is."""
    if columns is None and not (columns := stdout_columns()):
        return text
    columns, found = max(_LEAST_COLUMNS, columns), list[str]()
    for count, rows in groupby(text.split("\n"), lambda line: len(_cells(line))):
        lines = list(rows)
        table = _narrowed(lines) if count > 1 and max(map(len, lines)) > columns else lines
        if max(map(len, table)) > columns:
            table = [part for line in lines for part in _broken(line, columns)]
        found += table
    return "\n".join(found)


def fits(text: str, columns: int | None = None) -> bool:
    """Whether the tables of a text have room beside each other in the columns that `fitted` goes by."""
    if columns is None and not (columns := stdout_columns()):
        return True
    tables = (list(rows) for count, rows in groupby(text.split("\n"), lambda line: len(_cells(line))) if count > 1)
    return all(max(map(len, _narrowed(rows))) <= max(_LEAST_COLUMNS, columns) for rows in tables)


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows below the first one, which heads them, as a table for stdout; each in lines of its own where the terminal
    has no room for a table. `right`: columns that end at one place. No cell has a line break."""
    head, *others = rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    if not (columns := stdout_columns()) or max(map(len, lines)) <= max(_LEAST_COLUMNS, columns):
        return "\n".join(lines)
    named = [", ".join(f"{what} {cell}" for what, cell in list(zip(head, row, strict=True))[1:]) for row in others]
    return fitted("\n".join(f"{row[0]}\n  {rest}" for row, rest in zip(others, named, strict=True)))


def stdout_columns() -> int:
    """Of the terminal that stdout is; 0 where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _cells(line: str) -> list[str]:
    return re.split(" {2,}", line.strip(" "))


def _narrowed(rows: list[str]) -> list[str]:
    """Rows of as many cells each with two spaces between columns. Columns whose cells end at one place still do."""
    cells = [_cells(row) for row in rows]
    ends = [[gap.start() for gap in re.finditer(r"(?<! )( {2,}| *$)", row)][-len(cells[0]) :] for row in rows]
    indents = [len(row) - len(row.lstrip(" ")) for row in rows]
    first = max(indent + len(row[0]) for indent, row in zip(indents, cells, strict=True))
    lines = [(" " * indent + row[0]).ljust(first) for indent, row in zip(indents, cells, strict=True)]
    for j in range(1, len(cells[0])):
        width = max(len(row[j]) for row in cells)
        right = len({row[j] for row in ends}) == 1
        lines = [
            f"{so_far}  {row[j].rjust(width) if right else row[j].ljust(width)}"
            for so_far, row in zip(lines, cells, strict=True)
        ]
    return [line.rstrip() for line in lines]


def _broken(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    squeezed = indent + re.sub(" {2,}", "  ", line.strip())
    wrapper = textwrap.TextWrapper(
        columns, subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(squeezed)


def _terminal_columns() -> int:
    """Of the terminal that stderr is; 0 where it is none."""
    with suppress(OSError, ValueError):  # no terminal, or a stream that is closed
        return os.get_terminal_size(sys.stderr.fileno()).columns
    return 0


def say_fitted(text: str) -> None:
    """Prints a text of several lines to stderr, as wide as the terminal is (`fitted`)."""
    columns = _terminal_columns()
    say(fitted(text, columns) if columns else text)


def note(text: str) -> None:
    """Prints one line to stderr, whatever file names and other people's texts are in it. A terminal that is narrower
    gets it in several, broken between words."""
    say_fitted(f"penstock: {one_line(text)}")


@contextmanager
def progress(ends: Event | None = None) -> Iterator[Progress]:
    """Yields `tell(text, done, total)`. `done` and `total` count bytes, or tokens, layers, lines or answers where the
    text ends so. A text that begins with "answers, " says by itself how fast they come and what is left. With a `total`
    of 0 the text is printed as a note.

    A terminal gets one line that is rewritten, and cleared at the end; a file or pipe gets a line now and then. Work
    that takes less than half a second is not shown. `ends`: once it is set, `tell` raises Ending, which breaks the work
    off.
    """
    shown = _Shown(sys.stderr.isatty())

    def tell(text: str, done: int, total: int) -> None:
        if ends is not None and ends.is_set():
            from penstock.serve.scheduler import Ending

            raise Ending("the server is ending")
        shown.tell(text, done, total)

    try:
        yield shown.tell if ends is None else tell
    finally:
        shown.clear()


class _Shown:
    def __init__(self, tty: bool) -> None:
        self._tty, self._dirty = tty, False
        self._start_s, self._told_s, self._first, self._total = 0.0, 0.0, 0, -1

    def tell(self, text: str, done: int, total: int) -> None:
        if total <= 0:
            self.clear()
            note(text)
            return
        now_s = time.perf_counter()
        if total != self._total:  # another piece of work
            self._start_s, self._told_s, self._first, self._total = now_s, now_s - _PLAIN_S + _FIRST_S, done, total
        if now_s - self._start_s < _FIRST_S or now_s - self._told_s < (_TTY_S if self._tty else _PLAIN_S):
            return
        self._told_s = now_s
        line = progress_line(text, done, total, (done - self._first) / (now_s - self._start_s))
        if self._tty:  # a line that goes on below would not be written over
            line = line[: max(1, (_terminal_columns() or _SPEED_COLUMNS + 1) - 1)]
        say(f"\r{line}\033[K" if self._tty else line, end="" if self._tty else "\n")
        self._dirty = self._tty

    def clear(self) -> None:
        if self._dirty:
            say("\r\033[K", end="")
            self._dirty = False


def progress_line(text: str, done: int, total: int, per_s: float) -> str:
    """`packing 3.ffn: 1.20 GiB of 13.5 GiB, 1.83 GB/s, 7 s left`."""
    if text.startswith("answers, "):
        return f"{done} of {total} {text}"
    left = f", {format_left((total - done) / per_s)} left" if per_s > 0 else ""
    if text.endswith((" tokens", " layers", " lines", " answers")):
        return f"{text}: {done} of {total}, {per_s:.1f} a second{left}"
    return f"{text}: {format_bytes(done)} of {format_bytes(total)}, {format_rate(per_s)}{left}"


def speed_line(generation: Generation, prediction: Prediction) -> str:
    """A line of measured speed beside predicted, and the disk's speed meanwhile: under 80 columns with `penstock: `.
    Figures that have no room are left out, from the end."""
    parts = speed_parts(generation, prediction)
    while len(parts) > 1 and len(" · ".join(parts)) > _SPEED_COLUMNS:
        parts.pop()
    return " · ".join(parts)


def speed_parts(generation: Generation, prediction: Prediction) -> list[str]:
    """All figures of `speed_line`, the most important first."""
    from penstock.planner.explain import rate

    speed, first_s = generation.decode_tokens_per_s, generation.batch_ttft_s
    parts = [
        f"{rate(speed)} tok/s (promised {rate(prediction.decode_tokens_per_s)})",
        f"first word {format_seconds(first_s) if first_s < _LONG_S else format_left(first_s)}",
    ]
    if generation.disk_bytes_per_token:
        parts.append(f"disk {format_rate(generation.disk_bytes_per_token * speed)}")
    return parts


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
