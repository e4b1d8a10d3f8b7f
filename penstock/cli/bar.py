"""Draws how far a long measurement is, as a bar on a line of the terminal. A file or pipe gets a line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.output import say
from penstock.units import format_left

_FULL, _EMPTY = "━", "─"
_PLAIN_S = 5.0  # between two lines of a file


class Bar:
    """`title`: what is being done."""

    def __init__(self, title: str) -> None:
        self._title, self._tty, self._told_s, self._drawn = title, sys.stderr.isatty(), time.monotonic(), False

    def show(self, what: str, share: float, left_s: float) -> None:
        """`what` is going on, this share of all is done, and it takes so many seconds more at most."""
        if self._tty:
            columns = shutil.get_terminal_size().columns
            say(f"\r{bar_line(self._title, what, share, left_s, columns - 1)}\033[K", end="")
            self._drawn = True
        elif time.monotonic() - self._told_s >= _PLAIN_S:
            self._told_s = time.monotonic()
            say(f"{self._title}: {share:.0%}, {_said(what, left_s)}")

    def clear(self) -> None:
        if self._drawn:
            say("\r\033[K", end="")
            self._drawn = False


@contextmanager
def bar(title: str) -> Iterator[Bar]:
    """Yields a bar, and clears it at the end."""
    drawn = Bar(title)
    try:
        yield drawn
    finally:
        drawn.clear()


def bar_line(title: str, what: str, share: float, left_s: float, columns: int) -> str:
    """`measuring this machine ━━━━━━──────  42 %  int8 products, at most 24 s left`, in so many columns at most."""
    said = f"{share:4.0%}  {_said(what, left_s)}"
    width = min(24, columns - len(title) - len(said) - 2)
    if width < 4:
        return said.strip()[: max(0, columns)]
    full = round(share * width)
    return f"{title} {_FULL * full}{_EMPTY * (width - full)} {said}"


def _said(what: str, left_s: float) -> str:
    """`what` is empty before the first part begins."""
    left = f"at most {format_left(left_s)} left"
    return f"{what}, {left}" if what else left
