"""Triton kernels on whole rows: norms and merges, one program per row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _norm(
    x, columns, kept, weight, bias, eps, offset, D: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """norm(x) of a row x float32 [BLOCK], which is 0 beyond D."""
    if LAYER:
        mean = tl.sum(x, 0) / D
        x = tl.where(kept, x - mean, 0.0)
    variance = tl.sum(x * x, 0) / D
    x = x * (1.0 / tl.sqrt(variance + eps))
    if WEIGHT:
        x = x * (tl.load(weight + columns, mask=kept, other=0.0) + offset)
    if BIAS:
        x = x + tl.load(bias + columns, mask=kept, other=0.0)
    return x


@triton.jit
def norm_kernel(
    x, chosen, weight, bias, h, x_stride, h_stride, eps, offset,
    D: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """h float32 [n, D] = norm(x float32 [T, D]). With CHOSEN it takes the rows `chosen` int32 [n] of x. Grid: (n,)."""
    row = tl.program_id(0)
    source = row
    if CHOSEN:
        source = tl.load(chosen + row)
    columns = tl.arange(0, BLOCK)
    kept = columns < D
    value = tl.load(x + source.to(tl.int64) * x_stride + columns, mask=kept, other=0.0)
    value = _norm(value, columns, kept, weight, bias, eps, offset, D, LAYER, WEIGHT, BIAS)
    tl.store(h + row.to(tl.int64) * h_stride + columns, value, mask=kept)


@triton.jit
def merge_kernel(
    x, p0, p1, p2, p3, bias, out_weight, out_bias, after_weight, after_bias, ids, factors, biases,
    x_stride, s0, s1, s2, s3, eps, offset,
    D: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVE: tl.constexpr, LAYER: tl.constexpr,
    WEIGHT: tl.constexpr, NORM_BIAS: tl.constexpr, OUT: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [T, D] += norm_out(sum of PARTS partials [T, D] + bias), then x = norm_after(x). All float32. With ACTIVE
    (0: none) the bias is also Σ factors [T, ACTIVE] · biases [X, D] of the experts `ids` int32 [T, ACTIVE]. Grid:
    (T,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    kept = columns < D
    y = tl.load(p0 + row * s0 + columns, mask=kept, other=0.0)
    if PARTS > 1:
        y += tl.load(p1 + row * s1 + columns, mask=kept, other=0.0)
    if PARTS > 2:
        y += tl.load(p2 + row * s2 + columns, mask=kept, other=0.0)
    if PARTS > 3:
        y += tl.load(p3 + row * s3 + columns, mask=kept, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + columns, mask=kept, other=0.0)
    for rank in tl.static_range(ACTIVE):
        expert = tl.load(ids + row * ACTIVE + rank).to(tl.int64)
        y += tl.load(biases + expert * D + columns, mask=kept, other=0.0) * tl.load(factors + row * ACTIVE + rank)
    if OUT:
        y = _norm(y, columns, kept, out_weight, out_bias, eps, offset, D, LAYER, WEIGHT, NORM_BIAS)
    y += tl.load(x + row * x_stride + columns, mask=kept, other=0.0)
    if AFTER:
        y = _norm(y, columns, kept, after_weight, after_bias, eps, offset, D, LAYER, WEIGHT, NORM_BIAS)
    tl.store(x + row * x_stride + columns, y, mask=kept)
