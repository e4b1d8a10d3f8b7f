"""Native kernels of attention to a query's best positions alone: held to the reference, and to themselves."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.kernels import cpu
from penstock.spec.model import Attention
from tests.cpu.attention_case import Case

ISAS = cpu.available()
KV = ("float32", "float16", "bfloat16", "int8", "int4")
# Heads, KV heads, head_dim, positions before the first row, rows.
SHAPES = [(1, 1, 16, 0, 1), (4, 2, 64, 300, 3), (9, 1, 36, 511, 2), (6, 6, 128, 700, 11), (2, 1, 80, 255, 9)]


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() <= 2e-5 * max(1.0, float(np.abs(want).max()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv", KV)
def test_it_is_what_the_reference_says(isa: str, shape: tuple[int, ...], kv: str) -> None:
    heads, kv_heads, head_dim, start, rows = shape
    for seed, (share, window, softcap) in enumerate([(0.1, 0, 0.0), (0.003, 0, 5.0), (0.6, 70, 0.0)]):
        case = Case(Attention(heads, kv_heads, head_dim, 0.2, softcap, window), start, rows, seed, kv)
        sinks = np.linspace(-1, 2, heads, dtype=np.float32) if seed == 1 else None
        close(case.natively(isa, share, 1 + seed, 0, sinks), case.attend(share, sinks))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["float32", "float16"])
def test_of_equal_scores_the_earlier_positions_count(isa: str, kv: str) -> None:
    """Queries of one number other than 0, and keys of few numbers: the same scores at many positions, zeros of either
    sign among them."""
    case = Case(Attention(4, 2, 16, 0.5), 600, 5, 1, kv)
    case.q[...] = 0
    case.q[..., 3] = [[1.0, -1.0, 2.0, 0.0]]
    levels = np.random.default_rng(2).choice([-1.0, -0.0, 0.0, 0.5], case.k.shape)
    case.store(levels.astype(np.float32), case.v)
    for share in (0.002, 0.1, 0.4, 0.9):
        close(case.natively(isa, share), case.attend(share))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
def test_rows_by_themselves_and_all_positions_give_the_same_bits(isa: str, kv: str) -> None:
    case = Case(Attention(3, 3, 64, 0.2), 530, 9, 1, kv)
    together = case.natively(isa, 0.2, threads=3)
    for row in range(9):
        assert np.array_equal(alone_in(case, row).natively(isa, 0.2)[0], together[row])
    assert np.array_equal(case.natively(isa, 0.99999), case.natively(isa, 1.0))


def alone_in(case: Case, row: int) -> Case:
    """The same cache, of which this row alone attends."""
    one = object.__new__(Case)
    one.__dict__.update(case.__dict__)
    one.q = case.q[row : row + 1]
    one.batch = case.batch._replace(start=(case.batch.start[0] + row,), rows=(1,))
    return one


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number(isa: str) -> None:
    """A query that meets a NaN becomes NaN, others do not; values that are not chosen are not read."""
    case = Case(Attention(2, 2, 16, 0.3), 300, 1, 1)
    k, v = case.k.copy(), case.v.copy()
    k[7, 0, 2] = np.nan
    worst = int(np.argmin(k[:, 1] @ case.q[0, 1]))
    v[worst, 1] = np.inf
    case.store(k, v)
    got = case.natively(isa, 0.3)
    assert np.isnan(got[0, 0]).all() and np.isfinite(got[0, 1]).all()
    assert not np.isfinite(case.natively(isa, 1.0)[0, 1]).all()
