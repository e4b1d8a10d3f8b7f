"""What a request is told while it is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.errors import BadRequest, PenstockError
from penstock.serve.generation import Generation
from penstock.serve.log_probabilities import Likely
from penstock.serve.scores import Scores


class AnswerPiece(NamedTuple):
    """What a token adds to an answer: the text that has become certain, often all of it, sometimes none. `likely`: the
    token's log probability, where it was asked for. `prompt_scores`: those of the prompt, with the first token only."""

    text: str
    likely: tuple[Likely, ...] = ()
    prompt_scores: Scores | None = None


class Ended(NamedTuple):
    """The answer is whole. Nothing is told after this."""

    answer: Generation


class Failed(NamedTuple):
    """There will be no answer. Nothing is told after this."""

    error: PenstockError


class Cancelled(NamedTuple):
    """The request has left, as it was asked to. Nothing is told after this. `why`: more than that, if it is known."""

    why: str | None = None


Told = AnswerPiece | Ended | Failed | Cancelled
Tell = Callable[[Told], None]


def require_answer(told: Told) -> None:
    """Raises the error of an answer that has failed, and BadRequest for one that was cancelled."""
    if isinstance(told, Failed):
        raise told.error
    if isinstance(told, Cancelled):
        raise BadRequest(told.why or "the request was cancelled")
