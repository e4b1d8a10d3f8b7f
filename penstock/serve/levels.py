"""Finds below which magnitude a layer's activations are to count as zeros, for `penstock profile --below`.

A level is a quantile: of the activations that a text gives a layer the wanted share is below it. Runs of successive
tokens are taken from all over the text. The engine says what each FFN gets; its activations are worked out here, from
the weights as they are packed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.runtime.activations import activations
from penstock.runtime.host import Progress
from penstock.serve.engine import Engine
from penstock.serve.profiling import Fired, read
from penstock.spec.model import FfnSpec, ModelSpec
from penstock.spec.profile import FIRED_TOGETHER, LayerLevel, Profile

RUN_TOKENS = FIRED_TOGETHER[-1]
MOST_RUNS = 16

Float32 = NDArray[np.float32]


def profile(
    engine: Engine, text: str, name: str, below: float, most_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """Reads at most `most_tokens` of the text. Raises BadRequest as `find`."""
    ids = engine.tokenizer.encode(text)[:most_tokens]
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Profile(name, sha256, len(ids), (), levels=find(engine, ids, below, on_progress))


def find(
    engine: Engine, ids: Sequence[int], below: float, on_progress: Progress | None = None
) -> tuple[LayerLevel, ...]:
    """The level of each layer, for a share `below` of its activations. Raises BadRequest for a model whose FFNs have a
    ReLU, or experts; for a share that makes no sense, and for a text of fewer than RUN_TOKENS tokens."""
    require(below, engine.packed.spec, str(engine.packed.folder))
    if len(ids) < RUN_TOKENS:
        raise BadRequest(f"the text has {len(ids)} tokens; levels take {RUN_TOKENS} at least")
    inputs = _hear(engine, ids, on_progress)
    return tuple(_level(engine, layer, h, below) for layer, h in enumerate(inputs))


def require(below: float, spec: ModelSpec, where: str) -> None:
    """Raises BadRequest for a model that can have no levels, and for a share that makes no sense."""
    if not spec.has_levels:
        raise BadRequest(f"{where} has FFNs with a ReLU, or experts: --below is for activations without zeros")
    if not 0 < below < 1:
        raise BadRequest(f"--below {below:g} should be a share between 0 and 1")


def _hear(engine: Engine, ids: Sequence[int], on_progress: Progress | None) -> list[Float32]:
    """The inputs of each layer's FFN in some runs of tokens, float32 [tokens, D]."""
    spec, runs = engine.packed.spec, len(ids) // RUN_TOKENS
    chosen = {run * runs // min(runs, MOST_RUNS) for run in range(min(runs, MOST_RUNS))}
    kept: list[list[Float32]] = [[] for _ in spec.layers]
    heard_rows = [0] * len(spec.layers)

    def heard(layer: int, h: Float32, _: NDArray[np.uint8]) -> None:
        tokens = np.arange(heard_rows[layer], heard_rows[layer] + len(h))
        wanted = np.isin(tokens // RUN_TOKENS, list(chosen))
        heard_rows[layer] += len(h)
        kept[layer].append(h[wanted])

    with engine.session.hearing.neurons(heard, by_place=True):
        for _ in read(engine, ids, on_progress):
            pass
    return [np.concatenate(rows) for rows in kept]


def _level(engine: Engine, layer: int, h: Float32, below: float) -> LayerLevel:
    packed = engine.packed
    part, ffn = packed.parts[f"{layer}.ffn"], packed.spec.layers[layer].ffn
    assert isinstance(ffn, FfnSpec)
    sizes = np.empty((len(h), part.rows), np.float32)
    for g in range(part.granules):
        lo, n = g * part.granule_rows, part.rows_of(g, g + 1)
        sizes[:, lo : lo + n] = np.abs(activations(engine.session.reader, part, g, ffn.activation, h)[:, :n])
    level = float(np.quantile(sizes, below))
    if not np.isfinite(level):
        raise BadRequest(f"{packed.folder} computes NaN in layer {layer}: its weights may be damaged")
    counted = Fired(part.rows)
    for lo in range(0, len(h), RUN_TOKENS):
        counted.rows((sizes[lo : lo + RUN_TOKENS] >= level).astype(np.uint8))
    return LayerLevel(layer, level, counted.shares())
