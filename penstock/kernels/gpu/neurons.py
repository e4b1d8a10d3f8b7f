"""FFNs that lie neuron by neuron on torch tensors. `kernels.reference.dense.ffn` defines them.

Shapes: T rows, D d_model, n granules of a unit, N = n · 64 neurons. `weights` uint8 [n, granule_bytes] as packed, all
else float32 with contiguous rows. Few rows read no more of the weights than neurons fire. Many rows, and torch without
Triton, compute all neurons of widened pieces: their union is nearly all neurons, and a product of zeros adds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.graph.scratch_gpu import neuron_splits, pieces
from penstock.kernels.gpu.choose import Kernels
from penstock.kernels.gpu.memory import TensorScratch, vectors
from penstock.kernels.gpu.product import (
    ROWS_AT_ONCE,
    activate,
    activated,
    few_rows,
    pow2,
    precision,
    sum_parts,
)
from penstock.kernels.gpu.widen import columns_of, numbers, typed, word_bytes
from penstock.spec.format import LINE_COLUMNS
from penstock.spec.model import FfnSpec
from penstock.spec.parts import Block, Part

_BLOCK = 32  # words of a row that a program takes at once, one a thread of a warp: 256 columns of int4
_WIDEN_BLOCK = 128


def add_ffn(
    weights: Tensor, part: Part, shape: FfnSpec, h: Tensor, partial: Tensor, first: bool, skips: bool, kernels: Kernels,
    scratch: TensorScratch, active: Tensor | None = None,
) -> None:  # fmt: skip
    """partial [T, D] = (first) or += down · (act(gate h) * (up h)) over the granules, h [T, D]. `skips`: what an
    activation of 0 multiplies is left out, where that saves reads. The sums are the same to the bit either way.
    `active` uint8 [T, N]: as in `dense.ffn`."""
    n, t = weights.shape[0], h.shape[0]
    name = "gate" if shape.gated else "up"
    hidden = scratch.take((t, n * part.granule_rows))
    if part.by_records:
        _fire_records(weights, part, name, shape, h, hidden, active, kernels, scratch)
    else:
        bias = part.block(name + "_bias") if part.has(name + "_bias") else None
        activated(h, weights, part.block(name), bias, shape.activation, hidden, kernels, scratch)
        if active is not None:
            hidden.masked_fill_(active == 0, 0.0)
    if few_rows(kernels, t):
        _few(weights, part, shape, h, hidden, partial, first, skips, scratch)
    else:
        _many(weights, part, shape, h, hidden, partial, first, kernels, scratch)


def _few(
    weights: Tensor, part: Part, shape: FfnSpec, h: Tensor, hidden: Tensor, partial: Tensor, first: bool, skips: bool,
    scratch: TensorScratch,
) -> None:  # fmt: skip
    from penstock.kernels.gpu import neuron_kernels

    n, t, width = weights.shape[0], h.shape[0], part.granule_rows
    down = part.block("down")
    words, halves = typed(weights, down.format)
    lives, counts = _live(hidden, n, width, not skips, scratch)
    at_once = min(pow2(t), ROWS_AT_ONCE)
    if shape.gated:
        _multiply_live(weights, part, "up", h, hidden, lives, counts)
    splits = neuron_splits(part, n, t)
    parts = scratch.take((splits, t, down.cols)) if splits > 1 else partial
    neuron_kernels.add_live_kernel[(-(-_row_words(down) // _BLOCK), splits, -(-t // at_once))](
        words, halves, hidden, lives, counts, parts, t, n, hidden.stride(0), parts.stride(-2), parts.stride(0),
        words.stride(0), R=width, SPLITS=splits, ADD=splits == 1 and not first, ROWS=at_once, BLOCK=_BLOCK,
        num_warps=1, **_row(down),
    )  # fmt: skip
    if splits > 1:
        sum_parts(parts, partial, first)


def _many(
    weights: Tensor, part: Part, shape: FfnSpec, h: Tensor, hidden: Tensor, partial: Tensor, first: bool,
    kernels: Kernels, scratch: TensorScratch,
) -> None:  # fmt: skip
    down, width, mark = part.block("down"), part.granule_rows, scratch.mark()
    if shape.gated:
        _multiply_all(weights, part, "up", h, hidden, kernels, scratch)
    for p in pieces(weights.shape[0], down):
        scratch.rewind(mark)
        wide, columns = _widened(weights[p.lo : p.hi], down, p.row_lo, p.row_hi, kernels, scratch)
        lo = p.lo * width + p.row_lo
        with precision(kernels, down, h):
            if first and lo == 0:
                torch.mm(hidden[:, lo : lo + columns], wide, out=partial)
            else:
                torch.addmm(partial, hidden[:, lo : lo + columns], wide, out=partial)
    scratch.rewind(mark)


def _fire_records(
    weights: Tensor, part: Part, name: str, shape: FfnSpec, h: Tensor, hidden: Tensor, active: Tensor | None,
    kernels: Kernels, scratch: TensorScratch,
) -> None:  # fmt: skip
    """hidden [T, N] = act(h · the matrix `name`), whose rows lie in the neurons' records; 0 where a neuron is not
    active. Few rows read no records but those of active neurons."""
    if active is None:
        hidden.fill_(1.0)
    else:
        hidden.copy_(active)
    if few_rows(kernels, h.shape[0]):
        mark = scratch.mark()
        lives, counts = _live(hidden, weights.shape[0], part.granule_rows, active is None, scratch)
        _multiply_live(weights, part, name, h, hidden, lives, counts)
        scratch.rewind(mark)
    else:
        _multiply_all(weights, part, name, h, hidden, kernels, scratch)
    activate(hidden, shape.activation)


def _live(hidden: Tensor, granules: int, width: int, every: bool, scratch: TensorScratch) -> tuple[Tensor, Tensor]:
    """Of each granule the neurons for which `hidden` has a number other than 0 in some row, or `every` one, int32
    [granules, width], and how many they are, int32 [granules]."""
    from penstock.kernels.gpu import neuron_kernels

    lives, counts = scratch.take((granules, width), torch.int32), scratch.take((granules,), torch.int32)
    neuron_kernels.live_kernel[(granules,)](
        hidden, lives, counts, hidden.shape[0], hidden.stride(0), every, width, num_warps=1
    )
    return lives, counts


def _multiply_live(
    weights: Tensor, part: Part, name: str, h: Tensor, hidden: Tensor, lives: Tensor, counts: Tensor
) -> None:  # fmt: skip
    """hidden [T, N] *= h · the rows `name` of the neurons that are listed, plus a bias; what is 0 stays 0."""
    from penstock.kernels.gpu import neuron_kernels

    block, floats = part.block(name), weights.view(torch.float32)
    words, halves = typed(weights, block.format)
    bias = part.block(f"{name}_bias").offset // 4 if part.has(f"{name}_bias") else -1
    t, at_once = h.shape[0], min(pow2(h.shape[0]), ROWS_AT_ONCE)
    neuron_kernels.multiply_live_kernel[(lives.numel(), -(-t // at_once))](
        words, halves, floats, h, hidden, lives, counts, t, h.stride(0), hidden.stride(0), words.stride(0),
        floats.stride(0), BIAS=bias, R=lives.shape[1], ROWS=at_once, BLOCK=_BLOCK, num_warps=1, **_row(block),
    )  # fmt: skip


def _multiply_all(
    weights: Tensor, part: Part, name: str, h: Tensor, hidden: Tensor, kernels: Kernels, scratch: TensorScratch
) -> None:  # fmt: skip
    """The same of all neurons, by widened pieces."""
    block, width, mark = part.block(name), part.granule_rows, scratch.mark()
    for p in pieces(weights.shape[0], block):
        scratch.rewind(mark)
        wide, columns = _widened(weights[p.lo : p.hi], block, p.row_lo, p.row_hi, kernels, scratch)
        lo = p.lo * width + p.row_lo
        product = scratch.take((h.shape[0], columns))
        with precision(kernels, block, h):
            torch.mm(h, wide.T, out=product)
        if part.has(f"{name}_bias"):
            product += vectors(weights[p.lo : p.hi], part.block(f"{name}_bias"))[:, p.row_lo : p.row_hi].flatten()
        fired = hidden[:, lo : lo + columns]
        still = fired == 0  # 0 times infinity is not 0
        fired.mul_(product).masked_fill_(still, 0.0)
    scratch.rewind(mark)


def _widened(
    weights: Tensor, block: Block, row_lo: int, row_hi: int, kernels: Kernels, scratch: TensorScratch
) -> tuple[Tensor, int]:
    """(rows `row_lo`..`row_hi` of each granule's neurons as float32 [neurons, C], in scratch, how many they are)."""
    n, rows = weights.shape[0], row_hi - row_lo
    wide = scratch.take((n * rows, block.cols))
    target = wide.view(n, rows, block.cols)
    if kernels.triton:
        from penstock.kernels.gpu import neuron_kernels

        words, halves = typed(weights, block.format)
        how = _row(block)
        how["OFFSET"] += row_lo * how["STRIDE"]
        neuron_kernels.widen_rows_kernel[(n, rows, -(-_row_words(block) // _WIDEN_BLOCK))](
            words, halves, target, words.stride(0), target.stride(0), target.stride(1), BLOCK=_WIDEN_BLOCK, **how
        )
    else:
        target.copy_(_widen(weights, block, row_lo, row_hi))
    return wide, n * rows


def _widen(weights: Tensor, block: Block, lo: int, hi: int) -> Tensor:
    """Rows lo..hi of each granule's neurons, widened by torch: float32 [n, hi - lo, C]."""
    fmt, codes_bytes = block.format, block.format.codes_bytes(block.cols)
    n, granule_bytes = weights.shape
    rows = weights.as_strided(
        (n, hi - lo, fmt.row_bytes(block.cols)), (granule_bytes, block.stride, 1),
        weights.storage_offset() + block.offset + lo * block.stride,
    )  # fmt: skip
    stored = rows[..., :codes_bytes].contiguous()
    if not fmt.is_quantised:
        words = stored.view(torch.float16 if fmt.kind == "float16" else torch.int32)
        return numbers(words[..., None, :], None, fmt)[..., : block.cols]
    groups = fmt.groups(block.cols)
    words = stored.view(torch.int32)  # [n, rows, words]
    if fmt.kind == "int4":  # low nibbles of a line are its first 16 columns, high ones the others
        low, high = stored & 15, stored >> 4
        lines = (low.unflatten(-1, (-1, LINE_COLUMNS // 2)), high.unflatten(-1, (-1, LINE_COLUMNS // 2)))
        codes = torch.cat(lines, dim=-1).flatten(-2)
    else:
        codes = stored
    halves = rows[..., codes_bytes : codes_bytes + 4 * groups].contiguous().view(torch.float16).float()
    column_group = torch.arange(block.cols, device=weights.device) // fmt.group
    return codes[..., : block.cols].float() * halves[..., column_group] + halves[..., groups + column_group]


def _row_words(block: Block) -> int:
    """Words of a neuron's numbers."""
    return block.format.codes_bytes(block.cols) // word_bytes(block.format)


def _row(block: Block) -> dict[str, Any]:
    """Compile-time arguments that say where the rows of a block lie, and how."""
    fmt, size = block.format, word_bytes(block.format)
    return {
        "OFFSET": block.offset // size, "STRIDE": block.stride // size, "KIND": fmt.kind, "COLS": block.cols,
        "PER_WORD": columns_of(fmt), "ROW_WORDS": _row_words(block), "GROUP": fmt.group or 1,
        "GROUPS": fmt.groups(block.cols),
    }  # fmt: skip
