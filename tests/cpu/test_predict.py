"""Predictors of who fires: whole models, and the file that keeps them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.errors import BadRequest, BrokenModel, DamagedModel, PenstockError
from penstock.graph import passes
from penstock.kernels import cpu
from penstock.serve.engine import Engine
from penstock.serve.fitting import granule_of, rounded
from penstock.serve.loading import Loading
from penstock.serve.source import resolve
from penstock.spec.ask import Ask
from penstock.spec.model import FfnSpec
from penstock.spec.predictors import LayerPredictor, Predictors, part_of
from penstock.spec.profile import FIRED_TOGETHER, Profile
from penstock.store.cache import entries, is_ours
from penstock.store.packed import open_packed
from penstock.store.predictors import FILE, keep, kept, model_sha256, with_predictors
from penstock.store.verify import verify
from tests.cpu.checkpoints import save_checkpoint, save_tokenizer
from tests.cpu.commands import MACHINE, Call
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY, load, make_model
from tests.cpu.native_neurons import random_predictor
from tests.cpu.test_neurons import relu_model, require_same_bits

KERNELS = {(isa, threads): _native.Compute(isa, threads) for isa in cpu.available() for threads in (1, 3)}
LAYOUTS = ["float32", "float32-neurons", "float32-records", "int8-neurons", "int4-records", "bfloat16-records"]


# -- whole models -------------------------------------------------------------------------------------


def give_predictors(folder: Path, shift: float, rank: int = 32, seed: int = 5, ahead: int = 0) -> Predictors:
    """Random predictors for a packed model. A large `shift` makes all neurons active, a negative one none."""
    spec, rng = open_packed(folder).spec, np.random.default_rng(seed)
    layers, granules = [], []
    for i, layer in enumerate(spec.layers):
        assert isinstance(layer.ffn, FfnSpec)
        part = part_of(spec, i, rank)
        granules.append(granule_of(random_predictor(part, layer.ffn.neurons, rng, shift), part))
        layers.append(LayerPredictor(i, rank, 0.9, 0.5, 0.1, tuple([0.2] * len(FIRED_TOGETHER))))
    found = Predictors(
        model_sha256(folder), "a text", "0" * 64, 4096, seed, 0.9, tuple(layers), ("0" * 16,) * len(layers), ahead
    )
    keep(found, granules, folder, spec)
    return found


@pytest.mark.parametrize("name", ["opt", "llama"])
@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_predictor_of_ones_changes_no_bit(tmp_path: Path, name: str, weights: str, ahead: int) -> None:
    folder = relu_model(tmp_path, name, weights)
    give_predictors(folder, 1e6, ahead=ahead)
    require_same_bits(folder, "predict", replace_predictors)


def replace_predictors(plan: Any, like: Any) -> Any:
    """A plan with the predictors of another one."""
    from penstock.graph.arenas import with_arenas

    return with_arenas(replace(plan, sparsity=like.sparsity, predictors=like.predictors))


def replace_levels(plan: Any, like: Any) -> Any:
    """A plan with the levels of another one."""
    return replace(plan, sparsity=like.sparsity, levels=like.levels)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", ["opt", "falcon"])
def test_a_predictor_hears_its_layer_or_the_one_before(tmp_path: Path, name: str, ahead: int) -> None:
    """Who fires is among those whom numpy's predictor calls active by the input of the layer that it hears, and who
    would fire and is not among them does not. The first layer's hears its own."""
    folder = relu_model(tmp_path, name, "float32-records")
    give_predictors(folder, -0.3, ahead=ahead)
    ask, how = Ask(context=64, prompt_tokens=40, kv="float32", sparsity="predict"), Loading(machine=MACHINE, exact=True)
    with closing(Engine.load(folder, ask, how)) as engine:
        spec, session = engine.packed.spec, engine.session
        assert [each.hears for each in engine.plan.predictors] == [max(0, i - ahead) for i in range(len(spec.layers))]
        heard: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        with session.hearing.neurons(lambda layer, h, fired: heard.update({layer: (h.copy(), fired.copy())})):
            for p in passes.prefill(engine.plan, 0, 40, None):
                session.step(p, [np.arange(40, dtype=np.int32)])
    rng = np.random.default_rng(5)
    assert len(spec.layers) > 1
    for i in range(len(spec.layers)):
        part, neurons = part_of(spec, i, 32), spec.layers[i].ffns[0].neurons
        predictor = rounded(random_predictor(part, neurons, rng, -0.3), part)
        scores, fired = predictor.scores(heard[max(0, i - ahead)][0]), heard[i][1].astype(bool)
        sure = np.abs(scores) > 1e-3 * np.abs(scores).max()
        assert fired.any() and not fired[sure & (scores < 0)].any()
        other = predictor.scores(heard[max(0, i - 1 + ahead)][0])  # of the layer that it does not hear
        assert i == 0 or fired[other < 0].any()


@pytest.mark.parametrize(("weights", "ahead"), [("float32", 0), ("float32-records", 1), ("int4-neurons", 0)])
def test_a_row_has_a_mask_of_its_own(tmp_path: Path, weights: str, ahead: int) -> None:
    """Answers beside another sequence, and read in pieces, are those alone; numpy says the same of all logits."""
    folder = relu_model(tmp_path, "opt", weights)
    give_predictors(folder, -0.3, ahead=ahead)
    prompts = [[3, 1, 4, 1, 5] * 6, [9, 2, 6]]
    with load(folder, batch=2, context=64, kv="float32", sparsity="predict") as engine:
        together = [a.token_ids for a in engine.generate(prompts, GREEDY)]
        assert any("lossy" in reason for reason in engine.solved.reasons)
    for prompt, answer in zip(prompts, together, strict=True):
        with load(folder, batch=1, context=64, kv="float32", sparsity="predict") as engine:
            assert engine.generate([prompt], GREEDY)[0].token_ids == answer
    found = {}
    for kernels in (None, "reference"):
        how = Loading(machine=MACHINE, kernels=kernels, exact=True)
        for sparsity in ("off", "predict"):
            from penstock.serve.engine import Engine
            from penstock.spec.ask import Ask

            ask = Ask(context=64, score=True, kv="float32", sparsity=sparsity)
            engine = Engine.load(folder, ask, how)
            found[kernels, sparsity] = engine.logits(prompts[0])
            engine.close()
    scale = float(np.abs(found[None, "off"]).max())
    assert np.abs(found[None, "predict"] - found["reference", "predict"]).max() <= 1e-3 * scale
    assert np.abs(found[None, "predict"] - found[None, "off"]).max() > 1e-2 * scale  # something was left out


def test_who_has_no_predictors_is_told_how(tmp_path: Path, call: Call) -> None:
    folder = relu_model(tmp_path, "opt", "int4-records")
    with pytest.raises(BadRequest, match="penstock train-predictors"):
        load(folder, context=64, sparsity="predict")
    plain = make_model(tmp_path, "llama", "float32")
    with pytest.raises(BadRequest, match="no ReLU"):
        load(plain, context=64, sparsity="predict")
    give_predictors(folder, 0.0)
    with load(folder, context=64, sparsity="predict") as engine:
        plan = engine.plan
    give_predictors(folder, 0.0, rank=64)
    with pytest.raises(BadRequest, match="other predictors"):
        load(folder, plan)
    give_predictors(folder, 0.0, ahead=1)
    with pytest.raises(BadRequest, match="other predictors"):
        load(folder, plan)
    with load(folder, context=64, sparsity="predict") as engine:
        assert all(each.ahead == 1 for each in engine.plan.predictors)
        assert any("one layer ahead" in reason for reason in engine.solved.reasons)
        later = engine.plan
    for bad, says in (((0, 1), "or all the one before"), ((2, 2), "or all the one before")):
        known = tuple(replace(p, ahead=n) for p, n in zip(later.predictors, bad, strict=True))
        with pytest.raises(BadRequest, match=says):
            load(folder, replace(later, predictors=known))
    with pytest.raises(BadRequest, match="not every layer"):
        load(folder, replace(plan, predictors=plan.predictors[1:]))
    with pytest.raises(BadRequest, match="should be a multiple of 32"):
        load(folder, replace(plan, predictors=(replace(plan.predictors[0], rank=40), *plan.predictors[1:])))


# -- the file -----------------------------------------------------------------------------------------


def test_predictors_are_kept_and_damage_is_seen(tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    spec = open_packed(folder).spec
    assert kept(folder, spec) is None
    told = give_predictors(folder, 0.0)
    found = kept(folder, spec)
    assert found is not None and replace(found, sums=told.sums) == told
    assert b"ahead" not in (folder / FILE).read_bytes()[:4096]  # as files from before there was such a field
    for ahead in (1, 2):
        told = give_predictors(folder, 0.0, ahead=ahead)
        if ahead > 1:
            with pytest.raises(BadRequest, match="hear a layer 2 before"):
                kept(folder, spec)
        else:
            found = kept(folder, spec)
            assert found is not None and replace(found, sums=told.sums) == told
    give_predictors(folder, 0.0)
    packed = with_predictors(open_packed(folder))
    assert packed.parts["0.predictor"] == part_of(spec, 0, 32)
    whole = (folder / FILE).read_bytes()
    rng = np.random.default_rng(2)
    header = 8 + int.from_bytes(whole[:8], "little")
    for at in [0, 5, *rng.integers(8, len(whole), 40).tolist(), header, len(whole) - 1]:
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(0, 8))
        (folder / FILE).write_bytes(changed)
        with pytest.raises(PenstockError):
            load(folder, context=64, sparsity="predict")
        with load(folder, context=64):  # nobody else reads them
            pass
    for other in (b"", whole[:100], whole[:-1], whole + b"x", b"\xff" * 64):
        (folder / FILE).write_bytes(other)
        with pytest.raises(PenstockError):
            load(folder, context=64, sparsity="predict")
    give_predictors(folder, 0.0)
    (folder / FILE).rename(tmp_path / "elsewhere")
    other_model = relu_model(tmp_path, "opt", "int8-records")
    (tmp_path / "elsewhere").rename(other_model / FILE)
    with pytest.raises(BadRequest, match="another packed model"):
        load(other_model, context=64, sparsity="predict")


@pytest.mark.parametrize("block", ["hidden", "neurons", "hidden_bias", "neurons_bias"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_predictors_that_are_not_finite_are_refused(tmp_path: Path, block: str, wrong: float) -> None:
    """Though their checksums are right. When they are loaded, in one line, and by `pack --verify`."""
    folder = relu_model(tmp_path, "opt", "float32-records")
    spec = open_packed(folder).spec
    part, rng = part_of(spec, 0, 32), np.random.default_rng(0)
    granules = [granule_of(random_predictor(part, spec.layers[0].ffns[0].neurons, rng), part) for _ in spec.layers]
    at = part.block(block)
    if at.tiled:
        granules[0][at.offset : at.offset + at.nbytes].view(np.float16)[...] = wrong  # scales among them
    else:
        granules[0][at.offset :].view(np.float32)[0] = wrong
    keep(give_predictors(folder, 0.0), granules, folder, spec)
    for read in (lambda: load(folder, context=64, sparsity="predict"), lambda: verify(folder)):
        with pytest.raises(BrokenModel, match=rf"0.predictor, granule 0: {block} holds NaN or infinite") as said:
            read()
        assert "\n" not in str(said.value)
    with load(folder, context=64):  # nobody else reads them
        pass


def test_verify_reads_predictors(tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    give_predictors(folder, 0.0)
    seen: list[str] = []
    verify(folder, lambda done, total, key: seen.append(key))
    assert "0.predictor" in seen
    whole = bytearray((folder / FILE).read_bytes())
    whole[-1] ^= 1
    (folder / FILE).write_bytes(whole)
    with pytest.raises(BrokenModel, match="predictor is damaged: its checksum does not fit; train them") as said:
        verify(folder)
    assert not isinstance(said.value, DamagedModel)  # for which copies in the cache are packed again


def test_a_copy_in_the_cache_may_have_predictors(tmp_path: Path) -> None:
    """It is a copy all the same, and damage to them packs nothing again: that would not mend them."""
    config = json.loads(TINY_CONFIGS["opt"])
    save_checkpoint(tmp_path / "hf", config)
    save_tokenizer(tmp_path / "hf", config)
    source = resolve(str(tmp_path / "hf"), weights="int8-records", cache=tmp_path / "cache")
    give_predictors(source.folder, 0.0)
    (entry,) = entries(tmp_path / "cache" / "models")
    assert is_ours(entry) and entry.why is None
    whole = (source.folder / FILE).read_bytes()
    for at, error in ((100, "header is not what was written"), (len(whole) - 1, "its checksum does not fit")):
        content = bytearray(whole)
        content[at] ^= 1
        (source.folder / FILE).write_bytes(content)
        with pytest.raises(BrokenModel, match=f"{error}; train them"):
            Engine.open(source, Ask(context=64, sparsity="predict"), Loading(machine=MACHINE))
        assert (source.folder / FILE).read_bytes() == content


def test_a_given_plan_says_that_it_is_lossy(tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    give_predictors(folder, 0.0)
    with load(folder, context=64, sparsity="predict") as engine:
        plan, told = engine.plan, engine.solved.reasons
    with load(folder, plan) as engine:
        reasons = engine.solved.reasons
    assert reasons[0] == "as given" and set(reasons[1:]) <= set(told) and any("predict" in each for each in reasons[1:])


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "x" * 2000])
def test_names_that_cannot_be_shown_are_refused(tmp_path: Path, name: str) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    found = give_predictors(folder, 0.0)
    with pytest.raises(BadRequest, match="name of its text"):
        replace(found, name=name).check(open_packed(folder).spec, "here")
    with pytest.raises(BadRequest, match="name of its text"):
        Profile(name, "0" * 64, 1, ()).check(open_packed(folder).spec, "here")
