"""Logits of a prompt and of steps behind it, for searches that compare them with another program's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.serve.engine import Engine
from tests.at_size.__main__ import step
from tests.at_size.draws import Rows

STEPS = 3  # tokens after each prompt, each a pass of its own
PROMPTS = (1, 7, 33, 130, 300)

Array = NDArray[Any]


def prompts(vocabulary: int, lengths: tuple[int, ...] = PROMPTS) -> list[Array]:
    """Random ids of each prompt and of the steps behind it, int64 [length + STEPS]."""
    return [np.random.default_rng(length).integers(0, vocabulary, length + STEPS) for length in lengths]


def answers(engine: Engine, ids: Array) -> Array:
    """Logits of the last row of a prompt and of each step behind it, float32 [1 + STEPS, V]."""
    table = ids.astype(np.int32)[None]
    length = len(ids) - STEPS
    rows, most = [], engine.plan.chunk_rows
    for lo in range(0, length, most):
        logits = step(engine, [Rows(0, lo, min(most, length - lo))], table)
    rows.append(logits[0].copy())
    for at in range(length, len(ids)):
        rows.append(step(engine, [Rows(0, at, 1)], table)[0].copy())
    return np.stack(rows)


def distance(one: Array, other: Array) -> float:
    """Root mean square of what differs, over the spread of `other`. NaN counts as infinitely far."""
    off = float(np.sqrt(np.mean((one - other) ** 2)) / np.std(other))
    return off if np.isfinite(off) else np.inf
