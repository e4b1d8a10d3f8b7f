"""Predictors of a packed model come along when its neurons get another order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.spec.live_sets import numbers
from penstock.store import predictors
from penstock.store.packed import open_packed
from penstock.store.predictors import FILE, kept, model_sha256, with_predictors
from penstock.store.quantize import decode
from penstock.store.reorder import move_foretold, reorder
from tests.cpu.commands import Outcome, here
from tests.cpu.engines import load
from tests.cpu.test_neurons import relu_model
from tests.cpu.test_order import logits, profile_of, weights_of
from tests.cpu.test_predict import give_predictors
from tests.cpu.test_record_neurons import recorded


def moved_model(folder: Path, target: Path, seed: int = 0) -> Path:
    spec = open_packed(folder).spec
    said: list[str] = []
    reorder(folder, target, profile_of(spec.layers[0].ffns[0].neurons, len(spec.layers), seed), say=said.append)
    assert not said
    return target


@pytest.mark.parametrize(
    ("name", "weights", "ahead"),
    [("opt", "float32-records", 1), ("llama", "int4-records", 0), ("llama", "int4", 0), ("opt", "bfloat16-neurons", 0)],
)
def test_the_same_neurons_are_foretold(tmp_path: Path, name: str, weights: str, ahead: int) -> None:
    """By the checkpoint's numbers; twice reordered too. All numbers of predictors are as they were."""
    folder = relu_model(tmp_path, name, weights)
    before = give_predictors(folder, -0.3, ahead=ahead)
    once = moved_model(folder, tmp_path / "once")
    twice = moved_model(once, tmp_path / "twice", 1)
    spec, found = open_packed(folder).spec, []
    plain = with_predictors(open_packed(folder))
    for each in (folder, once, twice):
        packed, known = with_predictors(open_packed(each)), kept(each, spec)
        assert known is not None and known.model_sha256 == model_sha256(each) and packed.ahead == ahead
        assert replace(known, sums=before.sums, model_sha256="") == replace(before, model_sha256="")
        for part in known.parts(spec):
            neurons = spec.layers[part.layer].ffns[0].neurons
            order = np.asarray(packed.orders.get(part.layer, range(neurons)))
            one, other = weights_of(plain, part)[0], weights_of(packed, part)[0]
            for block in part.blocks:
                cut = slice(block.offset, block.offset + block.nbytes)
                a, b = (decode(g[cut], block.rows, block.cols, block.format, block.tiled) for g in (one, other))
                a, b = (x.reshape(-1, 1) if block.name == "neurons_bias" else x for x in (a, b))
                if block.name.startswith("neurons"):
                    np.testing.assert_array_equal(b[:neurons], a[order])
                    np.testing.assert_array_equal(b[neurons:], a[neurons:])
                else:
                    np.testing.assert_array_equal(a, b)
        with load(each, context=64, kv="float32", sparsity="predict") as engine:
            found.append([[list(numbers(row)) for row in layer.rows()] for layer in recorded(engine, 1).live])
    assert found[0][0] == found[1][0] == found[2][0]  # later layers' inputs are sums in another order
    said = [logits(each, "predict") for each in (folder, once, twice)]
    for other in said[1:]:
        assert np.abs(other - said[0]).max() <= 1e-3 * max(1.0, float(np.abs(said[0]).max()))


def test_what_is_stopped_before_predictors_are_carried_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is there without its predictors."""
    folder, target = relu_model(tmp_path, "opt", "float32-records"), tmp_path / "moved"
    give_predictors(folder, -0.3)

    def stopped(*_: object) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(predictors, "keep", stopped)
        with pytest.raises(KeyboardInterrupt):
            moved_model(folder, target)
    assert not target.exists()
    (tmp_path / "moved.partial" / FILE).write_bytes(b"begun")
    moved_model(folder, target)
    assert kept(target, open_packed(target).spec) is not None


def test_moving_back_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    give_predictors(folder, -0.3)
    packed = with_predictors(open_packed(folder))
    part = packed.parts["0.predictor"]
    neurons, before = packed.spec.layers[0].ffns[0].neurons, weights_of(packed, part)
    places = np.random.default_rng(3).permutation(neurons)
    there = move_foretold(part, before, places)
    assert not np.array_equal(there, before)
    np.testing.assert_array_equal(move_foretold(part, there, np.argsort(places)), before)


def test_what_cannot_come_along_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    give_predictors(folder, -0.3)
    spec = open_packed(folder).spec
    profile = tmp_path / "profile.json"
    from penstock.spec.profile import dumps

    profile.write_text(dumps(profile_of(spec.layers[0].ffns[0].neurons, len(spec.layers))))

    def packs(target: str) -> Outcome:
        return here(capsys, "pack", folder, tmp_path / target, "--profile", profile, "--json")

    done = packs("whole")
    assert done.report["predictors"] and "left out" not in done.err
    file = folder / FILE
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    done = packs("damaged")
    assert done.code == 0 and not done.report["predictors"] and not (tmp_path / "damaged" / FILE).exists()
    assert f"the predictors of {folder} were left out: " in done.err and "damaged" in done.err
    file.unlink()
    done = packs("without")
    assert done.code == 0 and not done.report["predictors"] and "left out" not in done.err
