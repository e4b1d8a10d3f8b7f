"""FFNs that lie neuron by neuron, and neurons that do not fire: formats against numpy, kernels and whole models with
and without zeros left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import BadRequest
from penstock.kernels import cpu
from penstock.kernels.reference import dense
from penstock.kernels.reference.matrix import Scratch
from penstock.planner.firing import measured
from penstock.serve import profiling
from penstock.spec.format import parse_format
from penstock.spec.model import FfnSpec
from penstock.spec.parts import Part, _ffn_part
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

FORMATS = ["float32", "bfloat16", "float16", "int8", "int8-g32", "int4", "int4-g32", "int4-g96"]
KERNELS = {(isa, threads): _native.Compute(isa, threads) for isa in cpu.available() for threads in (1, 3)}


def ffn_part(neurons: int, d: int, gated: bool, bias: bool, name: str) -> tuple[Part, FfnSpec]:
    ffn = FfnSpec(neurons, "relu", gated, bias, False)
    return _ffn_part(0, "ffn", ffn, d, parse_format(name)), ffn


def granules(part: Part, rng: np.random.Generator, live: float) -> np.ndarray:
    """Random weights [granules, granule_bytes] of which about a share `live` of the neurons fires for a row. Some
    granules have none at all."""
    out = np.zeros((part.granules, part.granule_bytes), np.uint8)
    for g, granule in enumerate(out):
        n = part.rows_of(g, g + 1)
        for block in part.blocks:
            values = rng.normal(size=(block.rows, block.cols)).astype(np.float32) * 0.3
            if block.name == part.blocks[0].name and g % 3 == 1:
                values = -np.abs(values)  # with inputs of one sign none of them fires
            if block.name in ("gate_bias", "up_bias"):
                values[:, n:] = 0
                values -= np.float32(2 * (1 - live)) * (values != 0)
            elif block.name == "down" and not block.stride:
                values[:, n:] = 0
            else:
                values[n:] = 0
            if block.stride:
                encode_rows(values[:n], block, granule)
            elif block.tiled:
                granule[block.offset : block.offset + block.nbytes] = encode(values, block.format)
            else:
                granule[block.offset : block.offset + block.nbytes] = values.view(np.uint8).reshape(-1)
    return out


def run(
    on: _native.Compute, part: Part, ffn: FfnSpec, weights: np.ndarray, h: np.ndarray, cuts: tuple[int, ...],
    skips: bool, scratch_bytes: int | None = None, active: np.ndarray | None = None, level: float = 0.0,
    exact: bool = True,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(partial [T, D], fired [T, neurons]) of an FFN that is computed in units that begin at granules `cuts`. `active`:
    uint8 [T, neurons in whole granules]."""
    t, d = h.shape
    partial, pending = np.full((2, t, d), np.nan, np.float32)
    fired = np.full((t, part.granules * part.granule_rows), 7, np.uint8)
    shape = cpu.ffn_shape(part, ffn)
    scratch = np.empty(scratch_bytes or _native.ffn_scratch(shape, part.granules, t), np.uint8)
    edges = (0, *cuts, part.granules)
    for lo, hi in pairwise(edges):
        on.ffn(
            weights=weights[lo:].ctypes.data, count=hi - lo, stride=part.granule_bytes, shape=shape, h=h.ctypes.data,
            t=t, partial=partial.ctypes.data, pending=pending.ctypes.data, granule=lo, starts_sum=lo == 0,
            continues_four=lo % part.sum_granules != 0, leaves_four=hi % part.sum_granules != 0 and hi < part.granules,
            skips=skips, fired=fired.ctypes.data, fired_stride=fired.shape[1],
            level=level, active=0 if active is None else active.ctypes.data,
            active_stride=0 if active is None else active.shape[1], exact=exact, values=0, biases=0, bias_stride=0,
            scratch=scratch.ctypes.data, scratch_bytes=scratch.nbytes,
        )  # fmt: skip
    return partial, fired


def reference(
    part: Part, ffn: FfnSpec, weights: np.ndarray, h: np.ndarray, active: np.ndarray | None = None
) -> np.ndarray:
    partial, pending = np.zeros((2, *h.shape), np.float32)
    out = dense.FfnSum(partial, pending, True, False, False)
    dense.ffn(weights, part, 0, ffn, h, out, Scratch(np.empty(1 << 23, np.uint8)), active)
    return partial


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


def drawn_mask(share: float | None, part: Part, t: int, rng: np.random.Generator) -> np.ndarray | None:
    """uint8 [T, neurons in whole granules], of which about a share is active; None for None."""
    return None if share is None else (rng.random((t, part.granules * 64)) < share).astype(np.uint8)


@pytest.mark.fuzz
@pytest.mark.parametrize("isa", cpu.available())
@given(st.data(), st.integers(0, 2**32 - 1))
def test_leaving_zeros_out_changes_no_bit(isa: str, data: st.DataObject, seed: int) -> None:
    """In every layout, any format, few rows and many, any cuts and threads; also beside other rows, and with little
    scratch. The same where a mask says which neurons of a row are active."""
    rng = np.random.default_rng(seed)
    name = data.draw(st.sampled_from([f"{n}{layout}" for n in FORMATS for layout in ("", "-neurons", "-records")]))
    d, neurons = data.draw(st.sampled_from([1, 16, 31, 64, 97, 130, 320])), data.draw(st.integers(1, 700))
    part, ffn = ffn_part(neurons, d, data.draw(st.booleans()), data.draw(st.booleans()), name)
    ffn = replace(ffn, activation=data.draw(st.sampled_from(["relu", "relu2"])))
    t = data.draw(st.sampled_from([1, 2, 3, 5, 8, 9, 20, 49, 120]))
    weights = granules(part, rng, data.draw(st.sampled_from([0.02, 0.2, 1.0])))
    h = np.abs(rng.normal(size=(t, d))).astype(np.float32)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, max(1, part.granules - 1)), max_size=3))))
    cuts = cuts if part.granules > 1 else ()
    mask = drawn_mask(data.draw(st.sampled_from([None, 0.0, 0.02, 0.5, 1.0])), part, t, rng)
    whole, fired = run(KERNELS[isa, 1], part, ffn, weights, h, (), skips=False, active=mask)
    for threads in (1, 3):
        partial, again = run(KERNELS[isa, threads], part, ffn, weights, h, cuts, skips=True, active=mask)
        np.testing.assert_array_equal(partial, whole)
        np.testing.assert_array_equal(again, fired)
    want = reference(part, ffn, weights, h, mask)
    assert np.abs(whole - want).max() <= 1e-4 * max(1.0, float(np.abs(want).max()))
    row = slice(t // 2, t // 2 + 1)
    own = None if mask is None else mask[row].copy()
    alone, _ = run(KERNELS[isa, 1], part, ffn, weights, h[row].copy(), (), skips=True, active=own)
    np.testing.assert_array_equal(alone[0], whole[t // 2])
    little = _native.ffn_scratch(cpu.ffn_shape(part, ffn), 1, min(t, 48))
    if t <= 48:
        np.testing.assert_array_equal(run(KERNELS[isa, 3], part, ffn, weights, h, cuts, True, little, mask)[0], whole)
    if mask is not None and mask.all():
        np.testing.assert_array_equal(run(KERNELS[isa, 3], part, ffn, weights, h, cuts, skips=False)[0], whole)


@pytest.mark.fuzz
@pytest.mark.parametrize("isa", cpu.available())
@given(st.data(), st.integers(0, 2**32 - 1))
def test_rounded_activations_give_the_same_bits(isa: str, data: st.DataObject, seed: int) -> None:
    """Of integer weights, where rows of neurons are multiplied as tiles, and those of few neurons added as floats:
    with any threads, cuts, rows beside a row, and with zeros left out or not."""
    rng = np.random.default_rng(seed)
    name = data.draw(st.sampled_from([f"{n}{layout}" for n in FORMATS[3:] for layout in ("-neurons", "-records")]))
    d, neurons = data.draw(st.sampled_from([1, 31, 64, 97, 320, 2080])), data.draw(st.integers(1, 600))
    part, ffn = ffn_part(neurons, d, data.draw(st.booleans()), data.draw(st.booleans()), name)
    t = data.draw(st.sampled_from([1, 2, 3, 5, 8, 9, 20, 33, 49, 120]))
    weights, h = granules(part, rng, data.draw(st.sampled_from([0.02, 0.2, 1.0]))), rng.random((t, d), np.float32)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, max(1, part.granules - 1)), max_size=3))))
    cuts = cuts if part.granules > 1 else ()
    mask = drawn_mask(data.draw(st.sampled_from([None, 0.0, 0.05, 0.5, 1.0])), part, t, rng)
    how = {"active": mask, "exact": False}
    whole, fired = run(KERNELS[isa, 1], part, ffn, weights, h, (), False, **how)
    for threads in (1, 3):
        partial, again = run(KERNELS[isa, threads], part, ffn, weights, h, cuts, True, **how)
        np.testing.assert_array_equal(again, fired)
        np.testing.assert_array_equal(partial, whole)
    want = reference(part, ffn, weights, h, mask)
    assert np.abs(whole - want).max() <= 5e-2 * max(1.0, float(np.abs(want).max()))
    own = None if mask is None else mask[t // 2 : t // 2 + 1].copy()
    alone, _ = run(KERNELS[isa, 1], part, ffn, weights, h[t // 2 : t // 2 + 1].copy(), (), True, None, own, 0.0, False)
    np.testing.assert_array_equal(alone[0], whole[t // 2])


@pytest.mark.parametrize("isa", cpu.available())
@pytest.mark.parametrize(
    ("name", "d"),
    [(f"float32{layout}", 1500) for layout in ("", "-neurons", "-records")]
    + [("int4-neurons", 320), ("int4-records", 320)],
)
def test_the_last_rows_of_many_may_be_few(isa: str, name: str, d: int) -> None:
    """Rows are laid out in chunks, here of 48, and of the last ones none may fire a granule."""
    part, ffn = ffn_part(320, d, False, True, name)
    rng = np.random.default_rng(4)
    weights, h = granules(part, rng, 0.5), np.abs(rng.normal(size=(50, d))).astype(np.float32)
    h[48:] = 0  # no bias is above 0
    whole, _ = run(KERNELS[isa, 1], part, ffn, weights, h, (), skips=False)
    np.testing.assert_array_equal(run(KERNELS[isa, 3], part, ffn, weights, h, (), skips=True)[0], whole)
    assert not whole[48:].any() and whole[:48].any()


@pytest.mark.parametrize("isa", cpu.available())
@pytest.mark.parametrize("layout", ["neurons", "records"])
@pytest.mark.parametrize(("d", "t"), [(6400, 1), (5376, 3), (6400, 5), (4544, 7)])
def test_wide_rows_are_added_up_in_turns(isa: str, layout: str, d: int, t: int) -> None:
    """Each thread's columns of all rows have no room in what it keeps sums in, or barely."""
    part, ffn = ffn_part(130, d, False, True, f"int4-{layout}")
    rng = np.random.default_rng(5)
    weights, h = granules(part, rng, 1.0), rng.random((t, d), np.float32)
    one, _ = run(KERNELS[isa, 1], part, ffn, weights, h, (), skips=True, exact=False)
    two, _ = run(_native.Compute(isa, 2), part, ffn, weights, h, (1,), skips=True, exact=False)
    np.testing.assert_array_equal(one, two)
    want = reference(part, ffn, weights, h)
    assert np.abs(one - want).max() <= 5e-2 * float(np.abs(want).max())


@pytest.mark.parametrize("isa", cpu.available())
@pytest.mark.parametrize("name", ["float32", "float32-neurons"])
def test_who_fires(isa: str, name: str) -> None:
    part, ffn = ffn_part(200, 32, True, False, name)
    rng = np.random.default_rng(3)
    weights, h = granules(part, rng, 1.0), rng.normal(size=(12, 32)).astype(np.float32)
    gate = part.block("gate")
    rows = np.concatenate([decode(g[gate.offset :][: gate.nbytes], 64, 32, gate.format) for g in weights])[:200]
    for t in (3, 12):
        _, fired = run(KERNELS[isa, 1], part, ffn, weights, h[:t].copy(), (2,), skips=True)
        np.testing.assert_array_equal(fired[:, :200], (h[:t] @ rows.T > 0).astype(np.uint8))
        assert not fired[:, 200:].any()


@pytest.mark.parametrize("isa", cpu.available())
@given(st.data(), st.integers(0, 2**32 - 1))
def test_what_is_below_a_level_is_zero(isa: str, data: st.DataObject, seed: int) -> None:
    """Activations without zeros of their own, in every layout: against numpy, and cuts, threads and neighbours change
    no bit."""
    rng = np.random.default_rng(seed)
    layout = data.draw(st.sampled_from(["", "-neurons", "-records"]))
    d, neurons = data.draw(st.sampled_from([1, 64, 97])), data.draw(st.integers(1, 400))
    part, ffn = ffn_part(neurons, d, data.draw(st.booleans()), False, f"float32{layout}")
    ffn = replace(ffn, activation=data.draw(st.sampled_from(["silu", "gelu"])))
    t = data.draw(st.sampled_from([1, 3, 8, 9, 50]))
    weights, h = granules(part, rng, 1.0), rng.normal(size=(t, d)).astype(np.float32)
    first = part.blocks[0]
    rows = [
        decode_rows(g, first) if first.stride else decode(g[first.offset :][: first.nbytes], 64, d, first.format)
        for g in weights
    ]
    sizes = np.abs(dense.activate(h @ np.concatenate(rows).T, ffn.activation))
    level = float(np.quantile(sizes, data.draw(st.sampled_from([0.1, 0.6, 0.95]))))
    if np.abs(sizes - level).min() < 1e-4 * max(1e-3, level):
        return  # rounding decides who is below
    whole, fired = run(KERNELS[isa, 1], part, ffn, weights, h, (), skips=False, level=level)
    np.testing.assert_array_equal(fired, sizes >= level)
    partial, pending = np.zeros((2, t, d), np.float32)
    out = dense.FfnSum(partial, pending, True, False, False)
    dense.ffn(weights, part, 0, ffn, h, out, Scratch(np.empty(1 << 23, np.uint8)), None, level)
    assert np.abs(whole - partial).max() <= 1e-4 * max(1.0, float(np.abs(partial).max()))
    cuts = (1,) if part.granules > 1 else ()
    np.testing.assert_array_equal(run(KERNELS[isa, 3], part, ffn, weights, h, cuts, True, level=level)[0], whole)
    alone, _ = run(KERNELS[isa, 1], part, ffn, weights, h[t // 2 :][:1].copy(), (), True, level=level)
    np.testing.assert_array_equal(alone[0], whole[t // 2])


def test_rows_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="row_stride"):
        _native.Matrix(64, 128, "int4", 64, 0, 32)
    with pytest.raises(ValueError, match="multiple of 32"):
        _native.Matrix(64, 128, "int8", 8, 0, 256)
    tiles, rows = _native.Matrix(64, 128, "int4", 64, 0), _native.Matrix(64, 128, "int4", 64, 0, 128)
    with pytest.raises(ValueError, match="lies by neurons"):
        _native.FfnShape(tiles, tiles, rows, "relu", 0, 0)


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
