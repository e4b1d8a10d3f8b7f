"""What a lossy choice costs: perplexity of a text, and KL divergence against another model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.errors import BadRequest, BrokenModel
from penstock.serve.engine import Engine
from penstock.serve.sampling import log_softmax

WINDOW_TOKENS = 512


@dataclass(frozen=True)
class Evaluation:
    """`tokens`: how many were scored. `kl`: mean KL(other ‖ this) in nats per token; `agree`: the share of
    positions where both rank the same token first. None without another model."""

    perplexity: float
    tokens: int
    kl: float | None = None
    agree: float | None = None


def evaluate(
    engine: Engine,
    text: str,
    against: Engine | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Evaluation:
    """Non-overlapping windows of 512 tokens (or the model's maximum), the first token of each unscored.

    The engines must have been loaded with `Ask(score=True)`. Raises BadRequest for a text of one token.
    """
    ids = engine.tokenizer.encode(text)
    width = min(WINDOW_TOKENS, engine.plan.context)
    nll = kl = 0.0
    scored = agreed = 0
    for lo in range(0, len(ids), width):
        window = ids[lo : lo + width]
        if len(window) < 2:
            continue
        others = against.score(window) if against else None
        at = 0
        for logits in engine.score(window):
            other = next(others) if others else None
            # Row i predicts token i + 1 of the window; the last row predicts nothing that is scored.
            n = min(len(logits), len(window) - 1 - at)
            targets = np.array(window[at + 1 : at + 1 + n])
            logp = log_softmax(logits[:n])
            nll -= float(logp[np.arange(n), targets].sum(dtype=np.float64))
            if other is not None:
                exact = log_softmax(other[:n])
                kl += float((np.exp(exact) * (exact - logp)).sum(dtype=np.float64))
                agreed += int((exact.argmax(axis=1) == logp.argmax(axis=1)).sum())
            scored, at = scored + n, at + len(logits)
        if on_progress:
            on_progress("scoring tokens", min(lo + width, len(ids)), len(ids))
    if not scored:
        raise BadRequest("the text is too short: perplexity needs two tokens at least")
    if not math.isfinite(nll):
        raise BrokenModel("the model computed NaN: its weights may be damaged; run `penstock pack --verify` on it")
    return Evaluation(
        perplexity=math.exp(nll / scored),
        tokens=scored,
        kl=kl / scored if against else None,
        agree=agreed / scored if against else None,
    )
