"""Searches by numbered cases share their flags, and which cases they come to."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator


def flags(doc: str) -> argparse.ArgumentParser:
    """The flags that every search has; `doc` names them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    return parser


def numbers(wanted: argparse.Namespace) -> Iterator[int]:
    """The number of one case after the other: of the one that is named, of as many as are wanted, or of as many as
    begin in time."""
    if wanted.case is not None:
        yield wanted.case
        return
    end_s = time.monotonic() + 60 * wanted.minutes
    for number in itertools.count(wanted.first):
        if number - wanted.first == wanted.cases or (wanted.cases is None and time.monotonic() > end_s):
            return
        yield number
