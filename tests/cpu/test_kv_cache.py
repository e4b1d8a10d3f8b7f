"""The KV cache in int8 and int4: its layout to the byte, how far it may be off, and native kernels to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import BadRequest
from penstock.graph.arenas import Layout
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.resident import resident_plan
from penstock.graph.tasks import Pass
from penstock.kernels import cpu
from penstock.kernels.reference.cache import KvPool
from penstock.kernels.reference.matrix import Scratch
from penstock.runtime.arena import Arenas
from penstock.runtime.bind import Binding
from penstock.runtime.bind_native import NativeBinding, native
from penstock.spec.format import Format, parse_format
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec
from penstock.store.quantize import encode

FORMATS = ["int8", "int4", "int8-g32", "int4-g32", "int4-g96", "int4-g1024"]
HEAD_DIMS = [4, 16, 18, 32, 64, 80, 96, 128, 256]
PAGE = 64


def pool(fmt: Format, head_dim: int, pages: int = 1) -> KvPool:
    return KvPool(np.zeros((pages, 1, PAGE * fmt.kv_bytes(head_dim)), np.uint8), PAGE, head_dim, fmt)


def loaded(made: KvPool, n: int) -> np.ndarray:
    return made.load(0, 0, n, Scratch(np.empty(1 << 18, np.uint8))).copy()


def spec_of(head_dim: int) -> ModelSpec:
    attention = Attention(1, 1, head_dim, head_dim**-0.5)
    layer = Layer(attention, FfnSpec(16, "silu", False))
    return ModelSpec("llama", "float32", 16, head_dim, head_dim, 4096, (layer,), NormSpec("rms", 1e-5), True, True)


def test_sizes() -> None:
    sizes = {name: [parse_format(name).kv_bytes(e) for e in (16, 64, 80, 128)] for name in ("float16", *FORMATS[:4])}
    assert sizes == {
        "float16": [32, 128, 160, 256],
        "int8": [20, 68, 88, 136],
        "int4": [20, 36, 56, 72],
        "int8-g32": [20, 72, 92, 144],
        "int4-g32": [20, 40, 60, 80],
    }
    for fmt in map(parse_format, FORMATS):
        for e in HEAD_DIMS:
            plan = resident_plan(spec_of(e), Format("float32"), kv=fmt, context=200)
            page = Layout(plan).kv.page_bytes(0, plan.kv[0])
            assert page == PAGE * fmt.kv_bytes(e) and page % 64 == 0
    for name in ("int4-g24", "int8-g8"):
        with pytest.raises(BadRequest, match="multiples of 32"):
            parse_format(name).check_kv()


def test_bytes_of_a_row() -> None:
    made = pool(parse_format("int4"), 64)
    row = np.arange(64, dtype=np.float32)[None] % 16 - 3  # minimum -3, scale 1
    made.store(0, 0, 5, row)
    codes, halves = np.split(made.blocks[0, 0], [PAGE * 32])
    assert codes[5 * 32 : 6 * 32].tolist() == [17 * i for i in range(16)] * 2
    assert not codes[: 5 * 32].any() and not codes[6 * 32 :].any()
    assert halves.view(np.float16).reshape(2, PAGE)[:, 4:7].tolist() == [[0, 1, 0], [0, -3, 0]]


@given(st.data(), st.sampled_from(FORMATS), st.sampled_from(HEAD_DIMS))
def test_no_number_is_off_by_more_than_half_a_step(data: st.DataObject, name: str, head_dim: int) -> None:
    fmt, n = parse_format(name), data.draw(st.integers(1, 5))
    rows = data.draw(arrays.arrays(np.float32, (n, head_dim), elements=st.floats(-65504, 65504, width=32)))
    together, alone = pool(fmt, head_dim), pool(fmt, head_dim)
    together.store(0, 0, 0, rows)
    for i in range(n):
        alone.store(0, 0, i, rows[i : i + 1])
    assert np.array_equal(together.blocks, alone.blocks)
    found = loaded(together, n)
    for lo in range(0, head_dim, fmt.group):
        want, got = rows[:, lo : lo + fmt.group], found[:, lo : lo + fmt.group]
        size = np.abs(want).max(axis=1)
        step = (want.max(axis=1) - want.min(axis=1)) / (2**fmt.bits - 1)
        # Minimum and scale are rounded outwards, to 11 bits.
        bound = step / 2 * (1 + 2**-9) + size * 2**-10 * (1 + 2 / (2**fmt.bits - 1)) + 2**-23
        assert (np.abs(want - got) <= bound[:, None]).all()


def test_what_is_too_large_saturates_and_nan_stays() -> None:
    made = pool(parse_format("int8-g32"), 64)
    row = np.linspace(-1, 1, 64, dtype=np.float32)[None].copy()
    row[0, 3], row[0, 40] = np.inf, np.nan
    made.store(0, 0, 0, row)
    found = loaded(made, 1)[0]
    assert np.isnan(found[32:]).all() and np.isfinite(found[:32]).all() and abs(found[3] / 65504 - 1) < 1e-2


@pytest.mark.parametrize("isa", cpu.available())
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", *FORMATS])
def test_native_kernels_store_the_same_bits(isa: str, name: str) -> None:
    """Projections by the identity give k and v = h exactly, so that storing alone is compared."""
    rng, fmt = np.random.default_rng(0), Format("float32")
    for e in HEAD_DIMS:
        plan = resident_plan(spec_of(e), fmt, kv=parse_format(name), context=150, rows=100)
        lowering, both = Lowering(plan), (Arenas(plan), Arenas(plan))
        part = plan.parts["0.attn"]
        (unit,) = [i for i, u in enumerate(plan.units) if u.part == "0.attn"]
        batch = Batch(0, (0,), (20,), (100,), (99,))
        (task,) = lowering.step(Pass("prefill", (batch,), None))
        (call,) = [c for c in task.calls if c.op == "qkv"]
        h = rng.normal(size=(100, e)) * np.exp(rng.normal(size=(100, 1)) * 6)
        h[7], h[8] = 1.5, 0  # no range at all
        for arenas in both:
            granule = arenas.view(lowering.layout.weights[unit])
            for block in "qkv":
                at = part.block(block)
                granule[at.offset : at.offset + at.nbytes] = encode(np.eye(e, dtype=np.float32), fmt)
            arenas.view(call.operands.h).view(np.float32)[...] = h.astype(np.float32).reshape(-1)
            arenas.whole("host.kv")[...] = 0xA5
        Binding(plan, both[0], None).call(call)
        NativeBinding(plan, both[1], None, native(isa, 2, True)).call(call)
        assert np.array_equal(both[0].whole("host.kv"), both[1].whole("host.kv")), f"head_dim {e}"
        for arenas in both:
            arenas.close()
