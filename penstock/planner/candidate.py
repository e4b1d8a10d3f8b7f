"""The candidate, which solvers propose, and the same with its prediction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.planner.bound import score_s
from penstock.planner.predict import Prediction
from penstock.spec.ask import Ask
from penstock.spec.plan import Plan

# The strategy that has all weights in device memory, and all KV. Where it is possible no other one is asked for.
WHOLE = "device memory"


class Candidate(NamedTuple):
    """A plan that a solver proposes.

    strategy        the name of the solver's strategy
    plan            complete, and within both memories
    reasons         a sentence for each choice
    cannot_run      why the runtime cannot run the plan yet, in a few words; "" if it can. Such a plan is compared only
    lossy           how the plan changes the model's answers; "" if it does not. A lossy plan is never chosen by itself
    also            names of other strategies that came to the same plan
    """

    strategy: str
    plan: Plan
    reasons: tuple[str, ...]
    cannot_run: str = ""
    lossy: str = ""
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all strategies that came to the plan."""
        return (self.strategy, *self.also)

    @property
    def may_be_chosen(self) -> bool:
        """Whether the runtime can run the plan, and its answers are the model's."""
        return not self.lossy and not self.cannot_run


def distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Each plan once, by the first of its names. A strategy that finds its plan in several ways has one name."""
    kept: list[Candidate] = []
    for each in candidates:
        for i, other in enumerate(kept):
            if (other.plan, other.cannot_run, other.lossy) == (each.plan, each.cannot_run, each.lossy):
                if each.strategy not in other.names:
                    kept[i] = other._replace(also=(*other.also, each.strategy))
                break
        else:
            kept.append(each)
    return kept


class Compared(NamedTuple):
    """A candidate and the prediction of its plan."""

    candidate: Candidate
    prediction: Prediction

    def score_s(self, ask: Ask) -> float:
        """Seconds that the ask's objective brings down, as simulated."""
        return score_s(self.prediction, self.candidate.plan, ask)
