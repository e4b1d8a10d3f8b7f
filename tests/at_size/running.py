"""Runs cases one after the other, and says which differ: what the programs of this folder share."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import BadRequest, DoesNotFit, UnsupportedModel
from tests.at_size.draws import Case, draw, narrowed

LEFT_OUT = BadRequest, DoesNotFit, UnsupportedModel  # any other error is a fault


def main(doc: str, differences: Callable[[Case, Path], list[str]]) -> int:
    """Runs a program whose flags `doc` names. `differences(case, folder)`: what is not the same; it raises one of
    LEFT_OUT where a case cannot run. Returns the exit code."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--narrow", action="store_true")
    wanted = parser.parse_args()
    first = wanted.first if wanted.case is None else wanted.case
    cases = 1 if wanted.case is not None else wanted.cases
    end_s = time.monotonic() + 60 * wanted.minutes
    ran, left_out, wrong = 0, 0, []
    for number in itertools.count(first):
        if number - first == cases or (cases is None and time.monotonic() > end_s):
            break
        case = narrowed(draw(number)) if wanted.narrow else draw(number)
        with tempfile.TemporaryDirectory(prefix="penstock-at-size-") as folder:
            try:
                found = differences(case, Path(folder))
            except LEFT_OUT as error:
                left_out += 1
                print(f"{case}: left out: {error}", file=sys.stderr)
                continue
        ran += 1
        print(f"{case}: {'; '.join(found) or 'the same'}", file=sys.stderr, flush=True)
        if found:
            wrong.append(number)
    print(json.dumps({"cases": ran, "left_out": left_out, "wrong": wrong}))
    return bool(wrong)
