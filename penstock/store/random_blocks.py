"""Random matrices in the formats of `spec.blocks`: any codes and integer scales, d for a given standard deviation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.spec.blocks import BLOCKS, TABLES, ZERO_BITS, ZERO_POINT, Blocks
from penstock.spec.format import TILE_ROWS, Format, tiles

Array = npt.NDArray[Any]

# The integer scales of a block, which are as likely one as the other.
_SCALES = {
    "q2_k": (0, 15), "q3_k": (-32, 31), "q4_k": (0, 63), "q5_k": (0, 63), "q6_k": (-128, 127), "iq4_xs": (-32, 31),
}  # fmt: skip
_DRAWS = 1 << 16
_NO_NAN = 0xFE  # bits of a code of float8: without the last one none is NaN


def spread(kind: str) -> tuple[float, float]:
    """Of numbers whose d is 1: their standard deviation, and what d of the minimum is, so that their mean is 0."""
    blocks, rng = BLOCKS[kind], np.random.default_rng(0)
    codes = rng.integers(0, 1 << blocks.code.bits, _DRAWS).astype(np.float64)
    if kind == "float8":
        codes = (codes.astype(int) & _NO_NAN).astype(np.float64)
    numbers = np.array(TABLES[kind])[codes.astype(int)] if kind in TABLES else codes - blocks.code.offset
    lo, hi = _SCALES.get(kind, (1, 1))
    scales, minimums = rng.integers(lo, hi + 1, (2, _DRAWS))
    if blocks.word == ZERO_POINT:
        numbers = numbers - (1 << (blocks.code.low - 1))
    mean = float(codes.mean()) if blocks.halves == 2 else 0.0
    return float((numbers * scales - mean * minimums).std()), -mean if kind == "q5_1" else mean


def fill_blocks(
    out: Array, rows: int, block_rows: int, cols: int, fmt: Format, std: float, bits: Array, d: Array
) -> None:  # fmt: skip
    """Fills `out`, uint8 [fmt.matrix_bytes(block_rows, cols)], with numbers of this standard deviation; rows beyond
    `rows` are zero bits. `bits` uint8 and `d` float16: random, as many as `out` has bytes or more; d about 1."""
    blocks, deviation = BLOCKS[fmt.kind], spread(fmt.kind)
    span = blocks.span(cols)
    out[:] = bits[: out.size]
    found = out.reshape(tiles(block_rows), cols // span, -1)
    header, halves = TILE_ROWS * blocks.header_bytes(span), TILE_ROWS * blocks.scale_bytes(span)
    size = std / deviation[0]
    if fmt.kind in ("q3_k", "q4_k", "q5_k", "iq4_xs") and span < blocks.columns:
        found[:, :, :halves] &= 63  # a byte for each of their scales of 6 bits
    if blocks.word:
        _fill_words(found[:, :, :header].view(np.uint32), found[:, :, header:], blocks, d, size)
    elif fmt.kind == "mxfp4":
        found[:, :, :header] = round(127.6 + np.log2(size)) - 1 + found[:, :, :header] % 3
    else:
        numbers = found[:, :, halves:header].view(np.float16).reshape(*found.shape[:2], -1, blocks.halves, TILE_ROWS)
        numbers[:, :, :, 0] = (d[: numbers[:, :, :, 0].size] * np.float16(size)).reshape(numbers[:, :, :, 0].shape)
        if blocks.halves == 2:
            numbers[:, :, :, 1] = numbers[:, :, :, 0] * np.float16(deviation[1])
    if rows < block_rows:
        whole = rows // TILE_ROWS
        for lo, hi, word in ((0, halves, np.uint8 if fmt.kind == "mxfp4" else np.uint32), (halves, header, np.uint16),
                             (header, found.shape[2], np.uint32)):  # fmt: skip
            if fmt.kind == "iq4_xs" and lo == 0 and span == 256:  # a word of low bits, then uint16 of high bits
                found[whole:, :, :hi] = 0
                continue
            lanes = found[:, :, lo:hi].view(word).reshape(*found.shape[:2], -1, TILE_ROWS)
            lanes[whole, ..., rows % TILE_ROWS :] = 0
            lanes[whole + 1 :] = 0


def _fill_words(words: Array, codes: Array, blocks: Blocks, d: Array, size: float) -> None:
    """Scales about `size`, and zero points in the middle of the codes, which are random already."""
    words[...] = (d[: words.size].astype(np.float32) * np.float32(size)).view(np.uint32).reshape(words.shape)
    if blocks.word == ZERO_POINT:
        words &= ~np.uint32((1 << ZERO_BITS) - 1)
        words |= np.uint32(1 << (blocks.code.low - 1))
    else:
        codes &= _NO_NAN
