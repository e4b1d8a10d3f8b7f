"""Puts matrices that a GGUF file holds quantised into tiles by numpy: the oracle of the native `store.blocks`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BrokenModel
from penstock.spec.blocks import BLOCKS, GROUP, Blocks, Code
from penstock.spec.format import TILE_ROWS, tiles
from penstock.store.blocks import format_of

Array = npt.NDArray[Any]

# q4_1 is int4 with groups of 32: its file's blocks have d and m, as q5_1's have.
_Q4_1 = Blocks(GROUP, 20, Code(4), GROUP, 2)


def encode_by_numpy(
    raw: Array, gguf_type: str, rows: int, cols: int, first_column: int = 0, out: Array | None = None
) -> Array:
    """raw uint8 [r, bytes of a row] of a quantised GGUF type → uint8 [fmt.matrix_bytes(rows, cols)], the tiles of
    columns first_column … first_column + cols of these rows, in `format_of(gguf_type)`.

    As `encode_blocks` in `store.blocks`.
    """
    blocks, fmt = _blocks(gguf_type), format_of(gguf_type)
    assert fmt is not None and cols % GROUP == 0 and first_column % blocks.span(cols) == 0 and len(raw) <= rows
    out = np.empty(fmt.matrix_bytes(rows, cols), np.uint8) if out is None else out
    r, count = len(raw), tiles(len(raw))
    # The file's blocks that these columns touch, of whole tiles of rows.
    lo, hi = first_column // blocks.columns, -(-(first_column + cols) // blocks.columns)
    found = raw.reshape(r, -1, blocks.nbytes)[:, lo:hi]
    taken = np.zeros((count * TILE_ROWS, hi - lo, blocks.nbytes), np.uint8)
    taken[:r, : found.shape[1]] = found
    skipped = first_column - lo * blocks.columns
    wanted = (skipped, skipped + cols) if hi - lo == 1 else (0, blocks.columns)
    fields = _fields(taken, gguf_type.lower(), *wanted)
    if not np.isfinite(fields.halves.view(np.float16)).all():
        raise BrokenModel("NaN or infinite scales")
    into = out[: count * fmt.tile_bytes(cols)].reshape(count, -1)
    if fmt.in_blocks:
        _write_tiles(fields, blocks, cols, skipped, into)
    else:
        _write_int4(fields, cols, skipped, into)
    out[into.size :] = 0
    return out


@dataclass(frozen=True)
class _Fields:
    """What rows of a file's blocks hold: `codes` uint8 [r, columns] with the offset of `Blocks` in them, from column
    `first` on, `scales` uint8 [r, columns / scaled, integers] (no entries where there are none), `header` uint8 [r,
    blocks, bytes] with the same scales as the file packs them, `halves` uint16 [r, blocks, halves]."""

    codes: Array
    first: int
    scales: Array
    header: Array
    halves: Array

    def codes_of(self, first: int, cols: int) -> Array:
        """The codes of these columns, uint8 [r, cols]."""
        return self.codes[:, first - self.first :][:, :cols]


def _blocks(gguf_type: str) -> Blocks:
    return _Q4_1 if gguf_type.lower() == "q4_1" else BLOCKS[gguf_type.lower()]


def _write_tiles(fields: _Fields, blocks: Blocks, cols: int, skipped: int, out: Array) -> None:
    """Writes tiles uint8 [tiles, bytes]."""
    span = blocks.span(cols)
    count, spans, groups = len(out), cols // span, span // GROUP
    out = out.reshape(count, spans, -1)
    words = _lines(fields.codes_of(skipped, cols), blocks)  # uint32 [tiles, 16, G, lines]
    header = TILE_ROWS * blocks.header_bytes(span)
    codes = out[:, :, header:].view(np.uint32).reshape(count, spans, groups, -1, TILE_ROWS)
    codes[...] = words.reshape(count, TILE_ROWS, spans, groups, -1).transpose(0, 2, 3, 4, 1)
    at = 0

    def put(numbers: Array) -> None:
        """Writes numbers [rows, spans, n], lane by lane."""
        nonlocal at
        lanes = numbers.reshape(count, TILE_ROWS, spans, -1).transpose(0, 2, 3, 1)
        nbytes = lanes.shape[2] * TILE_ROWS * lanes.itemsize
        out[:, :, at : at + nbytes].view(lanes.dtype).reshape(lanes.shape)[...] = lanes
        at += nbytes

    if blocks.columns == GROUP:
        first = skipped // GROUP
        if not blocks.halves:
            put(fields.header[:, first : first + cols // GROUP].reshape(-1, spans, groups))
        else:
            put(fields.halves[:, first : first + cols // GROUP].reshape(-1, spans, groups * blocks.halves))
        return
    if span == blocks.columns:
        first, length = skipped // span, fields.header.shape[2] // 4 * 4
        chosen = np.ascontiguousarray(fields.header[:, first : first + spans])
        put(np.ascontiguousarray(chosen[:, :, :length]).view(np.uint32))
        if length < chosen.shape[2]:
            put(np.ascontiguousarray(chosen[:, :, length:]).view(np.uint16))
    else:
        first, length = skipped // blocks.scaled, cols // blocks.scaled
        integers = fields.scales[:, first : first + length].reshape(len(fields.scales), spans, -1, blocks.integers)
        padded = np.zeros((*integers.shape[:2], blocks.scale_bytes(span)), np.uint8)
        padded[:, :, : integers[0, 0].size] = integers.swapaxes(2, 3).reshape(*integers.shape[:2], -1)
        put(padded.view(np.uint32))
    put(fields.halves[:, (skipped + span * np.arange(spans)) // blocks.columns])


def _write_int4(fields: _Fields, cols: int, skipped: int, out: Array) -> None:
    """Writes tiles uint8 [tiles, bytes] of int4 with groups of 32."""
    count, groups, first = len(out), cols // GROUP, skipped // GROUP
    words = _lines(fields.codes_of(skipped, cols), _Q4_1)
    out = out.reshape(count, groups, -1)
    out[:, :, : -4 * TILE_ROWS].view(np.uint32).reshape(count, groups, -1, TILE_ROWS)[...] = words.transpose(0, 2, 3, 1)
    halves = fields.halves[:, first : first + groups].reshape(count, TILE_ROWS, groups, 2).transpose(0, 2, 3, 1)
    out[:, :, -4 * TILE_ROWS :].view(np.uint16).reshape(halves.shape)[...] = halves


def _lines(codes: Array, blocks: Blocks) -> Array:
    """codes uint8 [r, columns] → the words of each row, uint32 [tiles, 16, G, lines]."""
    fours = np.ascontiguousarray(codes).view(np.uint32).reshape(len(codes) // TILE_ROWS, TILE_ROWS, -1, 8)
    code = blocks.code
    if not code.high:
        return fours if code.low == 8 else _joined(fours, code.low)
    low, high = (np.uint32(0x01010101 * ((1 << bits) - 1)) for bits in (code.low, code.high))
    lines = _joined(fours & low, code.low), _joined(fours >> np.uint32(code.low) & high, code.high)
    return np.concatenate(lines, axis=3)


def _joined(fours: Array, bits: int) -> Array:
    """Words of 8-bit numbers, uint32 [..., 8], joined so that each has `bits` bits: uint32 [..., bits]."""
    parts = fours.reshape(*fours.shape[:-1], bits, 8 // bits)
    joined = parts[..., 0].copy()
    for i in range(1, 8 // bits):
        joined |= parts[..., i] << np.uint32(bits * i)
    return joined


def _fields(raw: Array, kind: str, lo: int, hi: int) -> _Fields:
    """raw uint8 [r, blocks, bytes] → what they hold, of the codes columns lo..hi of each block. A granule of `down` has
    a part of its blocks: to unpack no more takes a fraction of the time."""
    r, blocks = raw.shape[0], _blocks(kind)
    nothing = raw[:, :, :0]

    def halves(*offsets: int) -> Array:
        return np.stack([np.ascontiguousarray(raw[:, :, i : i + 2]).view(np.uint16)[..., 0] for i in offsets], axis=2)

    def done(codes: Array, scales: Array, header: Array, d: Array) -> _Fields:
        return _Fields(codes.reshape(r, -1), lo, scales.reshape(r, -1, blocks.integers), header, d)

    if blocks.columns == GROUP:
        begin = 2 * blocks.halves or 1
        d = halves(*range(0, begin, 2)) if blocks.halves else np.zeros((*raw.shape[:2], 0), np.uint16)
        header = nothing if blocks.halves else raw[:, :, :1]
        if kind == "q8_0":
            return done(raw[:, :, begin:] ^ 128, nothing, header, d)
        codes = _split(raw[:, :, begin + 4 * blocks.code.high :], 16, 4, lo, hi)
        if blocks.code.high:
            codes |= np.unpackbits(raw[:, :, begin : begin + 4], axis=2, bitorder="little") << 4
        return done(codes, nothing, header, d)
    if kind == "q2_k":
        scales = raw[:, :, :16]
        return done(_split(raw[:, :, 16:80], 32, 2, lo, hi), scales, scales, halves(80, 82))
    if kind == "q3_k":
        codes = _split(raw[:, :, 32:96], 32, 2, lo, hi)
        codes |= _split(raw[:, :, :32], 32, 1, lo, hi) << 2
        low, high = raw[:, :, 96:104], raw[:, :, 104:108]
        scales = np.concatenate([low & 15, low >> 4], axis=2) | _split(high, 4, 2, 0, 16) << 4
        return done(codes, scales, raw[:, :, 96:108], halves(108))
    if kind in ("q4_k", "q5_k"):
        codes = _split(raw[:, :, 16 + 32 * blocks.code.high :], 32, 4, lo, hi)
        if blocks.code.high:
            codes |= _split(raw[:, :, 16:48], 32, 1, lo, hi) << 4
        packed = raw[:, :, 4:16]
        first, second, last = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
        scale = np.concatenate([first & 63, (last & 15) | (first >> 2 & 48)], axis=2)
        minimum = np.concatenate([second & 63, (last >> 4) | (second >> 2 & 48)], axis=2)
        return done(codes, np.stack([scale, minimum], axis=3), packed, halves(0, 2))
    if kind == "q6_k":
        codes = _split(raw[:, :, :128], 64, 4, lo, hi)
        codes |= _split(raw[:, :, 128:192], 32, 2, lo, hi) << 4
        scales = raw[:, :, 192:208]
        return done(codes, scales, scales, halves(208))
    assert kind == "iq4_xs"
    low, high = _shifted_pairs(raw[:, :, 4:8]), halves(2)
    scales = low | (high >> (2 * np.arange(8)).astype(np.uint16) & 3).astype(np.uint8) << 4
    header = np.concatenate([raw[:, :, 4:8], raw[:, :, 2:4]], axis=2)
    return done(_split(raw[:, :, 8:], 16, 4, lo, hi), scales, header, halves(0))


def _split(packed: Array, run: int, bits: int, lo: int, hi: int) -> Array:
    """Bytes uint8 [r, blocks, n] → of each block numbers lo..hi, uint8 [r, blocks, hi - lo]. A block's numbers are the
    lowest bits of its first `run` bytes, then the next bits of these, and so on; then those of the next `run` bytes.
    Four bytes at a time: numpy's loops over bytes take longer."""
    words = np.ascontiguousarray(packed).view(np.uint32).reshape(*packed.shape[:2], -1, run // 4)
    mask, first, last = np.uint32(0x01010101 * ((1 << bits) - 1)), lo // run, -(-hi // run)
    numbers = np.empty((*words.shape[:2], last - first, run // 4), np.uint32)
    for shift in range(8 // bits):  # run after run with the same bits
        at = slice((shift - first) % (8 // bits), None, 8 // bits)
        begin = (first + at.start) * bits // 8
        part = words[:, :, begin : begin + numbers[0, 0, at].shape[0]]
        np.right_shift(part, np.uint32(bits * shift), out=numbers[:, :, at])
    numbers &= mask
    flat = numbers.view(np.uint8).reshape(*packed.shape[:2], -1)
    return flat[:, :, lo - first * run : hi - first * run]


def _shifted_pairs(packed: Array) -> Array:
    """Bytes uint8 [r, blocks, n] → [r, blocks, 2n]: of each byte the low nibble, then the high one."""
    return np.stack([packed & 15, packed >> 4], axis=3).reshape(*packed.shape[:2], -1)
