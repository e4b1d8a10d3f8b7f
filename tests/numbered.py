"""Searches by numbered cases share their flags, which cases they come to, and how they tell what they found."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator


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


def search(doc: str, judge: Callable[[int], tuple[str, list[str]] | None], most: int | None = None) -> int:
    """Runs a program whose flags `doc` names. `judge(number)`: (a case in words, what is wrong); None where there is no
    case of this number. `most`: so many numbers there are. Returns the exit code."""
    ran, wrong = 0, []
    for number in itertools.takewhile(lambda n: n != most, numbers(flags(doc).parse_args())):
        if (judged := judge(number)) is None:
            continue
        case, found = judged
        ran += 1
        print(f"{case}: {'; '.join(found) or 'nothing'}", file=sys.stderr, flush=True)
        if found:
            wrong.append(number)
    print(json.dumps({"cases": ran, "wrong": wrong}))
    return bool(wrong)
