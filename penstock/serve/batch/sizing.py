"""How many of a batch's answers are given at once: the number for which the whole batch is predicted to end first.

More answers share each read of the weights. But KV that they fill has to lie somewhere: beyond some number it pushes
weights out of memory, or goes to the disk itself.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import DoesNotFit
from penstock.runtime.host import Progress
from penstock.serve.batch.foretelling import predicted_s
from penstock.serve.batch.survey import Survey
from penstock.serve.loading import Loading, plan_here
from penstock.spec.ask import MOST, Ask
from penstock.store.packed import Packed
from penstock.store.predictors import with_predictors

_WORSE_IN_A_ROW = 2  # after so many sizes that are slower than the best one, smaller ones are not tried


def of_size(ask: Ask, count: int) -> Ask:
    """The ask for `count` sequences of its lengths, which share KV pages, and room for the longest of them."""
    assert ask.context is not None
    each = min(ask.context, ask.sequence_tokens)
    return replace(ask, batch=count, kv_tokens=min(MOST, max(ask.context, count * each)))


def best_ask(ask: Ask, surveyed: Survey, packed: Packed, how: Loading, on_progress: Progress | None = None) -> Ask:
    """The ask of the best size, of all answers at once, half of them, a quarter and so on. Raises DoesNotFit where one
    at a time does not fit."""
    if ask.sparsity == "predict":
        packed = with_predictors(packed)
    best, best_s, worse = ask, float("inf"), 0
    count, refused = ask.batch, list[DoesNotFit]()
    while count and worse < _WORSE_IN_A_ROW:
        tried = of_size(ask, count)
        try:
            planned = plan_here(tried, packed, how, on_progress)
        except DoesNotFit as error:
            refused = [error]
        else:
            seconds = predicted_s(planned.plan, planned.solved.prediction, tried, surveyed.answers)
            worse = 0 if seconds < best_s else worse + 1
            best, best_s = (tried, seconds) if seconds < best_s else (best, best_s)
        count //= 2
    if best_s == float("inf"):
        raise refused[0]
    return best
