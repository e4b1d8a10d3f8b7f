"""What a solver proposes."""

from __future__ import annotations

from typing import NamedTuple

from penstock.spec.plan import Plan


class Candidate(NamedTuple):
    """A complete plan that fits, the strategy's name, and a sentence per choice."""

    strategy: str
    plan: Plan
    reasons: tuple[str, ...]
