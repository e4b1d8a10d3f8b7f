"""What a solver proposes."""

from __future__ import annotations

from typing import NamedTuple

from penstock.planner.predict import Prediction
from penstock.spec.plan import Plan


class Candidate(NamedTuple):
    """A complete plan that fits, the strategy's name, and a sentence per choice. `cannot_run`: why the runtime cannot
    run it yet, in a few words; empty where it can. Such a plan serves planning alone. `lossy`: what it changes in the
    answers; such a plan is compared, and never chosen by itself."""

    strategy: str
    plan: Plan
    reasons: tuple[str, ...]
    cannot_run: str = ""
    lossy: str = ""


class Compared(NamedTuple):
    """A candidate and what it would do."""

    candidate: Candidate
    prediction: Prediction
