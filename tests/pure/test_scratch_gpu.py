"""Sizes and cuts of the GPU kernels' temporaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import scratch_gpu
from penstock.graph.resident import resident_plan
from penstock.models import spec_from_config
from penstock.spec.format import parse_format
from penstock.spec.model import Attention
from penstock.spec.parts import Block
from tests.pure.real_models import BY_NAME


@given(st.integers(1, 30), st.integers(1, 40000), st.integers(1, 20000))
def test_pieces_cover_a_unit_once_and_are_small(granules: int, rows: int, cols: int) -> None:
    block = Block("some", rows, cols, parse_format("int4"), 0)
    seen, most = 0, scratch_gpu.wide_bytes(granules, block)
    for p in scratch_gpu.pieces(granules, block):
        size = 4 * (p.hi - p.lo) * (p.row_hi - p.row_lo) * cols
        assert p.row_lo % 16 == 0 and 0 < size <= most
        assert size <= scratch_gpu.WIDE_BYTES
        seen += (p.hi - p.lo) * (p.row_hi - p.row_lo)
    assert seen == granules * rows


@given(st.sampled_from([1, 2, 8]), st.sampled_from([1, 3, 4, 16]), st.sampled_from([64, 256]), st.integers(1, 3000),
       st.sampled_from([1, 7, 10**6]))  # fmt: skip
def test_the_bound_of_attention_covers_any_batch(
    heads: int, group: int, head_dim: int, rows: int, longest: int
) -> None:
    a = Attention(heads * group, heads, head_dim, 1.0)
    room = scratch_gpu.attend_bytes(a, heads, rows)
    for t in {1, 2, 33, rows // 7, rows // 2, rows - 1, rows} - {0}:
        if t > rows:
            continue
        tile = scratch_gpu.attend_tile_rows(a, min(longest, t))
        splits = scratch_gpu.attend_splits(-(-t // tile) * heads, 10**6)
        if splits > 1:
            assert 4 * splits * t * heads * group * (head_dim + 2) <= room


def test_the_scratch_of_an_8b_model() -> None:
    """A piece of weights, hidden activations of as many granules as are there at once, and not much more."""
    spec = spec_from_config(BY_NAME["Llama-3.1-8B"], "config.json")
    wide = scratch_gpu.WIDE_BYTES
    for rows, most in ((1, 1.1 * wide), (512, 2.9 * wide), (2048, 3.1 * wide)):
        plan = resident_plan(spec, parse_format("int4"), kv=parse_format("int4"), context=8192, rows=rows)
        assert 0.9 * wide < scratch_gpu.scratch_bytes(plan, "host") < most
        assert scratch_gpu.scratch_bytes(plan, "gpu0") <= 3 * 4 * rows * spec.d_model + 4096  # it executes no unit
