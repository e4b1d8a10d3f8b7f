"""Training of predictors: what can be foretold is, each time the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadRequest
from penstock.serve import training
from penstock.serve.fitting import Heard, fit, rounded, with_recall
from penstock.serve.llm import LLM
from penstock.spec.parts import predictor_part
from penstock.spec.predictors import FORMAT
from penstock.store.packed import open_packed
from penstock.store.predictors import FILE, keep, kept
from tests.cpu.cached_copies import make_checkpoint
from tests.cpu.commands import Call, refused
from tests.cpu.engines import GREEDY, load, make_model
from tests.cpu.test_neurons import relu_model


def test_a_layer_that_can_be_foretold_is(tmp_path: Path) -> None:
    """Neurons that fire by two directions of 48: a predictor of rank 32 finds nearly all, and the threshold holds."""
    rng, neurons = np.random.default_rng(0), 100
    h = rng.normal(size=(6000, 48)).astype(np.float32)
    fires = h @ (rng.normal(size=(48, 2)) @ rng.normal(size=(2, neurons))) / 7 - 1.5 > 0
    heard = Heard(h.astype(np.float16), np.packbits(fires, axis=1), neurons)
    train, rest = np.arange(4500), np.arange(4500, 6000)
    part = predictor_part(0, 48, 32, neurons, FORMAT)
    found = with_recall(rounded(fit(heard, train, 32, 1), part), heard, rest[:750], 0.95)
    active = found.scores(h[rest[750:]]) > 0
    assert (active & fires[rest[750:]]).sum() / fires[rest[750:]].sum() > 0.92
    assert active.mean() < 2 * fires.mean()
    sets = found.scores(heard.rows(rest[:750])[0]) > 0
    assert (sets & fires[rest[:750]]).sum() / fires[rest[:750]].sum() >= 0.95


def test_training_is_the_same_each_time_and_runs(tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 90, 2500)]
    found = []
    for _ in range(2):
        with load(folder, context=64, prompt_tokens=64) as engine:
            found.append(training.train_ids(engine, ids, "text", "0" * 64, 0.95, seed=3))
    assert found[0].predictors == found[1].predictors
    for one, other in zip(found[0].granules, found[1].granules, strict=True):
        np.testing.assert_array_equal(one, other)
    keep(found[0].predictors, found[0].granules, folder, open_packed(folder).spec)
    with load(folder, context=64, sparsity="predict") as engine:
        ffn = next(u for u in engine.plan.units if u.part == "0.ffn")
        assert ffn.active == pytest.approx(found[0].predictors.mean(engine.packed.spec).active[0])
        assert engine.generate([[3, 1, 4]], GREEDY)[0].token_ids
        # What runs is what was measured.
        told, heard = found[0].predictors.layers[0], []
        with engine.session.hearing.neurons(lambda layer, _, fired: heard.append(fired.mean()) if not layer else None):
            engine.generate([ids[:40]], GREEDY)
        assert np.mean(heard) <= told.active[0] + 0.2
    with load(folder, context=64, prompt_tokens=64) as engine, pytest.raises(BadRequest, match="training takes"):
        training.train_ids(engine, ids[:100], "text", "0" * 64, 0.95)
    many = [7] * (training.most_tokens_of(engine.packed.spec) + 1)
    with pytest.raises(BadRequest, match=f"at most {len(many) - 1} are heard"):
        training.train_ids(engine, many, "text", "0" * 64, 0.95)


@pytest.mark.parametrize("ahead", [0, 1])
def test_predictors_learn_from_the_layer_that_they_will_hear(tmp_path: Path, ahead: int) -> None:
    """What each layer's predictor is fitted to: who fires in its layer, and the input of the layer that `ahead` says.
    All layers at once or one at a time, which hears the text once for each."""
    folder = relu_model(tmp_path, "opt", "float32-records")
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 90, training.LEAST_TOKENS)]
    with load(folder, context=64, prompt_tokens=64) as engine:
        layers = range(len(engine.packed.spec.layers))
        own = training._hear(engine, layers, ids, 0, None)
        found = training._hear(engine, layers, ids, ahead, None)
        alone = [training._hear(engine, [layer], ids, ahead, None)[layer] for layer in layers]
        for layer in layers:
            for each in (found[layer], alone[layer]):
                np.testing.assert_array_equal(each.h, own[max(0, layer - ahead)].h)
                np.testing.assert_array_equal(each.fired, own[layer].fired)
        assert not np.array_equal(own[0].h, own[1].h)
        with pytest.raises(BadRequest, match="at most 1 layer before"):
            training.train_ids(engine, ids, "text", "0" * 64, 0.95, ahead=2)


def test_train_predictors_refuses_what_makes_no_sense(tmp_path: Path, call: Call) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text of some words. " * 200)
    plain = make_model(tmp_path, "llama", "float32")
    refused(call("train-predictors", plain, "--text", text), "no ReLU")
    folder = relu_model(tmp_path, "opt", "float32-records")
    refused(call("train-predictors", folder, "--text", text, "--sparsity", "exact"), "settled")
    refused(call("train-predictors", folder, "--text", text, "--recall", "1"), "recall of 1")
    refused(call("profile", folder, text, "--sparsity", "predict"), "--sparsity predict leaves some out")
    report = call("train-predictors", folder, "--text", text, "--ahead", "--json").report
    found = kept(folder, open_packed(folder).spec)
    assert report["ahead"] == 1 and found is not None and found.ahead == 1
    report = call("train-predictors", folder, "--text", text, "--json").report
    assert report["ahead"] == 0
    assert report["file"] == str(folder / FILE) and 0 < report["recall"] <= 1 and len(report["layers"]) >= 1
    within = ("--resident", "1KiB")  # of weights in memory
    report = call("train-predictors", folder, "--text", text, "--json", *within).report
    assert report["ahead"] == 1  # neurons lie on the disk
    assert call("train-predictors", folder, "--text", text, "--json", "--no-ahead", *within).report["ahead"] == 0
    planned = call("plan", folder, "--context", "64", "--sparsity", "predict").report
    assert planned["plan"]["sparsity"] == "predict" and planned["plan"]["predictors"]
    assert call("plan", folder, "--context", "64").report["plan"]["sparsity"] == "exact"
    scores = call("eval", folder, text, "--sparsity", "predict", "--against", folder, "--json").report
    assert scores["kl"] >= 0 and json.dumps(scores)


def test_what_no_packed_copy_would_have_is_refused_before_packing(tmp_path: Path, call: Call, cache: Path) -> None:
    """Predictors and levels lie beside a copy: a checkpoint without one has none, and is not packed to find that."""
    text, requests = tmp_path / "text.txt", tmp_path / "in.jsonl"
    text.write_text("a text of some words. " * 200)
    requests.write_text("{}\n")
    relu, silu = (make_checkpoint(tmp_path / act, hidden_act=act) for act in ("relu", "silu"))
    predict, threshold = ("--sparsity", "predict"), ("--sparsity", "threshold")
    for arguments, error in (
        (("run", relu, "x", *predict), "no predictors"),
        (("eval", relu, text, *predict), "no predictors"),
        (("bench", relu, *predict), "no predictors"),
        (("batch", requests, tmp_path / "out.jsonl", "--model", relu, *predict), "no predictors"),
        (("eval", silu, text, *predict), "no ReLU"),
        (("eval", silu, text, *threshold), "no levels are known"),
        (("bench", relu, *threshold), "has a ReLU"),
        (("profile", silu, text), "no ReLU"),
        (("profile", relu, text, "--below", "0.5"), "for activations without zeros"),
        (("profile", silu, text, "--below", "1.5"), "should be a share"),
        (("train-predictors", silu, "--text", text), "no ReLU"),
        (("train-predictors", relu, "--text", text, "--recall", "0.1"), "recall of 0.1"),
    ):
        name, *others = arguments
        refused(call(str(name), *others), error)
        assert not list(cache.glob("models/*")), arguments
    for sparsity, error in (("predict", "no predictors"), ("most", "should be one of")):
        with pytest.raises(BadRequest, match=error):
            LLM(relu, sparsity=sparsity, cache=cache)
        assert not list(cache.glob("models/*")), sparsity
