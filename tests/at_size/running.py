"""Runs cases one after the other, and says which differ: what the programs of this folder share."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.errors import BadRequest, DoesNotFit, UnsupportedModel
from tests.at_size.draws import Case, draw, narrowed
from tests.numbered import flags, numbers

LEFT_OUT = BadRequest, DoesNotFit, UnsupportedModel  # any other error is a fault


def main(doc: str, differences: Callable[[Case, Path], list[str]]) -> int:
    """Runs a program whose flags `doc` names. `differences(case, folder)`: what is not the same; it raises one of
    LEFT_OUT where a case cannot run. Returns the exit code."""
    parser = flags(doc)
    parser.add_argument("--narrow", action="store_true")
    wanted = parser.parse_args()
    ran, left_out, wrong = 0, 0, []
    for number in numbers(wanted):
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
