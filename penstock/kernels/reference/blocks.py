"""Tiles in the formats of `spec.blocks`, widened to float32 in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.spec.blocks import BLOCKS, GROUP, SCALE, TABLES, TILE_ROWS, ZERO_BITS

Array = NDArray[Any]
Float32 = NDArray[np.float32]


def widen_blocks(packed: NDArray[np.uint8], cols: int, kind: str) -> Float32:
    """Tiles uint8 [n, tile_bytes] → float32 [16 n, cols]: value = (code - offset) * scale - minimum."""
    blocks, n = BLOCKS[kind], len(packed)
    span = blocks.span(cols)
    each_block = packed.reshape(n, cols // span, -1)
    header = TILE_ROWS * blocks.header_bytes(span)
    code = blocks.code
    codes = _codes(each_block[:, :, header:].reshape(n, cols // span, span // GROUP, -1), code.low, code.high)
    numbers = codes.astype(np.float32) - np.float32(code.offset)
    if kind in TABLES:
        numbers = np.array(TABLES[kind], np.float32)[codes]
    scales, minimums = _factors(each_block[:, :, :header], kind, span)  # [n, spans, 16, scales of a span]
    by_scale = numbers.reshape(*scales.shape, -1)
    wide = by_scale * scales[..., None]
    if minimums is not None:
        wide -= minimums[..., None]
    # [n, spans, 16, columns of a span] → [n, 16, columns]
    return wide.reshape(n, cols // span, TILE_ROWS, span).swapaxes(1, 2).reshape(n * TILE_ROWS, cols)


def _codes(groups: Array, low: int, high: int) -> Array:
    """Lines uint8 [n, spans, groups, bytes] → codes uint8 [n, spans, 16, columns of a span]."""
    lines = groups.reshape(*groups.shape[:3], low + high, TILE_ROWS, 4)  # byte b of each row's word
    codes = _split(lines[:, :, :, :low], low)
    if high:
        codes = codes | _split(lines[:, :, :, low:], high) << low
    # [n, spans, groups, 8 (l), 16, 4] → [n, spans, 16, groups, l, b]
    return codes.transpose(0, 1, 4, 2, 3, 5).reshape(*groups.shape[:2], TILE_ROWS, -1)


def _split(lines: Array, bits: int) -> Array:
    """[…, lines, 16, 4] with 8 / bits numbers in each byte → […, 8, 16, 4]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
    numbers: Array = lines[..., None, :, :] >> shifts & ((1 << bits) - 1)
    return numbers.reshape(*lines.shape[:-3], 8, TILE_ROWS, 4)


def _factors(header: Array, kind: str, span: int) -> tuple[Float32, Float32 | None]:
    """Headers uint8 [n, spans, bytes] → scales, and minimums where the format has them, float32 [n, spans, 16,
    scales]."""
    blocks = BLOCKS[kind]
    if blocks.word:
        words = np.ascontiguousarray(header).view(np.uint32).reshape(*header.shape[:2], -1, TILE_ROWS).swapaxes(2, 3)
        if blocks.word == SCALE:
            return np.ascontiguousarray(words).view(np.float32), None
        zeros = words & ((1 << ZERO_BITS) - 1)
        scale: Float32 = (words - zeros).view(np.float32)
        return scale, zeros.astype(np.float32) * scale
    ends = TILE_ROWS * blocks.scale_bytes(span)
    halves = np.ascontiguousarray(header[:, :, ends:]).view(np.float16).astype(np.float32)
    halves = halves.reshape(*header.shape[:2], -1, TILE_ROWS).swapaxes(2, 3)  # [n, spans, 16, halves]
    if kind == "mxfp4":
        exponents = header.reshape(*header.shape[:2], -1, TILE_ROWS).swapaxes(2, 3).astype(np.int32)
        return np.ldexp(np.float32(1), exponents - 128), None
    if blocks.columns == GROUP:
        return halves[..., :: blocks.halves], -halves[..., 1::2] if blocks.halves == 2 else None
    scales, minimums = _integers(header[:, :, :ends], kind, span)
    wide = halves[..., :1] * scales
    return wide, None if minimums is None else halves[..., 1:] * minimums


def _integers(header: Array, kind: str, span: int) -> tuple[Array, Array | None]:
    """Scale words uint8 [n, spans, bytes] → integer scales and minimums, float32 [n, spans, 16, scales]."""
    if kind == "iq4_xs" and span == 256:
        return _iq4_xs(header), None
    # The row's bytes in their order: word w, byte b.
    row = header.reshape(*header.shape[:2], -1, TILE_ROWS, 4).swapaxes(2, 3).reshape(*header.shape[:2], TILE_ROWS, -1)
    count = span // BLOCKS[kind].scaled
    if kind == "q2_k":
        return (row[..., :count] & 15).astype(np.float32), (row[..., :count] >> 4).astype(np.float32)
    if kind == "q6_k":
        return row[..., :count].view(np.int8).astype(np.float32), None
    if kind == "q3_k" and span == 256:
        low = np.concatenate([row[..., :8] & 15, row[..., :8] >> 4], axis=-1)
        high = np.concatenate([row[..., 8:] >> 2 * i & 3 for i in range(4)], axis=-1)
        return (low | high << 4).astype(np.float32) - 32, None
    if kind in ("q3_k", "iq4_xs"):
        return row[..., :count].astype(np.float32) - 32, None
    if span < 256:
        return row[..., :count].astype(np.float32), row[..., count : 2 * count].astype(np.float32)
    a, b, c = row[..., :4], row[..., 4:8], row[..., 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=-1)
    minimums = np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _iq4_xs(header: Array) -> Array:
    """Its header of 256 columns: a word of low bits for each row, then uint16 of high bits."""
    low = header[:, :, : 4 * TILE_ROWS].reshape(*header.shape[:2], TILE_ROWS, 4)
    low = np.stack([low & 15, low >> 4], axis=-1).reshape(*low.shape[:3], 8)
    high = np.ascontiguousarray(header[:, :, 4 * TILE_ROWS :]).view(np.uint16)[..., None] >> 2 * np.arange(8) & 3
    scales: Array = (low | high << 4).astype(np.float32) - 32
    return scales
