"""Predictors for random models, which nobody has trained: they call a stated share of the neurons of each layer active,
drawn once, the same for every token. So what predictors cost and save can be timed at any size.

Both matrices are random and the same in all layers. They are read and multiplied as others are, but the biases decide.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.serve.fitting import Fitted, granule_of
from penstock.spec.format import Format
from penstock.spec.model import Ffn, ModelSpec
from penstock.spec.parts import parts_by_key
from penstock.spec.predictors import RANK_STEP, LayerPredictor, Predictors, part_of
from penstock.spec.profile import FIRED_TOGETHER
from penstock.store.packed import open_packed
from penstock.store.predictors import keep, model_sha256
from penstock.units import round_up

_SEED, _SURE = 0, np.float32(1e30)  # no score is near it


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
    neurons = {layer.ffn.neurons for layer in spec.layers if isinstance(layer.ffn, Ffn)}
    assert len(neurons) == 1, "layers are alike"
    n = neurons.pop()
    matrices = rng.standard_normal((spec.d_model, rank), np.float32), rng.standard_normal((rank, n), np.float32)
    part = part_of(spec, 0, rank)
    one = granule_of(Fitted(matrices[0], np.zeros(rank, np.float32), matrices[1], np.zeros(n, np.float32)), part)
    block, granules = part.block("neurons_bias"), []
    for _ in spec.layers:
        called = rng.permutation(n) < round(active * n)
        granule = one.copy()
        granule[block.offset :][: 4 * n] = np.where(called, _SURE, -_SURE).astype(np.float32).view(np.uint8)
        granules.append(granule)
    # What fires is not known: nothing is said of recall.
    shares = (active,) * len(FIRED_TOGETHER)
    layers = tuple(LayerPredictor(i, rank, 0.0, 0.0, 0.0, shares) for i in range(len(spec.layers)))
    found = Predictors(
        model_sha256(folder), "nothing (stated)", "0" * 64, 1, _SEED, 0.5, layers, ("0" * 16,) * len(layers)
    )
    keep(found, granules, folder, spec)
    return found
