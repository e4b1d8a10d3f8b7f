"""Sizes that native code and plans must agree on: what an op wants of scratch, and the limits of formats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.graph import scratch, scratch_native
from penstock.graph.resident import resident_plan
from penstock.kernels import cpu
from penstock.runtime.arena import Arenas
from penstock.runtime.bind_native import NativeBinding, native
from penstock.spec.format import (
    KV_GROUP,
    LINE_COLUMNS,
    MOST_GROUP,
    PAGE_TOKENS,
    TILE_ROWS,
    WEIGHT_GROUP,
    Format,
    parse_format,
)
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec
from penstock.spec.parts import SUM_NEURONS, Block, Part, parts

ISAS = list(cpu.available())
COMPUTE = {isa: _native.Compute(isa, 8) for isa in ISAS}
FORMATS = st.sampled_from(["float32", "bfloat16", "float16", "int8", "int4", "int4-g32", "int8-g8", "int4-g1024",
                           "int4-neurons", "bfloat16-neurons", "int8-g32-neurons"])  # fmt: skip
KV_FORMATS = ["float32", "float16", "bfloat16", "int8", "int4", "int8-g32", "int4-g96"]
ROWS = st.sampled_from([1, 2, 3, 5, 8, 9, 47, 48, 49, 100, 513])


def test_the_limits_of_formats_are_the_kernels_own() -> None:
    assert _native.limits() == {
        "most_group": MOST_GROUP, "weight_group": WEIGHT_GROUP, "kv_group": KV_GROUP, "page_tokens": PAGE_TOKENS,
        "sum_neurons": SUM_NEURONS, "tile_rows": TILE_ROWS, "line_columns": LINE_COLUMNS,
    }  # fmt: skip
    for group in (WEIGHT_GROUP, MOST_GROUP):
        assert _native.Matrix(16, 64, "int4", group, 0).tiles == 1
    for group in (0, WEIGHT_GROUP // 2, WEIGHT_GROUP + 1, MOST_GROUP + WEIGHT_GROUP):
        with pytest.raises(ValueError, match=f"multiple of {WEIGHT_GROUP}, at most {MOST_GROUP}"):
            _native.Matrix(16, 64, "int4", group, 0)
    with pytest.raises(ValueError, match=f"multiple of {KV_GROUP}"):
        _native.CacheShape("int8", KV_GROUP + 8, 1, PAGE_TOKENS, 64)
    with pytest.raises(ValueError, match="at least 1"):
        _native.CacheShape("float16", 0, 1, 0, 64)


@st.composite
def layers(draw: st.DrawFn, widest: int) -> tuple[Layer, dict[str, Part]]:
    """A layer, and its parts by kind."""
    kv_heads, group = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    head_dim = draw(st.sampled_from([4, 18, 32, 64, 80, 128, 256]))
    ffn = FfnSpec(draw(st.integers(1, 64 * 80)), "relu", draw(st.booleans()))
    layer, d = Layer(Attention(kv_heads * group, kv_heads, head_dim, 1.0), ffn), draw(st.integers(1, widest))
    spec = ModelSpec("llama", "float32", 64, d, d, 64, (layer,), NormSpec("rms", 1e-5), True, True)
    found = parts(spec, parse_format(draw(FORMATS)))
    return layer, {part.kind: part for part in found}


@given(layers(20_000), ROWS, st.sampled_from(KV_FORMATS))
def test_plans_say_what_the_kernels_say(made: tuple[Layer, dict[str, Part]], rows: int, kv: str) -> None:
    layer, by_kind = made
    a, attn, ffn = layer.attention, by_kind["attn"], by_kind["ffn"]
    norm, fmt = NormSpec("rms", 1e-5), parse_format(kv)
    vocab, o = by_kind["embed"].block("rows"), attn.block("o")
    heads, cache = cpu.attention_shape(a, 0, a.kv_heads), cpu.cache_shape(a, PAGE_TOKENS, fmt)
    said = scratch_native
    assert said.project_bytes(vocab, rows) == _native.project_scratch(cpu.matrix(vocab), rows)
    for n in {1, attn.granules}:
        assert said.out_bytes(o, n, rows) == _native.out_scratch(cpu.matrix(o), n, rows)
    for n in {1, ffn.granules}:
        assert said.ffn_bytes(ffn, n, rows) == _native.ffn_scratch(cpu.ffn_shape(ffn, layer.ffns[0]), n, rows)
    qkv = _native.qkv_scratch(cpu.qkv_shape(attn, a, norm), heads, rows)
    assert said.qkv_bytes(attn, a, a.kv_heads, rows) == qkv
    for chosen in (0, 1, 256, 4001):
        assert said.attend_bytes(a, fmt, rows, chosen) == _native.attend_scratch(heads, cache, rows, chosen)
    assert said.merge_bytes(vocab.cols, rows) == _native.merge_scratch(rows, vocab.cols)


def aligned(nbytes: int) -> np.ndarray:
    """Exactly so many bytes, from a line of the cache on."""
    whole = np.zeros(nbytes + 64, np.uint8)
    at = -int(whole.ctypes.data) % 64
    return whole[at : at + nbytes]


@pytest.mark.parametrize("isa", ISAS)
@given(FORMATS, st.integers(1, 6), st.integers(1, 300), ROWS)
def test_kernels_run_in_what_they_want(isa: str, name: str, granules: int, cols: int, rows: int) -> None:
    """Activations exact and rounded; in a line less one of the two does not."""
    m = cpu.matrix(Block("o", 16, cols, parse_format(name), 0))
    nbytes = _native.out_scratch(m, granules, rows)
    weights, x = np.zeros(granules * m.tile_bytes, np.uint8), np.ones((rows, granules * cols), np.float32)
    total, temporaries = np.ones((rows, 16), np.float32), aligned(nbytes)

    def refused(nbytes: int, exact: bool) -> bool:
        try:
            COMPUTE[isa].out(
                weights=int(weights.ctypes.data), count=granules, stride=m.tile_bytes, matrix=m, a=int(x.ctypes.data),
                a_stride=granules * cols, t=rows, partial=int(total.ctypes.data), starts_sum=True, exact=exact,
                scratch=int(temporaries.ctypes.data), scratch_bytes=nbytes,
            )  # fmt: skip
        except ValueError:
            return True
        assert (total == 0).all()
        return False

    assert not refused(nbytes, True) and not refused(nbytes, False)
    assert refused(nbytes - 64, True) or refused(nbytes - 64, False)


def test_a_scratch_in_which_kernels_would_be_slower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(Attention(8, 2, 64, 1.0), FfnSpec(640, "silu", True))
    spec = ModelSpec("llama", "float32", 64, 512, 512, 512, (layer,), NormSpec("rms", 1e-5), True, True)

    def bind() -> None:
        plan = resident_plan(spec, Format("bfloat16"), kv=Format("float16"), context=64, rows=16)
        arenas = Arenas(plan)
        try:
            NativeBinding(plan, arenas, None, native(None, 1, True))
        finally:
            arenas.close()

    bind()
    monkeypatch.setattr(scratch, "scratch_bytes", lambda plan, tier: 4096)
    with pytest.raises(AssertionError, match="where kernels want"):
        bind()
