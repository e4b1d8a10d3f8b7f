"""Measures what a lossy choice costs: perplexity of a text, and KL divergence from another model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, BrokenModel
from penstock.runtime.host import Progress
from penstock.serve.engine import Engine
from penstock.serve.log_probabilities import log_softmax
from penstock.serve.windows import width_of

_MOST_NLL = 700.0  # nats a token: e^700 is about the largest float64, and no model needs a worse figure


@dataclass(frozen=True)
class Evaluation:
    """Scores of a text. `tokens`: how many were scored. `kl`: mean KL(other ‖ this) in nats per token. `agree`: the
    share of positions where both models rank the same token first. Both are None without another model."""

    perplexity: float
    tokens: int
    kl: float | None = None
    agree: float | None = None


def evaluate(
    engine: Engine,
    text: str,
    against: Engine | None = None,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Scores a text in windows of 512 tokens (or the model's maximum), which do not overlap. The first token of each
    window is not scored.

    The engines must have been loaded with `Ask(score=True)`. Raises BadRequest for a text of one token, for models with
    different vocabularies, and for a plan with too small a context; BrokenModel where a model computes NaN.
    """
    engines = [engine] if against is None else [engine, against]
    if against is not None and against.packed.spec.vocab != engine.packed.spec.vocab:
        raise BadRequest(
            f"{against.packed.folder} has a vocabulary of {against.packed.spec.vocab} tokens, "
            f"{engine.packed.folder} one of {engine.packed.spec.vocab}: they cannot be compared"
        )
    ids = engine.tokenizer.encode(text)
    width = width_of(*(model.packed.spec for model in engines))
    room = min(model.plan.context for model in engines)
    if room < min(width, len(ids)):
        raise BadRequest(f"the plan has a context of {room} tokens; windows of {width} are scored")
    nll = kl = 0.0
    scored = agreed = 0
    for lo in range(0, len(ids), width):
        window = ids[lo : lo + width]
        if len(window) < 2:
            continue
        row = 0  # of the window: the first one of this chunk
        for logits, *others in _in_step([model.score(window) for model in engines]):
            # Row i predicts token i + 1 of the window. The last row predicts a token beyond it, and is not scored.
            n = min(len(logits), len(window) - 1 - row)
            targets = np.array(window[row + 1 : row + 1 + n], np.int64)  # empty where the chunk is the last row alone
            logp = log_softmax(logits[:n])
            nll -= float(logp[np.arange(n), targets].sum(dtype=np.float64))
            for other in others:
                exact = log_softmax(other[:n])
                kl += float((np.exp(exact) * (exact - logp)).sum(dtype=np.float64))
                agreed += int((exact.argmax(axis=1) == logp.argmax(axis=1)).sum())
            scored, row = scored + n, row + len(logits)
        if on_progress:
            on_progress("scoring tokens", min(lo + width, len(ids)), len(ids))
    if not scored:
        raise BadRequest("the text is too short: perplexity needs two tokens at least")
    if not math.isfinite(nll + kl):
        folder = engine.packed.folder if not math.isfinite(nll) or against is None else against.packed.folder
        raise BrokenModel(
            f"{folder} computed NaN: its weights may be damaged; run `penstock pack --verify` on the packed model"
        )
    return Evaluation(
        perplexity=math.exp(min(nll / scored, _MOST_NLL)),
        tokens=scored,
        kl=kl / scored if against else None,
        agree=agreed / scored if against else None,
    )


def _in_step(sources: Sequence[Iterator[NDArray[np.float32]]]) -> Iterator[list[NDArray[np.float32]]]:
    """Yields rows float32 [n, V] of each source, the same n rows of all at a time. Plans differ in how many rows their
    chunks have."""
    held = [next(source, None) for source in sources]
    while all(rows is not None for rows in held):
        chunks = [rows for rows in held if rows is not None]
        n = min(map(len, chunks))
        yield [rows[:n] for rows in chunks]
        held = [rows[n:] if len(rows) > n else next(source, None) for rows, source in zip(chunks, sources, strict=True)]
