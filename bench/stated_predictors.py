"""Predictors for random models, which nobody has trained: they call a stated share of the neurons of each layer active.
So what predictors cost and save can be timed at any size. Both matrices are random and the same in all layers. They are
read and multiplied as others are, and the biases decide.

`state`: the same neurons for every token, drawn once. `state_by_rates`: others for each token, the neuron at each place
at a rate of its own, which falls with the place as PowerInfer's Figure 4 has it. A profile beside the model says so.
With `ahead` they hear the layer before theirs, of which they are told rates no less.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from penstock.graph import ops, passes
from penstock.graph.arenas import with_arenas
from penstock.graph.tasks import Task
from penstock.planner.activity import of_mean
from penstock.planner.solve import solve
from penstock.runtime.probe import load_or_probe
from penstock.serve.engine import Engine
from penstock.serve.fitting import Fitted, granule_of, rounded
from penstock.serve.loading import Loading
from penstock.serve.planning import firing_of
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.model import FfnSpec, ModelSpec
from penstock.spec.part_keys import parts_by_key
from penstock.spec.parts import Part
from penstock.spec.predictors import RANK_STEP, LayerPredictor, Predictors, part_of
from penstock.spec.profile import FIRED_TOGETHER, FiringCounts, Profile
from penstock.store.packed import open_packed
from penstock.store.predictors import keep, model_sha256, with_predictors
from penstock.store.profile_file import keep as keep_profile
from penstock.units import round_up

_SEED, _SURE = 0, np.float32(1e30)  # no score is near it
# Tokens whose scores give the biases, and as many others by which these are scaled, in windows: the tokens of one have
# much in common, by attention. Tokens that the profile is said to be of.
_HEARD, _WINDOW, _TOKENS = 160, 20, 1 << 20
_WIDEST, _HALVINGS = 16.0, 24  # the most times a deviation, and the steps in which that is found

Array = np.ndarray[Any, np.dtype[Any]]


def rank_for(spec: ModelSpec, weights: Format, share: float) -> int:
    """The rank with which predictors have at least this share of the model's parameters."""
    total = sum(part.weights_of(0, part.granules) for part in parts_by_key(spec, weights).values())
    each = sum(spec.d_model + layer.ffns[0].neurons for layer in spec.layers)
    return round_up(round(share * total / each), RANK_STEP)


def state(folder: Path, active: float, share: float) -> Predictors:
    """Gives the packed model predictors with `share` of its parameters that call the share `active` active."""
    packed = open_packed(folder)
    spec, rank = packed.spec, rank_for(packed.spec, packed.weights, share)
    n, rng = _neurons(spec), np.random.default_rng(_SEED)
    part = part_of(spec, 0, rank)
    one = granule_of(_random(spec, rank, rng), part)
    called = [rng.permutation(n) < round(active * n) for _ in spec.layers]
    biases = [np.where(each, _SURE, -_SURE).astype(np.float32) for each in called]
    return _keep(folder, spec, rank, (active,) * len(FIRED_TOGETHER), one, biases)


def state_by_rates(
    folder: Path, active: float, share: float, steepness: float, how: Loading = Loading(), ahead: int = 0
) -> Predictors:  # fmt: skip
    """The same, but the neuron at place i is called active at a rate that falls with i as a power of `steepness`, with
    the mean `active`. A neuron's scores over tokens are nearly normal, as sums of many terms, so their mean and their
    deviation give its bias. Over texts that were not heard the deviation is larger. So all deviations of a layer are
    multiplied by one number, with which the share `active` is called of other texts. The plan goes by what a third set
    of texts gives, which had no part in that. What the hidden neurons have in common for all tokens is taken off first:
    int8 would round away what differs beside it. They are heard layer after layer. `how`: the model is loaded."""
    packed = open_packed(folder)
    spec, rank = packed.spec, rank_for(packed.spec, packed.weights, share)
    n, part = _neurons(spec), part_of(spec, 0, rank)
    found = rounded(_random(spec, rank, np.random.default_rng(_SEED)), part)
    one, curve = granule_of(found, part), of_mean(active, steepness)
    rates = np.array([curve.mean(i / n, (i + 1) / n) for i in range(n)])
    together = tuple(float(np.mean(1 - (1 - rates) ** tokens)) for tokens in FIRED_TOGETHER)
    quantiles = np.array([NormalDist().inv_cdf(rate) for rate in rates.clip(1e-6, 1 - 1e-6)])
    counts = b64encode((rates * _TOKENS).astype("<u4").tobytes()).decode()
    layers = tuple(FiringCounts(i, n, counts, together) for i in range(len(spec.layers)))
    keep_profile(Profile("nothing (stated)", "0" * 64, _TOKENS, (), layers), folder)
    biases = [np.where(np.arange(n) < active * n, _SURE, -_SURE).astype(np.float32) for _ in spec.layers]
    _keep(folder, spec, rank, together, one, biases, ahead=ahead)
    rng = np.random.default_rng(_SEED + 1)
    ids, other_ids = (rng.integers(0, 256, (heard // _WINDOW, _WINDOW), np.int32) for heard in (2 * _HEARD, _HEARD))
    called = np.zeros(len(spec.layers))
    hidden = [np.zeros(rank, np.float32) for _ in spec.layers]

    def state_layer(layer: int, h: Array, granule: Array) -> None:
        """Before a layer predicts for the texts that give the biases. Its input is as the layers before it leave it."""
        hidden[layer] = -(h @ found.hidden).mean(0)
        scores = replace(found, hidden_bias=hidden[layer]).scores(h)  # [T, N]
        biases[layer] = _biases(scores[:_HEARD], scores[_HEARD:], quantiles, active)
        _set(granule, part, hidden[layer], biases[layer])

    def count(layer: int, h: Array, _: Array) -> None:
        scores = replace(found, hidden_bias=hidden[layer]).scores(h)
        called[layer] = np.mean(scores + biases[layer] > 0)

    with closing(_loaded(folder, spec, len(ids), how)) as engine:
        _hear(engine, ids, state_layer)
        _hear(engine, other_ids, count)
    spread = f"{called.min():.2%} to {called.max():.2%} a layer"
    print(f"of other tokens called active: {called.mean():.2%} of the neurons, {spread}", flush=True)
    return _keep(folder, spec, rank, together, one, biases, hidden, called / active, ahead)


def _loaded(folder: Path, spec: ModelSpec, windows: int, how: Loading) -> Engine:
    """The model in RAM, with a pass that has room for all texts."""
    ask = Ask(batch=windows, context=_WINDOW, sparsity="predict", prompt_tokens=_WINDOW)
    packed = with_predictors(open_packed(folder))
    machine = how.machine or load_or_probe(how.cache_folder)
    plan = solve(ask, spec, packed.weights, machine, firing=firing_of(folder, spec, "predict")).plan
    plan = with_arenas(replace(plan, chunk_rows=windows * _WINDOW))
    return Engine.load(folder, ask, replace(how, plan=plan))


def _hear(engine: Engine, ids: Array, heard: Callable[[int, Array, Array], None]) -> None:
    """Reads all texts `ids`, int32 [windows, tokens], in one pass. Before a layer predicts, `heard` gets its number,
    its input, float32 [T, D], and its predictor's granule."""
    session, plan, width = engine.session, engine.plan, engine.packed.spec.d_model
    compute = session._binding.call

    def run(task: Task) -> None:  # call by call, where the session would run a program
        for call in task.calls:
            if isinstance(call.operands, ops.Predict):
                assert call.batch is not None
                h = session._arenas.array(call.operands.h, np.float32, (call.batch.total_rows, width))
                heard(
                    call.operands.layer,
                    h,
                    session._arenas.view(session.lowering.layout.predictors[call.operands.layer]),
                )
            compute(call)

    session._binding.run = run  # type: ignore[method-assign]
    (p,) = passes.prompts(plan, range(len(ids)), [ids.shape[1]] * len(ids), None)
    session.step(p, [ids.reshape(-1)])


def _biases(scores: Array, others: Array, quantiles: Array, active: float) -> Array:
    """The biases with which each neuron is called at its rate by `scores` [T, N], if these are normal: deviation times
    `quantiles`, less the mean. Deviations are multiplied so that of `others` [T, N] the share `active` is called."""
    mean, deviation = scores.mean(0), scores.std(0)
    lo, hi = 1 / _WIDEST, _WIDEST  # a larger number calls fewer: most quantiles are negative
    for _ in range(_HALVINGS):
        times = (lo * hi) ** 0.5
        share = float(np.mean(others + (times * deviation * quantiles - mean) > 0))
        lo, hi = (times, hi) if share > active else (lo, times)
    return np.asarray(times * deviation * quantiles - mean, np.float32)


def _neurons(spec: ModelSpec) -> int:
    neurons = {layer.ffn.neurons for layer in spec.layers if isinstance(layer.ffn, FfnSpec)}
    assert len(neurons) == 1, "layers are alike"
    return neurons.pop()


def _random(spec: ModelSpec, rank: int, rng: np.random.Generator) -> Fitted:
    n = _neurons(spec)
    hidden, neurons = (rng.standard_normal(shape, np.float32) for shape in ((spec.d_model, rank), (rank, n)))
    return Fitted(hidden, np.zeros(rank, np.float32), neurons, np.zeros(n, np.float32))


def _keep(
    folder: Path, spec: ModelSpec, rank: int, active: tuple[float, ...], one: Array, biases: list[Array],
    hidden: list[Array] | None = None, times: Array | None = None, ahead: int = 0,
) -> Predictors:  # fmt: skip
    """Keeps predictors that differ by their biases alone. `active`: as of `LayerPredictor`. `times`: of each layer, how
    many times as many are called active."""
    part, granules = part_of(spec, 0, rank), []
    for i, bias in enumerate(biases):
        granules.append(one.copy())
        _set(granules[-1], part, np.zeros(rank, np.float32) if hidden is None else hidden[i], bias)
    # What fires is not known: nothing is said of recall.
    called = [
        tuple(min(1.0, share * float(n)) for share in active)
        for n in (np.ones(len(biases)) if times is None else times)
    ]
    layers = tuple(LayerPredictor(i, rank, 0.0, 0.0, 0.0, shares) for i, shares in enumerate(called))
    sums = ("0" * 16,) * len(layers)
    found = Predictors(model_sha256(folder), "nothing (stated)", "0" * 64, 1, _SEED, 0.5, layers, sums, ahead)
    keep(found, granules, folder, spec)
    return found


def _set(granule: Array, part: Part, hidden: Array, neurons: Array) -> None:
    """Sets the biases of a predictor's granule."""
    for name, values in (("hidden_bias", hidden), ("neurons_bias", neurons)):
        granule[part.block(name).offset :][: values.nbytes] = values.astype(np.float32).view(np.uint8)
