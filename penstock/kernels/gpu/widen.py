"""Widens packed weights to float32: whole pieces of a unit for products of many rows, single rows for the embedding.

The torch path makes temporaries of its own, about as large as the widened weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.gpu.choose import Kernels
from penstock.spec.format import TILE_ROWS, Format, tiles
from penstock.spec.parts import Block

_COLUMNS = 128  # columns of 16 rows that a program of `widen_kernel` writes: 8 KiB
_GATHER_COLUMNS = 256  # columns of a row that a program of `gather_kernel` writes
_PER_WORD = {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4, "int4": 8}


def columns_of(fmt: Format) -> int:
    """Columns in a word of a tile (spec/format.py)."""
    return _PER_WORD[fmt.kind]


def word_bytes(fmt: Format) -> int:
    return 2 if fmt.kind == "float16" else 4


def typed(weights: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Two views of weights uint8 [n, granule_bytes]: as words (int32, but float16 for float16 weights), and as
    float16."""
    halves = weights.view(torch.float16)
    return (halves if fmt.kind == "float16" else weights.view(torch.int32)), halves


def widen(weights: Tensor, block: Block, row_lo: int, out: Tensor, kernels: Kernels) -> None:
    """out float32 [n, rows, C] = rows from `row_lo` on (a multiple of 16) of the block in each of n granules; weights
    uint8 [n, granule_bytes]. Only the columns of `out` need to be contiguous."""
    n, rows, cols = out.shape
    fmt = block.format
    if not kernels.triton:
        out.copy_(_widen(weights, block, row_lo // TILE_ROWS, tiles(row_lo + rows))[:, :rows, :cols])
        return
    from penstock.kernels.gpu import widen_kernels

    words, halves = typed(weights, fmt)
    tile_words = fmt.tile_bytes(cols) // word_bytes(fmt)
    first_word = block.offset // word_bytes(fmt) + row_lo // TILE_ROWS * tile_words
    widen_kernels.widen_kernel[(n, tiles(rows), -(-cols // _COLUMNS))](
        words, halves, out, words.stride(0), first_word, rows, out.stride(0), out.stride(1),
        cols, tile_words, fmt.kind, fmt.group, fmt.group_bytes // 4 if fmt.is_quantised else 0, _COLUMNS,
    )  # fmt: skip


def take_rows(weights: Tensor, block: Block, rows: Tensor, out: Tensor, kernels: Kernels) -> None:
    """out float32 [T, C] = the rows `rows` int32 [T] of a block that is cut into granules; weights uint8 [n,
    granule_bytes]."""
    fmt, t = block.format, rows.shape[0]
    words, halves = typed(weights, fmt)
    tile_words = fmt.tile_bytes(block.cols) // word_bytes(fmt)
    if kernels.triton:
        from penstock.kernels.gpu import widen_kernels

        widen_kernels.gather_kernel[(t, -(-block.cols // _GATHER_COLUMNS))](
            words, halves, rows, out, words.stride(0), out.stride(0),
            block.offset // word_bytes(fmt), block.rows, block.cols, tile_words, fmt.kind, fmt.group,
            fmt.group_bytes // 4 if fmt.is_quantised else 0, _GATHER_COLUMNS,
        )  # fmt: skip
        return
    granule = torch.div(rows, block.rows, rounding_mode="floor").long()
    inside = rows - granule * block.rows
    words, scales, minimums = _fields(weights, block, 0, tiles(block.rows))
    tile = (granule, torch.div(inside, TILE_ROWS, rounding_mode="floor"))
    lane = inside % TILE_ROWS
    # words_of_rows [T, groups, lines] and factors [T, groups]: advanced indices that stand apart make the first axis.
    words_of_rows = words[*tile, :, :, lane]
    factors = None if scales is None or minimums is None else (scales[*tile, :, lane], minimums[*tile, :, lane])
    out.copy_(numbers(words_of_rows, factors, fmt)[:, : block.cols])


def _fields(weights: Tensor, block: Block, lo: int, hi: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Views of tiles lo..hi of a block in n granules: words [n, tiles, groups, lines, 16], scales and minimums float16
    [n, tiles, groups, 16]. Float formats have one group."""
    fmt, tile_bytes = block.format, block.format.tile_bytes(block.cols)
    raw = weights[:, block.offset + lo * tile_bytes : block.offset + hi * tile_bytes]
    if not fmt.is_quantised:
        words = raw.view(torch.float16 if fmt.kind == "float16" else torch.int32)
        return words.unflatten(1, (hi - lo, 1, -1, TILE_ROWS)), None, None
    shape, ends = (hi - lo, fmt.groups(block.cols), -1, TILE_ROWS), fmt.group_bytes // 4 // TILE_ROWS - 1
    words = raw.view(torch.int32).unflatten(1, shape)[:, :, :, :ends]
    halves = raw.view(torch.float16).unflatten(1, shape)
    return words, halves[:, :, :, 2 * ends], halves[:, :, :, 2 * ends + 1]


def numbers(words: Tensor, factors: tuple[Tensor, Tensor] | None, fmt: Format) -> Tensor:
    """words [..., groups, lines], scales and minimums [..., groups] → float32 [..., padded columns]."""
    wide = torch.empty((*words.shape, columns_of(fmt)), dtype=torch.float32, device=words.device)
    if fmt.kind == "bfloat16":
        wide[..., 0] = (words << 16).view(torch.float32)
        wide[..., 1] = (words & -65536).view(torch.float32)
    elif fmt.kind == "float32":
        wide[..., 0] = words.view(torch.float32)
    elif fmt.kind == "float16":
        wide[..., 0] = words
    else:
        mask = 2**fmt.bits - 1
        for c in range(columns_of(fmt)):
            wide[..., c] = (words >> (c % 4 * 8 + c // 4 * 4)) & mask
    if factors is not None:
        scales, minimums = factors
        wide.mul_(scales.float()[..., None, None]).add_(minimums.float()[..., None, None])
    return wide.flatten(-3)


def _widen(weights: Tensor, block: Block, lo: int, hi: int) -> Tensor:
    """Tiles lo..hi of a block in n granules, widened by torch: float32 [n, 16 · tiles, padded columns]."""
    words, scales, minimums = _fields(weights, block, lo, hi)
    factors = None if scales is None or minimums is None else (scales.transpose(2, 3), minimums.transpose(2, 3))
    return numbers(words.permute(0, 1, 4, 2, 3), factors, block.format).flatten(1, 2)
