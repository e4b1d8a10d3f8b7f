"""Attention over a cache of integers with rounded factors: near the reference, nearer to the rule (`graph.ops.Attend`),
and the same bits whatever shares a call."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.kernels import cpu
from penstock.kernels.reference.cache import KvPool
from penstock.kernels.reference.matrix import Scratch
from penstock.spec.model import Attention
from tests.cpu.attention_case import PAGE, Case
from tests.cpu.guarded import at_the_end
from tests.cpu.test_chosen_natively import alone_in

ISAS = cpu.available()
KV = ("int8", "int4", "int8-g32", "int4-g32", "int4-g96", "int8-g512")
# Heads, KV heads, head_dim, positions before the first row, rows, window.
SHAPES = [
    (1, 1, 16, 0, 1, 0), (4, 2, 64, 300, 3, 0), (9, 1, 36, 511, 2, 70), (6, 6, 128, 700, 11, 0), (2, 1, 80, 255, 9, 0),
    (8, 2, 96, 130, 1, 100), (3, 1, 320, 90, 5, 0), (24, 1, 192, 64, 20, 0), (5, 1, 576, 257, 1, 0),
    (14, 2, 64, 690, 70, 0), (7, 1, 32, 200, 5, 90),
]  # fmt: skip


def by_rule(case: Case, sinks: np.ndarray) -> np.ndarray:
    """The softmax over scores of rounded queries, by numpy in float64: float32 [rows, H, E]. A score is rounded numbers
    times keys, plus what rounding left of a piece of a group times the key that middle codes would make. Weights stay
    as they are."""
    a, fmt, e = case.a, case.pools[0].format, case.a.head_dim
    most, middles = (127, (7, 8)) if fmt.kind == "int4" else (32767, (127, 128))
    keys, values = (dequantised(pool, case.table, len(case.k)) for pool in case.pools)
    pool, cut = case.pools[0], PAGE * fmt.kv_codes_bytes(e)
    middle = np.zeros(keys.shape)
    for code in middles:
        blocks = pool.blocks.copy()
        blocks[:, :, :cut] = code * 17 if fmt.kind == "int4" else code
        middle += dequantised(pool._replace(blocks=blocks), case.table, len(case.k)) / 2
    steps, rests = np.zeros(case.q.shape), np.zeros(case.q.shape)
    for group in range(0, e, fmt.group):
        for first in range(group, min(group + fmt.group, e), 256):
            piece = slice(first, min(first + 256, group + fmt.group, e))
            q = case.q[..., piece]
            largest = np.abs(q).max(axis=-1, keepdims=True)
            steps[..., piece] = np.rint(q * (np.float32(most) / largest)) * (largest.astype(float) / most)
            rests[..., piece] = (q - steps[..., piece]).mean(axis=-1, keepdims=True)
    out, start = np.zeros_like(case.q), case.batch.start[0]
    for row in range(len(case.q)):
        seen = slice(max(0, start + row + 1 - a.window) if a.window else 0, start + row + 1)
        for head in range(a.heads):
            kv = head // a.heads_per_kv
            scores = (keys[seen, kv] @ steps[row, head] + middle[seen, kv] @ rests[row, head]) * a.scale
            scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            out[row, head] = weights[:-1] @ values[seen, kv] / weights.sum()
    return out


def dequantised(pool: KvPool, table: np.ndarray, seen: int) -> np.ndarray:
    """Rows of a pool, float64 [positions, K, E]."""
    memory = np.empty(1 << 22, np.uint8)
    pages = [[pool.load(int(page), head, PAGE, Scratch(memory)).astype(float) for head in range(pool.blocks.shape[1])]
             for page in table]  # fmt: skip
    return np.concatenate([np.stack(heads, axis=1) for heads in pages])[:seen]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv", KV)
def test_it_is_near_the_reference_and_rows_by_themselves_give_the_same_bits(
    isa: str, shape: tuple[int, ...], kv: str
) -> None:
    heads, kv_heads, head_dim, start, rows, window = shape
    case = Case(Attention(heads, kv_heads, head_dim, head_dim**-0.5, 0.0, window), start, rows, 1, kv)
    sinks = np.linspace(-1, 2, heads, dtype=np.float32)
    together, want = case.natively(isa, 1.0, 3, 0, sinks, exact=False), case.attend(1.0, sinks)
    size = max(1.0, float(np.abs(want).max()))
    assert np.abs(together - want).max() <= (2e-2 if kv.startswith("int4") else 1e-3) * size
    ruled = by_rule(case, sinks)
    assert np.abs(together - ruled).max() <= 1e-3 * size
    assert np.sqrt(np.mean((together - ruled) ** 2)) <= 1e-4 * size
    for row in {0, rows // 2, rows - 1}:
        assert np.array_equal(alone_in(case, row).natively(isa, 1.0, 1, 0, sinks, exact=False)[0], together[row])
    assert np.array_equal(case.natively(isa, 1.0, 2, rows // 2, sinks, exact=False), together[rows // 2 :])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_many_small_weights_beside_a_large_one_are_not_lost(isa: str, kv: str) -> None:
    """One position has nearly all of the weight, the 3,000 others have less each than half of a step of its block."""
    case = Case(Attention(1, 1, 64, 1.0), 3000, 1, 2, kv)
    k, v = case.k * 1e-3, case.v
    k[5, 0] = 10 * case.q[0, 0] / np.square(case.q[0, 0]).sum()
    v[:, 0] += 2
    v[5] = -1
    case.store(k, v)
    want = by_rule(case, np.array([-np.inf]))
    assert np.abs(case.natively(isa, 1.0, exact=False) - want).max() <= 2e-3 * np.abs(want).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_what_lies_behind_the_last_position_does_not_matter(isa: str, kv: str) -> None:
    case = Case(Attention(4, 2, 64, 0.2), PAGE + 20, 3, 1, kv)
    clean = case.natively(isa, 1.0, exact=False)
    for pool in case.pools:
        block, row = pool.blocks[case.table[1]], pool.format.kv_codes_bytes(64)
        block[:, 23 * row : PAGE * row] = 0xFF
        factors = block[:, PAGE * row :].view(np.uint16).reshape(len(block), -1, PAGE)
        factors[:, :, 23:] = 0x7E00  # NaN
    assert np.array_equal(case.natively(isa, 1.0, exact=False), clean)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv", ["float32", "float16", *KV])
@pytest.mark.thinned(4)
def test_nothing_behind_the_last_page_of_an_arena_is_read(isa: str, shape: tuple[int, ...], kv: str) -> None:
    """Registers of 64 bytes go up to 48 beyond a row, and whole spans of positions are read. Behind the last head's
    block in the last page there may be nothing: what reads there ends the process."""
    heads, kv_heads, head_dim, start, rows, window = shape
    case = Case(Attention(heads, kv_heads, head_dim, 0.2, 0.0, window), start, rows, 1, kv)
    sinks = np.linspace(-1, 2, heads, dtype=np.float32)
    for table in (np.sort(case.table), np.sort(case.table)[::-1].copy()):  # the last page is the last, then the first
        case.table = table
        for exact, share in [(True, 1.0), (False, 1.0), (False, 0.2)]:
            want = case.natively(isa, share, 1, 0, sinks, exact)
            assert np.array_equal(case.natively(isa, share, 1, 0, sinks, exact, at_the_end), want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_damage_stays_visible(isa: str, kv: str) -> None:
    case = Case(Attention(2, 1, 64, 0.2), 300, 1, 1, kv)
    for bad in (np.nan, np.inf):
        case.q[0, 1, 3] = bad
        got = case.natively(isa, 1.0, exact=False)
        assert np.isfinite(got[0, 0]).all() and np.isnan(got[0, 1]).all()
    case.q[0, 1, 3] = 0
    k, v = case.k.copy(), case.v.copy()
    v[100, 0, 2] = np.nan
    case.store(k, v)
    assert np.isnan(case.natively(isa, 1.0, exact=False)).all(axis=(0, 1)).any()
    case.q[...] = 0
    k[100, 0, 2], v[100, 0, 2] = np.nan, 0
    case.store(k, v)
    assert np.isnan(case.natively(isa, 1.0, exact=False)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["int8", "int4", "float32"])
@pytest.mark.parametrize("start", [0, 256])
def test_a_block_whose_only_score_is_damaged_stays_visible(isa: str, kv: str, start: int) -> None:
    case = Case(Attention(2, 1, 64, 0.2, 0.0, 1), start, 1, 1, kv)
    assert np.isfinite(case.natively(isa, 1.0, exact=False)).all()
    k = case.k.copy()
    k[start, 0, 2] = np.nan
    case.store(k, case.v)
    assert np.isnan(case.natively(isa, 1.0, exact=False)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_of_a_share_of_the_positions_too(isa: str, kv: str) -> None:
    case = Case(Attention(3, 3, 64, 0.2), 530, 9, 1, kv)
    together = case.natively(isa, 0.2, threads=3, exact=False)
    for row in range(9):
        assert np.array_equal(alone_in(case, row).natively(isa, 0.2, exact=False)[0], together[row])
    assert np.abs(case.natively(isa, 0.99999, exact=False) - case.natively(isa, 1.0, exact=False)).max() <= 1e-3
