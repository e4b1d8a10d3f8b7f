"""FFNs that lie neuron by neuron, and neurons that do not fire: formats against numpy, and whole models with and
without zeros left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.planner.firing import measured
from penstock.serve import profiling
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from penstock.spec.profile import dumps
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.profile_file import FILE, keep
from penstock.store.quantize import decode, decode_rows, encode, encode_rows
from penstock.store.synth import synth
from tests.cpu.checkpoints import save_checkpoint, save_tokenizer
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY, load, make_model, streaming
from tests.cpu.native_neurons import FORMATS, ffn_part


@given(st.sampled_from(FORMATS), st.integers(1, 200), st.booleans(), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_rows_are_as_tiles_are(name: str, d: int, gated: bool, n: int, seed: int) -> None:
    part, _ = ffn_part(64, d, gated, False, f"{name}-neurons")
    rng = np.random.default_rng(seed)
    granule = rng.integers(0, 256, part.granule_bytes).astype(np.uint8)
    values = {b.name: rng.normal(size=(n, d)).astype(np.float32) for b in part.blocks if b.stride}
    assert set(values) == ({"up", "down"} if gated else {"down"})
    for block in part.blocks:
        if block.stride:
            encode_rows(values[block.name], block, granule)
    for block in part.blocks:  # neither has written over the other
        if block.stride:
            tiled = decode(encode(values[block.name], parse_format(name)), n, d, parse_format(name))
            rows = decode_rows(granule, block)
            np.testing.assert_array_equal(rows[:n], tiled)
            assert not rows[n:].any()


def test_records_lie_as_the_format_says() -> None:
    part, _ = ffn_part(100, 96, True, True, "int4-neurons")
    gate, up, down, *biases = part.blocks
    assert gate.tiled and not gate.stride and gate.format.name == "int4"
    row = -(-(96 // 2 + 4 * 2) // 64) * 64
    assert (up.offset, up.stride, down.offset, down.stride) == (gate.nbytes, 2 * row, gate.nbytes + row, 2 * row)
    assert biases[0].offset == up.offset + 64 * 2 * row and part.by_neurons and part.width == 96
    assert parse_format("int4-g32-neurons").name == "int4-g32-neurons"


def test_neurons_are_refused_where_they_make_no_sense() -> None:
    with pytest.raises(BadRequest, match="multiple of 32"):
        parse_format("int8-g8-neurons")
    with pytest.raises(BadRequest, match="unknown number format"):
        parse_format("int4" + "-neurons" * 3000)
    with pytest.raises(BadRequest, match="a KV cache in int8-neurons"):
        parse_format("int8-neurons").check_kv()


# -- whole models -------------------------------------------------------------------------------------


def relu_model(folder: Path, name: str, weights: str) -> Path:
    """A random model with ReLU, odd sizes."""
    config = json.loads(TINY_CONFIGS[name]) | ({"hidden_act": "relu"} if name == "llama" else {})
    target = folder / f"{name}-{weights}"
    if not target.exists():
        (folder / f"{name}.json").write_text(json.dumps(config))
        synth(folder / f"{name}.json", target, parse_format(weights))
    return target


def require_same_bits(folder: Path, sparsity: str, as_chosen: Callable[[Plan, Plan], Plan]) -> None:
    """Asserts that a way to leave neurons out gives the tokens and logits that all neurons give: in memory and streamed
    granule by granule, prompts of several rows and single ones, two sequences. `as_chosen`: a streaming plan with what
    the plan that is chosen says of neurons."""
    prompts, answers, logits = [[3, 1, 4, 1, 5] * 6, [9, 2]], [], []
    for each in ("off", sparsity):
        with load(folder, batch=2, context=64, kv="float32", sparsity=each) as engine:
            assert engine.plan.sparsity == each
            chosen = engine.plan
            answers.append([a.token_ids for a in engine.generate(prompts, GREEDY)])
        with load(folder, batch=1, context=64, score=True, sparsity=each) as engine:
            logits.append(engine.logits(prompts[0]))
        streams = streaming(open_packed(folder), batch_seqs=2, context=64)
        with load(folder, as_chosen(streams, chosen)) as engine:
            answers.append([a.token_ids for a in engine.generate(prompts, GREEDY)])
    assert all(answer == answers[0] for answer in answers)
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", ["opt", "llama", "falcon"])
@pytest.mark.parametrize("weights", ["float32", "int4", "float32-neurons", "bfloat16-neurons", "int4-neurons"])
def test_exact_is_off_to_the_bit(tmp_path: Path, name: str, weights: str) -> None:
    require_same_bits(
        relu_model(tmp_path, name, weights), "exact", lambda plan, chosen: replace(plan, sparsity=chosen.sparsity)
    )


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_either_layout_says_the_same(tmp_path: Path, name: str) -> None:
    """The numbers are the same, and summed in another order."""
    ids = [3, 1, 4, 1, 5] * 6
    found = []
    for weights in ("float32", "float32-neurons"):
        config = json.loads(TINY_CONFIGS[name]) | ({"hidden_act": "relu"} if name == "llama" else {})
        if not (tmp_path / "hf").exists():
            save_checkpoint(tmp_path / "hf", config)
            save_tokenizer(tmp_path / "hf", config)
        target = pack(tmp_path / "hf", tmp_path / f"{name}-{weights}", parse_format(weights))
        with load(target, context=64, score=True) as engine:
            found.append(engine.logits(ids))
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * max(1.0, float(np.abs(found[0]).max()))


def test_who_fires_is_counted(tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-neurons")
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 90, 100)]
    with load(folder, context=64, prompt_tokens=64, sparsity="off") as engine:
        seen = profiling.profile_ids(engine, ids, "text", "0" * 64)
    assert seen.tokens == 100 and [layer.layer for layer in seen.neurons] == [0, 1, 2][: len(seen.neurons)]
    seen.check(open_packed(folder).spec, "here")
    for layer in seen.neurons:
        counts = layer.counted()
        assert abs(layer.fired[0] - sum(counts) / len(counts) / 100) < 1e-9
        assert list(layer.fired) == sorted(layer.fired) and max(counts) <= 100
    firing = measured(seen)
    assert firing is not None and firing.share(1) < firing.share(3) < firing.share(4) <= firing.share(1000)
    keep(seen, folder)
    with load(folder, context=64) as engine:
        ffn = next(u for u in engine.plan.units if u.part == "0.ffn")
        assert ffn.active == pytest.approx(firing.share(1))
        assert any("by a profile of 100 tokens" in reason for reason in engine.solved.reasons)
    (folder / FILE).write_text(dumps(replace(seen, neurons=seen.neurons[:1])))
    with pytest.raises(BadRequest, match="neurons differ"):
        load(folder, context=64)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "moe.json").write_text(TINY_CONFIGS["qwen2_moe"])
    with pytest.raises(BadRequest, match="only dense FFNs"):
        synth(tmp_path / "moe.json", tmp_path / "moe", parse_format("int4-neurons"))
    (tmp_path / "opt.json").write_text(TINY_CONFIGS["opt"])
    plain = make_model(tmp_path, "llama", "float32")
    with pytest.raises(BadRequest, match="no ReLU"):
        load(plain, context=64, sparsity="exact")
    folder = relu_model(tmp_path, "opt", "int4-neurons")
    plan = streaming(open_packed(folder), context=64)
    with pytest.raises(BadRequest, match="yet its sparsity is off"):
        load(folder, replace(plan, units=(replace(plan.units[0], active=0.5), *plan.units[1:])))
    with pytest.raises(BadRequest, match="sparsity is 'most'"):
        load(folder, replace(plan, sparsity="most"))
