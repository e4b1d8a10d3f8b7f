"""`python -m tests.promises`: plans random real shapes for random machines, and asks for what users take for granted.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone

The last line is one JSON object; the exit code is 1 if anything does not hold.
"""

from __future__ import annotations

import json
import random
import sys
import time

from penstock.errors import DoesNotFit, PenstockError
from tests.numbered import flags, numbers
from tests.promises import checks, other_asks
from tests.promises.draws import Case, draw, setting

MOST_CPU_S = 10.0  # of one plan. Beside other work processor time is up to twice that of free cores


def broken(case: Case) -> tuple[list[str], float]:
    """(what does not hold, seconds of processor time of the plan). Raises PenstockError for a case without a plan."""
    of, rng = setting(case), random.Random(case.number)
    begin_s = time.process_time()
    try:
        solved = of.solve()
    except DoesNotFit as error:
        return list(checks.refusal_holds(of, error)), time.process_time() - begin_s
    plan_s = time.process_time() - begin_s
    found = [f"planning took {plan_s:.1f} s"] if plan_s > MOST_CPU_S else []
    found += checks.is_sane(of, solved)
    found += checks.no_family_is_faster(of, solved)
    if plan_s < 1.5:
        found += checks.more_is_no_worse(of, solved, rng.choice((1.03, 1.2, 2.0)))
        found += checks.longer_is_no_faster(of, solved)
        found += checks.advice_holds(of, solved)
        found += other_asks.holds(of, solved, rng.choice((1.3, 3.0)))
    return found, plan_s


def main() -> int:
    wanted = flags(__doc__ or "").parse_args()
    ran, left_out, wrong, slowest = 0, 0, [], (0.0, -1)
    for number in numbers(wanted):
        case = draw(number)
        try:
            found, plan_s = broken(case)
        except PenstockError as error:
            left_out += 1
            print(f"{case}: left out: {error}", file=sys.stderr)
            continue
        except Exception as error:
            found, plan_s = [f"{type(error).__name__}: {error}"], 0.0
        ran += 1
        slowest = max(slowest, (plan_s, number))
        lines = "".join(f"\n    {line}" for line in found) or " as promised"
        print(f"{case} ({plan_s:.2f} s):{lines}", file=sys.stderr, flush=True)
        if found:
            wrong.append(number)
    print(json.dumps({"cases": ran, "left_out": left_out, "wrong": wrong, "slowest": slowest}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
