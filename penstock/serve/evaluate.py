"""What a lossy choice costs: perplexity of a text, and KL divergence against another model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, BrokenModel
from penstock.runtime.host import Progress
from penstock.serve.engine import Engine
from penstock.serve.sampling import log_softmax

WINDOW_TOKENS = 512
_MOST_NLL = 700.0  # nats: e to it is just a float; a model that is so wrong is wrong enough


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
    on_progress: Progress | None = None,
) -> Evaluation:
    """Non-overlapping windows of 512 tokens (or the model's maximum), the first token of each unscored.

    The engines must have been loaded with `Ask(score=True)`. Raises BadRequest for a text of one token, or
    where the models do not share a vocabulary.
    """
    engines = [engine] if against is None else [engine, against]
    if against is not None and against.packed.spec.vocab != engine.packed.spec.vocab:
        raise BadRequest(
            f"{against.packed.folder} has a vocabulary of {against.packed.spec.vocab} tokens, "
            f"{engine.packed.folder} one of {engine.packed.spec.vocab}: they cannot be compared"
        )
    ids = engine.tokenizer.encode(text)
    width = min([WINDOW_TOKENS, *(each.packed.spec.max_positions for each in engines)])
    room = min(each.plan.context for each in engines)
    if room < min(width, len(ids)):
        raise BadRequest(f"the plan has a context of {room} tokens; windows of {width} are scored")
    nll = kl = 0.0
    scored = agreed = 0
    for lo in range(0, len(ids), width):
        window = ids[lo : lo + width]
        if len(window) < 2:
            continue
        at = 0
        for logits, *others in _in_step([each.score(window) for each in engines]):
            # Row i predicts token i + 1 of the window; the last row predicts nothing that is scored.
            n = min(len(logits), len(window) - 1 - at)
            targets = np.array(window[at + 1 : at + 1 + n], np.int64)  # none after the last row alone
            logp = log_softmax(logits[:n])
            nll -= float(logp[np.arange(n), targets].sum(dtype=np.float64))
            for other in others:
                exact = log_softmax(other[:n])
                kl += float((np.exp(exact) * (exact - logp)).sum(dtype=np.float64))
                agreed += int((exact.argmax(axis=1) == logp.argmax(axis=1)).sum())
            scored, at = scored + n, at + len(logits)
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
    """Rows [n, V] of all sources, the same n of each at a time: plans differ in how many rows a chunk has."""
    held = [next(source, None) for source in sources]
    while all(rows is not None for rows in held):
        chunks = [rows for rows in held if rows is not None]
        n = min(map(len, chunks))
        yield [rows[:n] for rows in chunks]
        held = [rows[n:] if len(rows) > n else next(source, None) for rows, source in zip(chunks, sources, strict=True)]
