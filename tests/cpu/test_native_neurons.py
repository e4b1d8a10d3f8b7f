"""The native kernels of FFNs that lie neuron by neuron, and of predictors: every instruction set against numpy, and
the same bits with and without zeros left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.graph.scratch import _predict_bytes
from penstock.kernels import cpu
from penstock.kernels.reference import dense
from penstock.kernels.reference.matrix import Scratch
from penstock.serve.fitting import granule_of, rounded
from penstock.spec.parts import predictor_part
from penstock.spec.predictors import FORMAT
from penstock.store.quantize import decode, decode_rows
from tests.cpu.native_neurons import (
    FORMATS,
    KERNELS,
    as_rounded,
    drawn_mask,
    ffn_part,
    granules,
    predicted,
    random_predictor,
    reference,
    run,
)


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
    want = reference(part, ffn, weights, as_rounded(h, part), mask)
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
@pytest.mark.parametrize(("d", "t"), [(6400, 1), (5376, 3), (6400, 5), (9216, 6), (4544, 7)])
def test_wide_rows_are_added_up_in_turns(isa: str, layout: str, d: int, t: int) -> None:
    """Each thread's columns of all rows have no room in what it keeps sums in, or barely."""
    part, ffn = ffn_part(130, d, False, True, f"int4-{layout}")
    rng = np.random.default_rng(5)
    weights, h = granules(part, rng, 1.0), rng.random((t, d), np.float32)
    one, _ = run(KERNELS[isa, 1], part, ffn, weights, h, (), skips=True, exact=False)
    two, _ = run(_native.Compute(isa, 2), part, ffn, weights, h, (1,), skips=True, exact=False)
    np.testing.assert_array_equal(one, two)
    want = reference(part, ffn, weights, as_rounded(h, part))
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


@pytest.mark.parametrize("isa", cpu.available())
@given(
    st.sampled_from([1, 31, 64, 130, 320]), st.sampled_from([32, 96, 160]), st.integers(1, 300),
    st.sampled_from([1, 2, 7, 8, 9, 33, 100]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_predict(isa: str, d: int, rank: int, neurons: int, t: int, seed: int) -> None:
    """Against numpy wherever a score is not within rounding of 0; and rows, threads and neighbours change nothing."""
    rng = np.random.default_rng(seed)
    part = predictor_part(0, d, rank, neurons, FORMAT)
    found = random_predictor(part, neurons, rng)
    granule, h = granule_of(found, part), rng.normal(size=(t, d)).astype(np.float32)
    scores = rounded(found, part).scores(h.astype(np.float64))
    sure = np.abs(scores) > 1e-4 * np.abs(scores).max()
    want = np.empty((t, part.block("neurons").rows), np.uint8)
    dense.predict(granule, part, h, want, Scratch(np.empty(_predict_bytes(part), np.uint8)))
    for exact in (True, False):
        got = predicted(KERNELS[isa, 1], part, granule, h, exact)
        assert not got[:, neurons:].any() and set(np.unique(got)) <= {0, 1}
        np.testing.assert_array_equal(predicted(KERNELS[isa, 3], part, granule, h, exact), got)
        alone = predicted(KERNELS[isa, 1], part, granule, h[t // 2 :][:1].copy(), exact)
        np.testing.assert_array_equal(alone[0], got[t // 2])
        if exact:
            np.testing.assert_array_equal(got[:, :neurons][sure], scores[sure] > 0)
            np.testing.assert_array_equal(want[:, :neurons][sure], scores[sure] > 0)
        else:
            far = np.abs(scores) > 0.1 * np.abs(scores).max()
            np.testing.assert_array_equal(got[:, :neurons][far], scores[far] > 0)
