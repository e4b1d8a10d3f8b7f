"""The native kernels on the formats of GGUF files: every instruction set against the files' numbers, and the same bits
whatever shares a call. `test_native_ops` holds all ops to the table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.kernels import cpu
from penstock.kernels.reference.blocks import widen_blocks
from penstock.spec.blocks import BLOCKS
from penstock.spec.format import Format, parse_format, tiles
from penstock.spec.parts import Block
from tests.blocks import random_matrix
from tests.cpu.native_products import COMPUTE, ISAS, SCRATCH, accumulated, address


def granules_of(fmt: Format, count: int, rows: int, cols: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(weights uint8 [granules, stride], their numbers float32 [granules, R, C])."""
    rng, nbytes = np.random.default_rng(seed), fmt.matrix_bytes(rows, cols)
    weights = np.zeros((count, -(-nbytes // 64) * 64 + 64), np.uint8)
    for granule in weights:
        granule[:nbytes] = random_matrix(fmt, rows, cols, rng)
    wide = [widen_blocks(granule[:nbytes].reshape(tiles(rows), -1), cols, fmt.kind)[:rows] for granule in weights]
    return weights, np.stack(wide)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BLOCKS)
@given(
    st.integers(1, 2), st.integers(1, 40), st.integers(1, 17), st.integers(1, 14), st.sampled_from([1, 3]),
    st.sampled_from([1e-3, 1.0, 100.0]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_project(
    isa: str, kind: str, granules: int, rows: int, groups: int, t: int, threads: int, size: float, seed: int
) -> None:
    fmt, cols = parse_format(kind), 32 * groups
    weights, wide = granules_of(fmt, granules, rows, cols, seed)
    x = (size * np.random.default_rng(seed).normal(size=(t, cols))).astype(np.float32)
    want = np.concatenate([x.astype(np.float64) @ w.astype(np.float64).T for w in wide], axis=1)
    magnitude = np.concatenate([np.abs(x) @ np.abs(w).T for w in wide], axis=1)
    magnitude += 2 * np.abs(wide).max() * np.abs(x).sum(axis=1, keepdims=True)
    for exact in (True, False):
        out = np.full((t, want.shape[1] + 3), 7.0, np.float32)
        COMPUTE[isa, threads].project(
            weights=address(weights), count=granules, stride=weights.shape[1],
            matrix=cpu.matrix(Block("up", rows, cols, fmt, 0)), x=address(x), x_stride=cols, t=t, out=address(out),
            out_stride=out.shape[1], out_cols=want.shape[1], exact=exact, scratch=address(SCRATCH),
            scratch_bytes=SCRATCH.nbytes,
        )  # fmt: skip
        assert (out[:, want.shape[1] :] == 7.0).all()
        error = np.abs(out[:, : want.shape[1]] - want)
        rounding = 0.0 if exact else np.abs(x).max() / 127 * np.concatenate([np.abs(w).sum(axis=1) for w in wide])
        assert (error <= 2e-6 * magnitude + rounding + 1e-30).all()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BLOCKS)
@given(
    st.integers(1, 5), st.integers(1, 40), st.integers(1, 9), st.integers(1, 19) | st.sampled_from([54, 103]),
    st.booleans(),
)  # fmt: skip
def test_the_same_bits_however_it_is_cut(
    isa: str, kind: str, granules: int, rows: int, groups: int, t: int, exact: bool
) -> None:
    """Alone or beside other rows, in one call or in two, on one thread or on three."""
    fmt, cols = parse_format(kind), 32 * groups
    weights, _ = granules_of(fmt, granules, rows, cols, groups)
    x = np.random.default_rng(t).normal(size=(t, granules * cols)).astype(np.float32)
    assert np.isfinite(accumulated(isa, weights, Block("o", rows, cols, fmt, 0), x, exact)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_are_gathered(isa: str, kind: str) -> None:
    fmt = parse_format(kind)
    weights, wide = granules_of(fmt, 2, 64, 96, 5)
    tokens, rows = np.array([0, 127, 64, 17], np.int32), np.zeros((4, 96), np.float32)
    COMPUTE[isa, 1].gather(
        weights=address(weights), count=2, stride=weights.shape[1], matrix=cpu.matrix(Block("rows", 64, 96, fmt, 0)),
        tokens=address(tokens), t=4, rows=address(rows),
    )  # fmt: skip
    assert np.array_equal(rows, wide.reshape(128, 96)[tokens])


def test_what_no_matrix_is_is_refused() -> None:
    for args in ((16, 40, "q4_0", 32, 0), (16, 64, "q4_k", 64, 0), (16, 64, "q4_k", 32, 0, 128)):
        with pytest.raises(ValueError, match="groups of 32"):
            _native.Matrix(*args)
