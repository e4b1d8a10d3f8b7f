"""The native kernels against the reference: every instruction set here, odd sizes, tails, extreme values, and the
same bits whatever shares a call."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import BadRequest
from penstock.kernels import cpu
from penstock.spec.format import Format, parse_format
from penstock.spec.parts import Block
from penstock.store.quantize import decode, encode
from tests.cpu.native_products import ALL, COMPUTE, ISAS, SCRATCH, accumulated, address, random_granules

FORMATS = ["float32", "bfloat16", "float16", "int8", "int4", "int4-g32", "int8-g8"]


def encoded(values: np.ndarray, fmt: Format, granules: int) -> tuple[np.ndarray, np.ndarray]:
    """(weights uint8 [granules, stride], what they decode to [granules, R, C]); values [granules, R, C]."""
    rows, cols = values.shape[1:]
    raw = np.stack([encode(v, fmt) for v in values])
    stride = -(-raw.shape[1] // 64) * 64 + 64
    weights = np.zeros((granules, stride), np.uint8)
    weights[:, : raw.shape[1]] = raw
    return weights, np.stack([decode(raw[i], rows, cols, fmt) for i in range(granules)])


@pytest.mark.parametrize("isa", ISAS)
@given(
    st.sampled_from(FORMATS), st.integers(1, 3), st.integers(1, 70), st.integers(1, 150), st.integers(1, 21),
    st.sampled_from([1, 2, 3]), st.sampled_from([1e-3, 1.0, 100.0]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_project(
    isa: str, name: str, granules: int, rows: int, cols: int, t: int, threads: int, size: float, seed: int
) -> None:
    fmt, rng = parse_format(name), np.random.default_rng(seed)
    weights, wide = encoded(rng.normal(size=(granules, rows, cols)).astype(np.float32), fmt, granules)
    x = (size * rng.normal(size=(t, cols))).astype(np.float32)
    m = cpu.matrix(Block("up", rows, cols, fmt, 0))
    want = np.concatenate([x.astype(np.float64) @ w.astype(np.float64).T for w in wide], axis=1)
    width = want.shape[1]
    for exact in (True, False):
        out = np.full((t, width + 3), 7.0, np.float32)
        COMPUTE[isa, threads].project(
            weights=address(weights), count=granules, stride=weights.shape[1], matrix=m, x=address(x), x_stride=cols,
            t=t, out=address(out), out_stride=width + 3, out_cols=width, exact=exact, scratch=address(SCRATCH),
            scratch_bytes=SCRATCH.nbytes,
        )  # fmt: skip
        assert (out[:, width:] == 7.0).all()
        magnitude = np.concatenate([np.abs(x) @ np.abs(w).T for w in wide], axis=1) + 1e-30
        if fmt.is_quantised:  # code · scale and the minimum are as large as the group's range, also where they cancel
            magnitude += 2 * np.abs(wide).max() * np.abs(x).sum(axis=1, keepdims=True)
        # int8 activations: half a step of 1/127 of each group's largest, times the weights beside it.
        bound = 2e-6 if exact or not fmt.is_quantised else 0
        error = np.abs(out[:, :width] - want)
        if bound:
            assert (error <= bound * magnitude + 1e-30).all()
        else:
            steps = np.abs(x).max() / 127
            assert (error <= steps * np.concatenate([np.abs(w).sum(axis=1) for w in wide]) + 1e-4 * magnitude).all()


@pytest.mark.parametrize("isa", ISAS)
@given(
    st.sampled_from(FORMATS),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 100),
    st.integers(1, 19),
    st.booleans(),
)
def test_accumulate_has_the_same_bits_however_it_is_cut(
    isa: str, name: str, granules: int, rows: int, cols: int, t: int, exact: bool
) -> None:
    """Alone or beside other rows, in one call or in two, on one thread or on three."""
    fmt, rng = parse_format(name), np.random.default_rng(cols)
    weights, wide = encoded(rng.normal(size=(granules, rows, cols)).astype(np.float32), fmt, granules)
    x = rng.normal(size=(t, granules * cols)).astype(np.float32)
    whole = accumulated(isa, weights, Block("o", rows, cols, fmt, 0), x, exact)
    if exact:
        want = np.concatenate(list(wide), axis=1).astype(np.float64) @ x.T.astype(np.float64)
        assert np.abs(whole - want.T).max() <= 2e-5 * np.abs(want).max() + 1e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_clamped"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", FORMATS[:5])
def test_ffn(isa: str, activation: str, gated: bool, name: str) -> None:
    """Against the reference's ffn over the same granules, biases included; and a small scratch changes no bit."""
    from penstock.kernels.reference import dense
    from penstock.kernels.reference.matrix import Scratch
    from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec
    from penstock.spec.parts import parts

    if activation == "swiglu_clamped" and not gated:
        with pytest.raises(BadRequest, match="without a gate"):
            FfnSpec(8, activation, gated)
        return
    d, neurons, t = 72, 172, 5
    layer = Layer(Attention(2, 2, 36, 1.0), FfnSpec(neurons, activation, gated, up_bias=True))
    spec = ModelSpec("llama", "float32", 64, d, d, 64, (layer,), NormSpec("rms", 1e-5), True, True)
    part = next(p for p in parts(spec, parse_format(name)) if p.kind == "ffn")
    rng = np.random.default_rng(1)
    weights = np.zeros((part.granules, part.granule_bytes), np.uint8)
    for i, granule in enumerate(weights):
        n = part.rows_of(i, i + 1)
        for block in part.blocks:
            values = np.zeros((block.rows, block.cols), np.float32)
            if block.name == "down":
                values[:, :n] = rng.normal(size=(block.rows, n)) * 0.2
            elif block.tiled:
                values[:n] = rng.normal(size=(n, block.cols)) * 0.2
            else:
                values[:, :n] = rng.normal(size=(1, n))
            raw = encode(values, block.format) if block.tiled else values.view(np.uint8).reshape(-1)
            granule[block.offset : block.offset + block.nbytes] = raw
    h = rng.normal(size=(t, d)).astype(np.float32)
    want = np.zeros((t, d), np.float32)
    pending = np.zeros((t, d), np.float32)
    sums = dense.FfnSum(want, pending, True, False, False)
    dense.ffn(weights, part, 0, layer.ffns[0], h, sums, Scratch(np.zeros(1 << 24, np.uint8)))
    shape = cpu.ffn_shape(part, layer.ffns[0])
    results = []
    for exact, threads, nbytes in ((True, 1, SCRATCH.nbytes), (True, 3, 16384), (False, 2, SCRATCH.nbytes)):
        got = np.full((t, d), np.nan, np.float32)
        COMPUTE[isa, threads].ffn(
            weights=address(weights), count=part.granules, stride=part.granule_bytes, shape=shape, h=address(h), t=t,
            partial=address(got), pending=address(pending), granule=0, starts_sum=True, continues_four=False,
            leaves_four=False, **ALL, exact=exact, scratch=address(SCRATCH), scratch_bytes=nbytes,
        )  # fmt: skip
        results.append(got)
    assert np.abs(results[0] - want).max() <= 3e-5 * np.abs(want).max()
    assert np.array_equal(results[0], results[1])
    assert np.abs(results[2] - want).max() <= 0.03 * np.abs(want).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_damage_stays_visible(isa: str, bad: float, activation: str) -> None:
    """NaN or infinity among the activations never comes out as a number that looks right."""
    fmt = parse_format("int4")
    weights, _ = encoded(np.ones((2, 64, 64), np.float32), fmt, 2)
    x = np.ones((1, 64), np.float32)
    x[0, 5] = bad
    down = _native.Matrix(64, 64, "int4", 64, 0)
    shape = _native.FfnShape(None, down, down, activation, 0, 0)
    for exact in (True, False):
        out = np.zeros((1, 64), np.float32)
        COMPUTE[isa, 1].ffn(
            weights=address(weights), count=2, stride=weights.shape[1], shape=shape, h=address(x), t=1,
            partial=address(out), pending=0, granule=0, starts_sum=True, continues_four=False, leaves_four=False,
            **ALL, exact=exact, scratch=address(SCRATCH), scratch_bytes=SCRATCH.nbytes,
        )  # fmt: skip
        assert not np.isfinite(out).any()


def test_a_scratch_that_is_too_small_is_refused() -> None:
    block = Block("up", 16, 64, parse_format("int4"), 0)
    with pytest.raises(ValueError, match="scratch"):
        COMPUTE[ISAS[0], 1].project(
            weights=address(SCRATCH), count=1, stride=576, matrix=cpu.matrix(block), x=address(SCRATCH), x_stride=64,
            t=1, out=address(SCRATCH), out_stride=16, out_cols=16, exact=False, scratch=address(SCRATCH),
            scratch_bytes=64,
        )  # fmt: skip


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no sse9"):
        _native.Compute("sse9", 1)
    with pytest.raises(ValueError, match="no int3"):
        _native.Matrix(16, 64, "int3", 64, 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("t", [1, 3, 8, 11])
def test_ffn_over_many_fours_however_it_is_cut(isa: str, name: str, t: int) -> None:
    """11 granules are three fours: calls that cut them anywhere, threads, and a scratch for one four change no bit, and
    the sum is the reference's."""
    from penstock.kernels.reference import dense
    from penstock.kernels.reference.matrix import Scratch
    from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec
    from penstock.spec.parts import parts

    d, granules = 520, 11  # 32 tiles and half of one; enough bytes that threads share the work
    layer = Layer(Attention(2, 2, 260, 1.0), FfnSpec(64 * granules, "silu", True))
    spec = ModelSpec("llama", "float32", 64, d, d, 64, (layer,), NormSpec("rms", 1e-5), True, True)
    part = next(p for p in parts(spec, parse_format(name)) if p.kind == "ffn")
    weights = random_granules(part, 7)
    h = np.random.default_rng(8).normal(size=(t, d)).astype(np.float32)
    shape = cpu.ffn_shape(part, layer.ffns[0])

    def run(cuts: list[int], threads: int, nbytes: int, exact: bool) -> np.ndarray:
        got, pending = np.full((t, d), np.nan, np.float32), np.full((t, d), np.nan, np.float32)
        for lo, hi in pairwise(cuts):
            COMPUTE[isa, threads].ffn(
                weights=address(weights[lo:hi]), count=hi - lo, stride=part.granule_bytes, shape=shape, h=address(h),
                t=t, partial=address(got), pending=address(pending), granule=lo, starts_sum=lo == 0,
                continues_four=lo % 4 != 0, leaves_four=hi < granules and hi % 4 != 0, **ALL, exact=exact,
                scratch=address(SCRATCH), scratch_bytes=nbytes,
            )  # fmt: skip
        return got

    want, pending = np.zeros((t, d), np.float32), np.zeros((t, d), np.float32)
    sums = dense.FfnSum(want, pending, True, False, False)
    dense.ffn(weights, part, 0, layer.ffns[0], h, sums, Scratch(np.zeros(1 << 24, np.uint8)))
    for exact in (True, False):
        whole = run([0, granules], 1, SCRATCH.nbytes, exact)
        assert np.abs(whole - want).max() <= (3e-5 if exact else 0.03) * np.abs(want).max()
        for cuts in ([0, granules], [0, 1, 2, 5, granules], [0, 4, 8, granules], [0, 3, 10, granules]):
            for threads in (1, 3):
                assert np.array_equal(run(cuts, threads, SCRATCH.nbytes, exact), whole)
        assert np.array_equal(run([0, 6, granules], 3, 64 << 10, exact), whole)
