"""Predictors for random models, which nobody has trained: they call a stated share of the neurons active, others for
each token. So what predictors cost and save can be timed at any size. What they say has nothing to do with who fires.

Both matrices are random and the same in all layers. Each neuron's bias is set by what a layer's FFN gets of random
tokens, so that the neuron is called active for the stated share of them. Other tokens say what share that is then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.graph import passes
from penstock.graph.resident import resident_plan
from penstock.serve.fitting import Fitted, granule_of, rounded
from penstock.serve.profiling import Fired
from penstock.serve.session import Session
from penstock.spec.format import Format
from penstock.spec.model import Ffn, ModelSpec
from penstock.spec.parts import parts_by_key
from penstock.spec.predictors import RANK_STEP, LayerPredictor, Predictors, part_of
from penstock.store.packed import open_packed
from penstock.store.predictors import keep, model_sha256
from penstock.units import round_up

TOKENS = 256  # half of them set the biases
_SEED = 0

Heard = dict[int, tuple[NDArray[np.float32], NDArray[np.uint8]]]


def rank_for(spec: ModelSpec, weights: Format, share: float) -> int:
    """The rank with which predictors have at least this share of the model's parameters."""
    total = sum(part.weights_of(0, part.granules) for part in parts_by_key(spec, weights).values())
    each = sum(spec.d_model + layer.ffns[0].neurons for layer in spec.layers)
    return round_up(round(share * total / each), RANK_STEP)


def state(folder: Path, active: float, share: float) -> Predictors:
    """Gives the packed model predictors with `share` of its parameters that call the share `active` active."""
    packed = open_packed(folder)
    spec, rank = packed.spec, rank_for(packed.spec, packed.weights, share)
    rng = np.random.default_rng(_SEED)
    heard = _hear(folder, rng.integers(0, spec.vocab, TOKENS).tolist())
    layers, granules = [], []
    for i, layer in enumerate(spec.layers):
        assert isinstance(layer.ffn, Ffn)
        h, fired = heard.pop(i)
        part, n = part_of(spec, i, rank), layer.ffn.neurons
        rng = np.random.default_rng(_SEED)
        hidden = rng.standard_normal((spec.d_model, rank), np.float32) * np.float32(spec.d_model**-0.5)
        neurons = rng.standard_normal((rank, n), np.float32)
        found = rounded(Fitted(hidden, np.zeros(rank, np.float32), neurons, np.zeros(n, np.float32)), part)
        half = len(h) // 2
        bias = -np.quantile(found.scores(h[:half]), 1 - active, axis=0).astype(np.float32)
        found = Fitted(found.hidden, found.hidden_bias, found.neurons, bias)
        says = (found.scores(h[half:]) > 0).astype(np.uint8)
        counted = Fired(n)
        counted.rows(says)
        hits, fires = int((says & fired[half:]).sum()), int(fired[half:].sum())
        recall, alarms = hits / max(1, fires), 1 - hits / max(1, int(says.sum()))
        layers.append(LayerPredictor(i, rank, recall, alarms, fires / says.size, counted.shares()))
        granules.append(granule_of(found, part))
    told = Predictors(
        model_sha256(folder), "nothing (stated)", "0" * 64, TOKENS, _SEED, 0.5, tuple(layers), ("0" * 16,) * len(layers)
    )
    keep(told, granules, folder, spec)
    return told


def _hear(folder: Path, ids: Sequence[int]) -> Heard:
    """Of each layer what its FFN gets, float32 [T, D], and who fires, uint8 [T, N], by place."""
    packed, heard = open_packed(folder), Heard()
    rows = min(len(ids), packed.spec.max_positions)
    plan = resident_plan(packed.spec, packed.weights, kv=Format("float16"), context=rows, rows=rows)
    session = Session(packed, plan)

    def hear(layer: int, h: NDArray[np.float32], fired: NDArray[np.uint8]) -> None:
        heard[layer] = (h.copy(), fired.copy())

    with session.hearing_neurons(hear, by_place=True):
        for p in passes.prefill(plan, 0, rows, None):
            session.step(p, [np.array(ids[:rows], np.int32)])
    session.close()
    return heard
