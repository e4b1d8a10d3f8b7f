"""The GPU kernels against the reference on tensors of the processor: Triton's in its interpreter (tests/cpu/conftest.py
turns it on), torch's as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph import scratch_gpu
from penstock.graph.batch import Batch
from penstock.kernels.gpu import attention, dense, product
from penstock.kernels.gpu.cache import TensorKv
from penstock.kernels.gpu.choose import Kernels, choose
from penstock.kernels.gpu.memory import TensorScratch
from penstock.kernels.reference import cache, matrix
from penstock.kernels.reference import dense as reference_dense
from penstock.kernels.reference.dense import FfnSum
from penstock.kernels.reference.dense import head as reference_head
from penstock.serve.fitting import granule_of
from penstock.spec import predictors
from penstock.spec.format import Format, parse_format
from penstock.spec.model import Attention, FfnSpec, ModelSpec, NormSpec
from penstock.spec.parts import Block, Part, _ffn_part, parts, predictor_part
from penstock.store.quantize import encode, encode_rows
from tests.cpu.native_neurons import random_predictor
from tests.kernel_cases import Case
from tests.kernel_draws import FIXED, FORMATS, KV_FORMATS, NEURON_FORMATS, batches, layers, with_relu

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux alone")

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CPU = torch.device("cpu")
FEW, MANY, TORCH = Kernels(triton=True), Kernels(triton=True, few_rows=0), Kernels(triton=False)
ALL = pytest.mark.parametrize("kernels", [FEW, MANY, TORCH], ids=["few", "many", "torch"])
SEEDS = st.integers(0, 2**32 - 1)


def some(share: int) -> settings:
    """A share of the profile's examples: the interpreter takes a second for each."""
    return settings(max_examples=max(1, settings.default.max_examples // share))


def run(kernels: Kernels, spec: ModelSpec, batch: Batch, weights: str, kv: str, seed: int) -> None:
    Case(spec, parse_format(weights), parse_format(kv), batch, kernels, CPU, seed).run()


@pytest.mark.fuzz
@given(layers(), batches(), st.sampled_from(FORMATS), st.sampled_from(KV_FORMATS), SEEDS)
def test_every_op_by_torch(spec: ModelSpec, batch: Batch, weights: str, kv: str, seed: int) -> None:
    run(TORCH, spec, batch, weights, kv, seed)


@pytest.mark.fuzz
@some(12)
@given(layers(), batches(3), st.sampled_from(FORMATS), st.sampled_from(KV_FORMATS), SEEDS)
def test_every_op_of_few_rows(spec: ModelSpec, batch: Batch, weights: str, kv: str, seed: int) -> None:
    run(FEW, spec, batch, weights, kv, seed)


@pytest.mark.fuzz
@some(10)
@given(layers(), batches(9), st.sampled_from(FORMATS), st.sampled_from(KV_FORMATS), SEEDS)
def test_every_op_of_many_rows(spec: ModelSpec, batch: Batch, weights: str, kv: str, seed: int) -> None:
    run(MANY, spec, batch, weights, kv, seed)


def test_the_precision_of_products_is_set_and_set_back() -> None:
    """Away from the processor alone, so a tensor without memory stands for a card's."""
    block, x = Block("down", 64, 64, parse_format("int4"), 0), torch.empty(1, 64, device="meta")
    before = torch.get_float32_matmul_precision()
    with product.precision(Kernels(triton=True, matmul="tf32"), block, x):
        assert torch.get_float32_matmul_precision() == "high"
    with product.precision(Kernels(triton=True, matmul="float32"), block, x):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.fuzz
@some(12)
@given(layers(), batches(3), st.sampled_from(NEURON_FORMATS), st.sampled_from([FEW, MANY, TORCH]), SEEDS)
def test_ffns_neuron_by_neuron(spec: ModelSpec, batch: Batch, weights: str, kernels: Kernels, seed: int) -> None:
    Case(with_relu(spec), parse_format(weights), parse_format("float32"), batch, kernels, CPU, seed).ffn()


def random_granules(
    part: Part, rng: np.random.Generator, gate_bias: Callable[[int], float] = lambda _: 0.0
) -> np.ndarray:
    """An FFN's granules uint8 [n, granule_bytes] of random numbers. `gate_bias`: is added to a granule's; far below
    zero no neuron fires."""
    packed = np.zeros((part.granules, part.granule_bytes), np.uint8)
    for g, granule in enumerate(packed):
        n = part.rows_of(g, g + 1)
        for block in part.blocks:
            values = rng.normal(size=(block.rows, block.cols)).astype(np.float32)
            if block.stride:
                encode_rows(values[:n], block, granule)
            elif block.tiled:
                values[n:] = 0
                granule[block.offset : block.offset + block.nbytes] = encode(values, block.format)
            else:
                values[:, n:] = 0
                values += gate_bias(g) if block.name == "gate_bias" else 0
                granule[block.offset : block.offset + block.nbytes] = values.view(np.uint8).reshape(-1)
    return packed


@pytest.mark.parametrize("weights", ["float16-neurons", "int4-neurons"])
def test_leaving_zeros_out_changes_no_bit(weights: str) -> None:
    """Several granules, some still, and rows that fire different neurons; what does not fire may hold anything."""
    rng = np.random.default_rng(5)
    ffn = FfnSpec(100, "relu2", True, True, False)
    part = _ffn_part(0, "ffn", ffn, 40, parse_format(weights))
    packed = random_granules(part, rng, gate_bias=lambda granule: -112.0 if granule == 1 else -12.0)
    h = torch.from_numpy(rng.normal(size=(2, 40)).astype(np.float32))
    found = []
    for skips in (False, True):
        weights_of_turn = torch.from_numpy(packed.copy())
        if skips:  # a granule that is still, but for its gate
            weights_of_turn[1, part.block("up").offset : part.block("gate_bias").offset] = 255
        out = torch.full((2, 40), torch.nan)
        room = torch.full((scratch_gpu.ffn_bytes(part, part.granules, 2),), 255, dtype=torch.uint8)
        dense.ffn(weights_of_turn, part, ffn, h, out, True, FEW, TensorScratch(room), skips)
        found.append(out.numpy())
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all() and found[0].any()


@pytest.mark.thinned(3)
@ALL
@pytest.mark.parametrize("weights", ["float16-records", "int4-records", "int4-neurons", "int4"])
def test_masks_of_neurons(kernels: Kernels, weights: str) -> None:
    """What a row's mask leaves out counts as 0, and its record may hold anything where no row wants it."""
    rng = np.random.default_rng(6)
    ffn, d, t = FfnSpec(100, "relu", True, True, False), 64, 3
    part = _ffn_part(0, "ffn", ffn, d, parse_format(weights))
    packed = random_granules(part, rng)
    h = rng.normal(size=(t, d)).astype(np.float32)
    active = (rng.random((t, part.granules * 64)) < 0.3).astype(np.uint8)
    want, pending = np.zeros((t, d), np.float32), np.zeros((t, d), np.float32)
    room = matrix.Scratch(np.empty(1 << 22, np.uint8))
    reference_dense.ffn(packed, part, 0, ffn, h, FfnSum(want, pending, True, False, False), room, active)
    if part.by_records:
        for i in np.flatnonzero(~active.any(axis=0)[:100]):
            first = part.blocks[0]
            at = first.offset + int(i) % 64 * first.stride
            packed[int(i) // 64, at : at + first.format.row_bytes(first.cols)] = 255
    out = torch.full((t, d), torch.nan)
    scratch = torch.full((scratch_gpu.ffn_bytes(part, part.granules, t),), 255, dtype=torch.uint8)
    dense.ffn(
        torch.from_numpy(packed), part, ffn, torch.from_numpy(h), out, True, kernels, TensorScratch(scratch), True,
        torch.from_numpy(active),
    )  # fmt: skip
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-3, atol=1e-3 * float(np.abs(want).max()))


@ALL
def test_predictors(kernels: Kernels) -> None:
    """Whose scores are not next to 0."""
    rng = np.random.default_rng(7)
    part = predictor_part(0, 64, 32, 200, predictors.FORMAT)
    granule, h = granule_of(random_predictor(part, 200, rng), part), rng.normal(size=(5, 64)).astype(np.float32)
    want, got = np.zeros((5, 256), np.uint8), torch.full((5, 256), 7, dtype=torch.uint8)
    reference_dense.predict(granule, part, h, want, matrix.Scratch(np.empty(1 << 22, np.uint8)))
    room = torch.full((scratch_gpu.predict_bytes(part, 5),), 255, dtype=torch.uint8)
    dense.predict(torch.from_numpy(granule), part, torch.from_numpy(h), got, kernels, TensorScratch(room))
    assert set(np.unique(got.numpy())) <= {0, 1}
    assert (got.numpy() != want).mean() < 0.01 and 0.05 < want.mean() < 0.95


@pytest.mark.parametrize(("spec", "batch", "weights", "kv"), FIXED, ids=[f"{f[2]}-{f[3]}" for f in FIXED])
@pytest.mark.parametrize("kernels", [MANY, TORCH], ids=["many", "torch"])
def test_fixed_layers(kernels: Kernels, spec: ModelSpec, batch: Batch, weights: str, kv: str) -> None:
    run(kernels, spec, batch, weights, kv, 0)


def packed(fmt: Format, n: int, rows: int, cols: int) -> tuple[np.ndarray, Block]:
    """A block of n granules, behind 128 bytes of something else, each granule one page longer than it need be."""
    block = Block("some", rows, cols, fmt, 128)
    found = np.full((n, (128 + block.nbytes + 8191) // 4096 * 4096), 255, np.uint8)
    rng = np.random.default_rng(cols)
    for granule in found:
        granule[128 : 128 + block.nbytes] = encode(rng.normal(size=(rows, cols)).astype(np.float32), fmt)
    return found, block


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 9, 17, 33])
def test_products(name: str, rows: int) -> None:
    """Odd columns; results of their own, and a sum over granules that is split."""
    fmt, n, out_rows, cols = parse_format(name), 3, 20, 90
    weights, block = packed(fmt, n, out_rows, cols)
    on_device, rng, room = (
        torch.from_numpy(weights),
        np.random.default_rng(rows),
        matrix.Scratch(np.empty(1 << 20, "u1")),
    )
    x, wide = (rng.normal(size=(rows, k)).astype(np.float32) for k in (cols, n * cols))
    want, total = np.zeros((rows, n * out_rows), np.float32), np.ones((rows, out_rows), np.float32)
    for g in range(n):
        matrix.multiply(x, weights[g], block, want[:, g * out_rows : (g + 1) * out_rows], room)
        matrix.multiply(
            np.ascontiguousarray(wide[:, g * cols : (g + 1) * cols]), weights[g], block, total, room, add=True
        )
    scratch = TensorScratch(torch.full((1 << 20,), 255, dtype=torch.uint8))
    for kernels in (FEW, MANY, TORCH) if rows <= 3 else (MANY, TORCH) if rows != 7 else (FEW,):
        got, part = torch.full(want.shape, torch.nan), torch.ones(total.shape)
        product.spread(torch.from_numpy(x), on_device, (block,), (got,), kernels, scratch)
        product.add_up(torch.from_numpy(wide), on_device, block, part, False, kernels, scratch)
        assert np.abs(got.numpy() - want).max() <= 1e-5 * np.abs(want).max()
        assert np.abs(part.numpy() - total).max() <= 1e-5 * np.abs(total).max()


ODD_ROWS = np.array(
    [[0.0] * 4, [1.0] * 4, [-3.0, 2.0, 1e-7, 0.5], [7e4, -9e4, 1.0, 0.0], [np.nan, 1.0, 2.0, 3.0],
     [-0.0, 0.0, -1e-8, 0.0], [65504.0, -65504.0, 65519.0, 2.0], [6e-8, 3e-8, 0.0, 1e-9],
     [1 + 2**-9, 1 + 2**-8 + 2**-9, 0.1, -0.1]], np.float32
)  # fmt: skip


@pytest.mark.parametrize("kernels", [FEW, TORCH], ids=["triton", "torch"])
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [4, 40, 80])
def test_the_cache_gets_the_same_bytes(kernels: Kernels, name: str, head_dim: int) -> None:
    fmt, rng, page = parse_format(name), np.random.default_rng(head_dim), 64
    odd = np.tile(ODD_ROWS, (1, head_dim // 4))
    rows = np.concatenate([odd, rng.normal(size=(6, head_dim)).astype(np.float32)])
    t = len(rows)
    positions, sequence = np.r_[60 : 60 + t - 4, 0:4].astype(np.int32), np.r_[[0] * (t - 4), [1] * 4].astype(np.int32)
    want = np.zeros((4, 2, page * fmt.kv_bytes(head_dim)), np.uint8)
    pool, table = cache.KvPool(want, page, head_dim, fmt), np.array([[2, 0], [3, 1]], np.int32)
    with np.errstate(all="ignore"):
        for row, at, s in zip(rows, positions.tolist(), sequence.tolist(), strict=True):
            pool.store(int(table[s, at // page]), 1, at % page, row[None])
    got = TensorKv(torch.zeros(want.shape, dtype=torch.uint8), page, head_dim, fmt, torch.from_numpy(table))
    where = torch.from_numpy(positions), torch.from_numpy(sequence)
    if kernels.triton:
        a = Attention(2, 2, head_dim, 1.0)
        raw = torch.from_numpy(rows).view(t, 1, 1, head_dim)
        weights = torch.zeros((1, 4096), dtype=torch.uint8)
        part = parts(FIXED[0][0], fmt)[0]  # none of its biases is read
        attention._turn_and_store(
            weights, part, 1, a, NormSpec("rms", 1e-5), (raw, raw, raw), (raw, raw), None, *where,
            torch.empty(t, 2, head_dim), got, got,
        )  # fmt: skip
    else:
        got.store(1, torch.from_numpy(rows), *where)
    if fmt.kind == "bfloat16":  # as numbers: NaN has many bits
        found, wanted = (x.view(np.uint16).astype(np.uint32) << 16 for x in (got.blocks.numpy(), want))
        np.testing.assert_array_equal(found.view(np.float32), wanted.view(np.float32))
    else:
        np.testing.assert_array_equal(got.blocks.numpy(), want)


@pytest.mark.parametrize("longest", [1, 3, 17])
def test_attention_does_not_depend_on_how_rows_are_shared(longest: int) -> None:
    """Any `longest` is right, rows of several sequences in one program too."""
    spec, _, weights, kv = FIXED[0]
    batch = Batch(0, (0, 1, 2), (63, 0, 100), (2, 1, 3), (0,))
    found = Case(spec, parse_format(weights), parse_format(kv), batch, FEW, CPU, 1)
    a = spec.layers[0].attention
    q = found.random(found.t, a.heads, a.head_dim)[1]
    keys, values = (found.pool_pair(i)[1] for i in range(2))
    scratch = TensorScratch(torch.full((1 << 22,), 255, dtype=torch.uint8))
    want, got = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    where = found.positions, found.sequence
    attention.attend(q, keys, values, a, 0, a.kv_heads, *where, want, 1, TORCH, scratch)
    attention.attend(q, keys, values, a, 0, a.kv_heads, *where, got, longest, FEW, scratch)
    assert (want - got).abs().max() <= 5e-5 * want.abs().max()


@ALL
def test_the_first_of_equal_logits_wins_and_nan_stays(kernels: Kernels) -> None:
    fmt = Format("float32")
    part = Part("head", "head", -1, 130, 64, 4096, (Block("rows", 64, 2, fmt, 0),))
    rows = np.zeros((3, 64, 2), np.float32)
    rows[0, 5], rows[0, 9], rows[2, 1] = (2, 0), (2, 0), (2, 1)
    weights = np.zeros((3, 4096), np.uint8)
    for g in range(3):
        weights[g, : 64 * 8] = encode(rows[g], fmt)
    h = np.array([[1, 0], [0, 1], [np.nan, 0], [-1, 0]], np.float32)
    want, ids = np.zeros(4, np.float32), np.zeros(4, np.int32)
    logits, got, got_ids = torch.empty(4, 130), torch.empty(4), torch.empty(4, dtype=torch.int32)
    for lo, hi in ((0, 2), (2, 3)):
        reference_head(
            weights[lo:hi], part, lo, h, 0.0, np.empty((4, 130), np.float32), want, ids, lo == 0,
            matrix.Scratch(np.empty(1 << 20, np.uint8)),
        )  # fmt: skip
        dense.head(
            torch.from_numpy(weights[lo:hi]), part, lo, torch.from_numpy(h), 0.0, logits, got, got_ids, lo == 0,
            kernels, TensorScratch(torch.empty(1 << 20, dtype=torch.uint8)),
        )  # fmt: skip
    np.testing.assert_array_equal(got.numpy(), want)
    assert got_ids.tolist()[:2] == ids.tolist()[:2] == [5, 129]
    assert got_ids.tolist()[3] == ids.tolist()[3] == 0


def test_what_is_chosen_comes_with_a_reason() -> None:
    kernels, reason = choose(CPU)
    assert not kernels.triton and kernels.matmul == "float32" and reason.startswith("torch kernels: ")
