"""The ops of attention on torch tensors: qkv, attend and out. `kernels.reference.attention` defines them.

Shapes: T rows of the batch, H heads, K KV heads, G = H / K, E head_dim. `positions` int32 [T]: the position of each
row. `sequence` int32 [T]: the row's sequence, as the pools number them. Other tensors are as in `dense`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from penstock.graph.scratch_gpu import attend_splits, attend_tile_rows
from penstock.kernels.gpu.cache import TensorKv
from penstock.kernels.gpu.choose import Kernels
from penstock.kernels.gpu.memory import TensorScratch, vector, vectors
from penstock.kernels.gpu.product import add_up, spread
from penstock.spec.format import Format
from penstock.spec.model import Attention, NormSpec
from penstock.spec.parts import Part

# How many numbers of keys the torch path widens to float32 at once: 16 MiB. Its temporaries are some four times that.
_TORCH_NUMBERS = 4 << 20


def turns(positions: Tensor, frequencies: Tensor, factor: float, cos: Tensor, sin: Tensor) -> None:
    """Fills cos and sin float32 [T, dims / 2] for positions int32 [T], once a pass for all layers that share a rope.
    `frequencies` float32 [dims / 2] and `factor` come from `kernels.rope.frequencies`."""
    torch.mul(positions[:, None], frequencies[None, :], out=sin)
    torch.cos(sin, out=cos)
    torch.sin(sin, out=sin)
    if factor != 1.0:
        cos.mul_(factor)
        sin.mul_(factor)


def qkv(
    weights: Tensor, part: Part, lo: int, a: Attention, norm: NormSpec, norms: Tensor, norms_part: Part, h: Tensor,
    turn: tuple[Tensor, Tensor] | None, positions: Tensor, sequence: Tensor, q: Tensor,
    keys: TensorKv, values: TensorKv, kernels: Kernels, scratch: TensorScratch,
) -> None:  # fmt: skip
    """Projects h [T, D] for the unit's granules from `lo` on, adds biases, norms and rotates q and k, and stores k and
    v in the cache. Writes q float32 [T, H, E].

    weights uint8 [granules, granule_bytes]: a granule is one KV head, or all of them where they are normed together.
    `turn`: cos and sin float32 [T, dims / 2], or None."""
    t, g, e = h.shape[0], a.heads_per_kv, a.head_dim
    n, lo = weights.shape[0] * part.granule_rows, lo * part.granule_rows  # KV heads
    mark = scratch.mark()
    raw = [scratch.take((t, n * width)) for width in (g * e, e, e)]
    spread(h, weights, tuple(part.block(name) for name in ("q", "k", "v")), raw, kernels, scratch)
    q_raw, k_raw, v_raw = (x.view(t, n, -1, e) for x in raw)
    names = ("q_norm", "k_norm")
    q_weight, k_weight = (vector(norms, norms_part.block(name)) if a.qk_norm else h for name in names)
    if a.norms_all_heads:
        for name, x, weight in (("q", q_raw, q_weight), ("k", k_raw, k_weight), ("v", v_raw, None)):
            if part.has(name + "_bias"):
                x += vectors(weights, part.block(name + "_bias")).view(n, -1, e)
            if weight is not None and a.qk_norm:
                flat = x.flatten(1)
                flat *= torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm.eps) * weight
        a = replace(a, qkv_bias=False, qk_norm=False, norms_all_heads=False)  # these are done
    if kernels.triton:
        _turn_and_store(
            weights, part, lo, a, norm, (q_raw, k_raw, v_raw), (q_weight, k_weight), turn, positions, sequence, q, keys,
            values,
        )  # fmt: skip
        scratch.rewind(mark)
        return
    for name, x in (("q", q_raw), ("k", k_raw), ("v", v_raw)):
        if a.qkv_bias and part.has(name + "_bias"):
            x += vectors(weights, part.block(name + "_bias")).view(n, -1, e)
    for x, weight in ((q_raw, q_weight), (k_raw, k_weight)):
        if a.qk_norm:
            x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * weight
        if turn is not None:
            _rotate(x, *turn)
    q[:, lo * g : (lo + n) * g].copy_(q_raw.flatten(1, 2))
    for i in range(n):
        keys.store(lo + i, k_raw[:, i, 0], positions, sequence)
        values.store(lo + i, v_raw[:, i, 0], positions, sequence)
    scratch.rewind(mark)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates x [T, n, heads, E] in place by cos and sin [T, dims / 2]. Dimension i of the first half of the rotated
    dimensions turns with dimension i of the second half."""
    half = cos.shape[1]
    low, high = x[..., :half], x[..., half : 2 * half]
    c, s = cos[:, None, None], sin[:, None, None]
    turned = low * c - high * s
    high.mul_(c).add_(low * s)
    low.copy_(turned)


def _turn_and_store(
    weights: Tensor, part: Part, lo: int, a: Attention, norm: NormSpec, raw: tuple[Tensor, Tensor, Tensor],
    qk_weights: tuple[Tensor, Tensor], turn: tuple[Tensor, Tensor] | None, positions: Tensor, sequence: Tensor,
    q: Tensor, keys: TensorKv, values: TensorKv,
) -> None:  # fmt: skip
    from penstock.kernels.gpu import turn_kernels

    t, n, g, e = raw[0].shape
    fmt, floats = keys.format, weights.view(torch.float32)
    biases = [part.block(f"{x}_bias").offset // 4 if a.qkv_bias else 0 for x in "qkv"]
    cos, sin = turn if turn is not None else (raw[0], raw[0])
    turn_kernels.turn_kernel[(t, n, g + 2)](
        *raw, floats, *qk_weights, cos, sin, positions, sequence, q,
        _typed(keys), _typed(values), _bits(keys), _bits(values),
        lo, q.stride(0), floats.stride(0), keys.blocks.stride(0), keys.blocks.stride(1), keys.pages,
        keys.pages.stride(0), norm.eps,
        *biases, a.qkv_bias, a.qk_norm, cos.shape[1] if turn is not None else 0, g, e, n, keys.page_tokens, fmt.kind,
        fmt.group, keys.groups, keys.codes_bytes, _pow2(e), _places(fmt, e)[1],
        num_warps=1 if e <= 128 else 4, enable_fp_fusion=False,
    )  # fmt: skip


def attend(
    q: Tensor, keys: TensorKv, values: TensorKv, a: Attention, lo: int, hi: int, positions: Tensor, sequence: Tensor,
    out: Tensor, longest: int, kernels: Kernels, scratch: TensorScratch, sinks: Tensor | None = None,
    value_share: float = 1.0,
) -> None:  # fmt: skip
    """out float32 [T, H, E] = softmax(scale · q kᵀ, causal, windowed) v for the KV heads lo…hi; q float32 [T, H, E].
    `positions`, `sequence`: int32 [T]. `sinks` float32 [H]: a score of each head that its softmax counts beside those
    of the positions, with no value. `value_share`: below 1, of the n positions that a row sees those ceil(value_share ·
    n) alone count whose scores are the best. That has no Triton kernel, and is torch's.

    `longest`: the most rows that a sequence of the batch has, 1 when decoding. It only decides how many rows of a tile
    share the KV that a program reads. Results do not depend on it."""
    if value_share < 1:
        _attend_to_best(q, keys, values, a, lo, hi, positions, sequence, sinks, value_share, out)
        return
    if not kernels.triton:
        _attend_by_torch(q, keys, values, a, lo, hi, positions, sequence, sinks, out)
        return
    from penstock.kernels.gpu import attend_kernels

    t, g, e, heads = q.shape[0], a.heads_per_kv, a.head_dim, hi - lo
    rows = attend_tile_rows(a, longest)
    n_tiles = -(-t // rows)
    splits = attend_splits(n_tiles * heads, keys.context)
    mark, target, stats = scratch.mark(), out, out
    if splits > 1:
        target, stats = scratch.take((splits, t, heads * g, e)), scratch.take((splits, t, heads * g, 2))
    wide, places = _places(keys.format, e)
    m = max(16, _pow2(rows * g))
    # Prefill computes more than it reads: on tensor cores, where the user lets products round to TF32.
    rounded = rows > 1 and kernels.matmul == "tf32" and kernels.dot == "tf32x3" and keys.format.kind != "float32"
    attend_kernels.attend_kernel[(n_tiles, heads, splits)](
        q, _typed(keys), _typed(values), _halves(keys), _halves(values), positions, sequence,
        q if sinks is None else sinks, target, stats, a.scale, t, lo, q.stride(0), out.stride(0), target.stride(0),
        stats.stride(0), keys.blocks.stride(0), keys.blocks.stride(1), keys.pages, keys.pages.stride(0),
        g, e, heads, keys.page_tokens, a.softcap, a.window, sinks is not None, rows, splits, m, _block(e),
        keys.format.kind, keys.format.group, keys.groups, keys.codes_bytes, wide, places,
        "tf32" if rounded else kernels.dot,
        num_warps=4 if m * wide * places <= 4096 else 8,
        # With one row the next block is asked for before this one is done. More rows need the shared memory themselves.
        num_stages=2 if rows == 1 else 1,
    )  # fmt: skip
    if splits > 1:
        attend_kernels.merge_splits_kernel[(t, heads * g)](
            target,
            stats,
            out,
            lo * g,
            out.stride(0),
            target.stride(0),
            stats.stride(0),
            heads * g,
            e,
            splits,
            _pow2(splits),
            _pow2(e),
        )
    scratch.rewind(mark)


def out(
    weights: Tensor, part: Part, lo: int, a: Attention, heads_out: Tensor, partial: Tensor, first: bool,
    kernels: Kernels, scratch: TensorScratch,
) -> None:  # fmt: skip
    """partial float32 [T, D] (+)= heads_out float32 [T, H, E] · o, for the unit's granules from `lo` on: weights uint8
    [n, granule_bytes]. `first`: this call is the first addend."""
    width = part.granule_rows * a.heads_per_kv * a.head_dim
    x = heads_out.flatten(1)[:, lo * width : (lo + weights.shape[0]) * width]
    add_up(x, weights, part.block("o"), partial, first, kernels, scratch)


def _attend_by_torch(
    q: Tensor, keys: TensorKv, values: TensorKv, a: Attention, lo: int, hi: int, positions: Tensor, sequence: Tensor,
    sinks: Tensor | None, result: Tensor,
) -> None:  # fmt: skip
    """`attend` by torch, page by page with a running maximum. On a device it goes over the whole room for context, so
    that nothing waits for positions. On the processor it goes as far as some row sees."""
    g, p = a.heads_per_kv, keys.page_tokens
    pages = keys.pages.shape[1] if positions.device.type != "cpu" else int(positions.max()) // p + 1
    step = max(1, _TORCH_NUMBERS // (p * a.head_dim))
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        position, table = positions[rows].long()[:, None, None], keys.pages[sequence[rows].long()].long()
        for head in range(lo, hi):
            query = q[rows, head * g : (head + 1) * g]  # [T, G, E]
            total = torch.zeros_like(query)
            best = torch.full_like(query[..., :1], -torch.inf)
            weight = torch.zeros_like(best)
            if sinks is not None:  # seen before all positions, with a value of 0
                best, weight = best.copy_(sinks[None, head * g : (head + 1) * g, None]), weight + 1
            for page in range(pages):
                seen = torch.arange(page * p, (page + 1) * p, device=q.device)[None, None, :]
                visible = seen <= position
                scores = torch.matmul(query, keys.load(head, table[:, page]).transpose(1, 2)).mul_(a.scale)
                if a.softcap:
                    scores.div_(a.softcap).tanh_().mul_(a.softcap)
                near = visible & (seen > position - a.window) if a.window else visible
                scores.masked_fill_(~near, -torch.inf)
                peak = torch.maximum(best, scores.amax(-1, keepdim=True))
                # A row that has seen nothing yet has peak -inf. Base 0 gives it exp(-inf - 0) = 0, and no NaN.
                base = peak.masked_fill(peak == -torch.inf, 0.0)
                scores.sub_(base).exp_()
                shrink = torch.exp(best - base)
                weight.mul_(shrink).add_(scores.sum(-1, keepdim=True))
                value = values.load(head, table[:, page])
                # Positions beyond a row may hold anything, NaN too, and 0 times NaN is not 0.
                value = value.masked_fill_(~visible.transpose(1, 2), 0.0)
                total.mul_(shrink).add_(torch.matmul(scores, value))
                best = peak
            result[rows, head * g : (head + 1) * g] = total.div_(weight)


def _attend_to_best(
    q: Tensor, keys: TensorKv, values: TensorKv, a: Attention, lo: int, hi: int, positions: Tensor, sequence: Tensor,
    sinks: Tensor | None, share: float, result: Tensor,
) -> None:  # fmt: skip
    """`attend` to each query's best positions, by torch: scores of all pages, and then the values of these positions
    alone, gathered. As many are gathered as a row with the longest context wants, so that nothing waits for positions;
    those that a shorter one does not want weigh 0. Of equal scores the earlier positions count."""
    g, p = a.heads_per_kv, keys.page_tokens
    on_processor = positions.device.type == "cpu"
    pages = int(positions.max()) // p + 1 if on_processor else keys.pages.shape[1]
    most = max(1, math.ceil(share * (min(pages * p, a.window) if a.window else pages * p)))
    step = max(1, _TORCH_NUMBERS // (pages * p * g + most * g * a.head_dim + p * a.head_dim))
    every = torch.arange(pages * p, device=q.device)[None, None, :]
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        position, table = positions[rows].long()[:, None, None], keys.pages[sequence[rows].long()].long()
        near = every <= position
        if a.window:
            near &= every > position - a.window
        wanted = torch.ceil(share * near.sum(-1, keepdim=True).double()).clamp(min=1).long()  # [T, 1, 1]
        for head in range(lo, hi):
            query = q[rows, head * g : (head + 1) * g]  # [T, G, E]
            scores = torch.cat(
                [torch.matmul(query, keys.load(head, table[:, page]).transpose(1, 2)) for page in range(pages)], -1
            ).mul_(a.scale)
            if a.softcap:
                scores.div_(a.softcap).tanh_().mul_(a.softcap)
            spoilt = (scores.isnan() & near).any(-1, keepdim=True)
            scores.masked_fill_(~near, -torch.inf)
            best, at = torch.sort(scores, dim=-1, descending=True, stable=True)
            best, at = best[..., :most], at[..., :most]  # [T, G, most]
            best = best.masked_fill(torch.arange(most, device=q.device) >= wanted, -torch.inf)
            peak = best.amax(-1, keepdim=True)
            if sinks is not None:
                peak = torch.maximum(peak, sinks[None, head * g : (head + 1) * g, None])
            base = peak.masked_fill(peak == -torch.inf, 0.0)
            weights = torch.exp(best - base)
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total += torch.exp(sinks[None, head * g : (head + 1) * g, None] - base)
            page = torch.gather(table[:, None].expand(-1, g, -1), 2, at // p)
            value = values.rows(head, page, at % p)  # [T, G, most, E]
            # Positions that nobody sees may hold anything, NaN too, and 0 times NaN is not 0.
            value = value.masked_fill_((weights == 0)[..., None], 0.0)
            summed = torch.matmul(weights[..., None, :], value)[..., 0, :].div_(total)
            result[rows, head * g : (head + 1) * g] = summed.masked_fill_(spoilt, torch.nan)


def _places(fmt: Format, head_dim: int) -> tuple[int, int]:
    """(groups, numbers of a group) of a row of the cache, each padded to a power of 2, with at least 16 numbers. For
    int4 it is half of a group's numbers."""
    if not fmt.is_quantised:
        return 1, max(16, _pow2(head_dim))
    inside = min(fmt.group, -(-head_dim // 32) * 32)
    return _pow2(fmt.groups(head_dim)), max(16, _pow2(inside // 2 if fmt.kind == "int4" else inside))


def _block(head_dim: int) -> int:
    """Positions that a program reads at once. They are so few that keys and values fit into the program's registers,
    and into the 100 KB of shared memory that a processor of a small card has."""
    return 32 if head_dim <= 128 else 16


def _pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _typed(pool: TensorKv) -> Tensor:
    """The pool's blocks in the type of their numbers: bfloat16 as int16, codes as uint8."""
    types = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.int16}
    return pool.blocks.view(types.get(pool.format.kind, torch.uint8))


def _halves(pool: TensorKv) -> Tensor:
    return pool.blocks.view(torch.float16)


def _bits(pool: TensorKv) -> Tensor:
    return pool.blocks.view(torch.int16)
