"""Encodes weights in the formats of `spec.format` and decodes them, in numpy.

Integer formats are quantised by FlexGen's groupwise rule (Sheng et al. 2023, §4.3: min and max of each group,
asymmetric), with one difference. The minimum is rounded down to float16 and the scale up, so that every value of a
group lies between the group's lowest and highest code and none is clipped. Then for every element

    |value - decode(encode(value))| <= scale / 2 + 2^-20 · max(|minimum|, |minimum + scale · levels|) + 2^-140

with levels = 2^bits - 1. The second term bounds the float32 rounding of both directions, eight operations. The third
term counts where float32 runs out of exponents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from penstock.errors import BadRequest, BrokenModel, UnsupportedModel
from penstock.spec.format import LINE_COLUMNS, TILE_ROWS, Format, tiles
from penstock.spec.parts import Block

Array = npt.NDArray[Any]

# Elements encoded at a time. 512 KiB of float32 and their temporaries stay in an L2 cache of 2 MiB: 1.5 GB/s of float32
# per core for int4 (0.9 with groups of 32). A granule of any size then needs no more memory.
_CHUNK = 128 * 1024

_MANTISSA_LIMIT = {"float16": 0x7C00, "bfloat16": 0x7F80}  # exponent all ones: infinite or NaN


def require_own(fmt: Format) -> None:
    """Raises BadRequest for a format that weights are not quantised to here."""
    if fmt.in_blocks:
        raise BadRequest(
            f"{fmt.name} is a format of quantised files: penstock holds its numbers, and quantises to int4 or int8"
        )


def encode(
    values: Array,
    fmt: Format,
    rows: int | None = None,
    cols: int | None = None,
    out: Array | None = None,
    tiled: bool = True,
) -> Array:
    """values [r, c] float32 (or float16, or uint16 holding bfloat16) → uint8 [fmt.matrix_bytes(rows, cols)] in tiles.
    Where not `tiled` (floats only) the result is uint8 [fmt.plain_bytes(rows, cols)], row by row.

    The matrix is padded with zero bits to `rows` × `cols` (default r × c). Codes beyond the values are 0 and do not
    widen a group's range. Values that are in `fmt` already are copied bit by bit. `out`: an array for the result.

    Raises BrokenModel for NaN or infinite values, UnsupportedModel for values that the format cannot hold (a float16
    scale, minimum or value beyond 65504).
    """
    r, c = values.shape
    rows, cols = r if rows is None else rows, c if cols is None else cols
    assert not fmt.in_blocks and (tiled or not fmt.is_quantised), f"{fmt.name} lies in tiles only"
    if out is None:
        out = np.empty(fmt.matrix_bytes(rows, cols) if tiled else fmt.plain_bytes(rows, cols), np.uint8)
    if not tiled and (r < rows or c < cols):
        out[:] = 0
    step = max(1, _CHUNK // max(c, 1) // TILE_ROWS) * TILE_ROWS
    for lo in range(0, r, step):
        chunk = values[lo : lo + step]
        n = len(chunk)
        if not tiled:
            out.view(_storage(fmt)).reshape(rows, cols)[lo : lo + n, :c] = _to_float(chunk, fmt)
            continue
        into = out[lo // TILE_ROWS * fmt.tile_bytes(cols) :][: tiles(n) * fmt.tile_bytes(cols)]
        if fmt.is_quantised:
            _encode_codes(widen(chunk), cols, fmt, into)
        else:
            _encode_floats(_to_float(chunk, fmt), cols, fmt, into)
    if tiled:
        out[tiles(r) * fmt.tile_bytes(cols) :] = 0
    return out


def row_view(granule: Array, block: Block) -> Array:
    """The rows of a block that lies neuron by neuron: uint8 [rows, row_bytes], a view of a granule uint8
    [granule_bytes]."""
    assert granule.ndim == 1 and granule.itemsize == 1 and granule.strides == (1,) and block.end <= len(granule)
    shape, strides = (block.rows, block.format.row_bytes(block.cols)), (block.stride, 1)
    return as_strided(granule[block.offset : block.end], shape, strides)


def encode_rows(values: Array, block: Block, granule: Array) -> None:
    """values [r, cols], of types as for `encode` → the first r rows of a block that lies neuron by neuron, in a granule
    uint8 [granule_bytes]. Its other rows become zero bits. Raises as `encode`."""
    fmt, into, (r, c) = block.format, row_view(granule, block), values.shape
    into[...] = 0
    if not fmt.is_quantised:
        stored = _to_float(values, fmt)
        into[:r, : c * stored.itemsize] = np.ascontiguousarray(stored).view(np.uint8).reshape(r, -1)
        return
    groups, padded = fmt.groups(c), -(-c // LINE_COLUMNS) * LINE_COLUMNS
    codes, scales, minimums = _quantise_rows(widen(values), fmt)
    codes = codes.reshape(r, -1)[:, :padded]
    if fmt.kind == "int4":
        lines = codes.reshape(r, -1, 2, LINE_COLUMNS // 2)
        codes = (lines[:, :, 0] | lines[:, :, 1] << 4).reshape(r, -1)
    begin = fmt.codes_bytes(c)
    into[:r, :begin] = codes
    for i, numbers in enumerate((scales, minimums)):
        into[:r, begin + 2 * groups * i :][:, : 2 * groups] = np.ascontiguousarray(numbers).view(np.uint8)


def decode_rows(granule: Array, block: Block) -> Array:
    """A block that lies neuron by neuron, in a granule uint8 [granule_bytes] → float32 [rows, cols]."""
    fmt, rows, c = block.format, row_view(granule, block), block.cols
    numbers = np.ascontiguousarray(rows[:, : fmt.codes_bytes(c)])
    if not fmt.is_quantised:
        return widen(numbers.view(_storage(fmt))[:, :c]).copy()
    if fmt.kind == "int4":
        lines = numbers.reshape(len(rows), -1, 1, LINE_COLUMNS // 2)
        numbers = np.concatenate([lines & 15, lines >> 4], axis=2).reshape(len(rows), -1)
    groups, begin = fmt.groups(c), fmt.codes_bytes(c)
    scales, minimums = (
        np.ascontiguousarray(rows[:, begin + 2 * groups * i :][:, : 2 * groups]).view(np.float16).astype(np.float32)
        for i in range(2)
    )
    group_of = np.arange(c) // fmt.group
    return numbers[:, :c].astype(np.float32) * scales[:, group_of] + minimums[:, group_of]


def decode_block(granule: Array, block: Block) -> Array:
    """A matrix of a granule uint8 [granule_bytes], in tiles or neuron by neuron → float32 [rows, cols]."""
    if block.stride:
        return decode_rows(granule, block)
    return decode(granule[block.offset : block.end], block.rows, block.cols, block.format)


def fields(buffer: Array, rows: int, cols: int, fmt: Format) -> tuple[Array, Array, Array]:
    """A matrix of an integer format as views: codes uint8 [tiles, G, lines, 16, 4], scales and minimums
    float16 [tiles, G, 16]."""
    grouped = buffer.reshape(tiles(rows), fmt.groups(cols), fmt.group_bytes)
    codes = grouped[:, :, : -4 * TILE_ROWS].reshape(*grouped.shape[:2], -1, TILE_ROWS, 4)
    halves = grouped[:, :, -4 * TILE_ROWS :].view(np.float16)
    return codes, halves[:, :, :TILE_ROWS], halves[:, :, TILE_ROWS:]


def words(buffer: Array, rows: int, cols: int, fmt: Format) -> Array:
    """A tiled matrix of a float format as a view: its words [tiles, lines, 16], uint16 or uint32."""
    word = np.uint16 if fmt.kind == "float16" else np.uint32
    return buffer.view(word).reshape(tiles(rows), -1, TILE_ROWS)


def decode(buffer: Array, rows: int, cols: int, fmt: Format, tiled: bool = True) -> Array:
    """The result of `encode`, uint8 → float32 [rows, cols]."""
    if not tiled:
        return widen(buffer.view(_storage(fmt)).reshape(rows, cols)).copy()
    if not fmt.is_quantised:
        by_row = np.ascontiguousarray(words(buffer, rows, cols, fmt).swapaxes(1, 2)).view(_storage(fmt))
        return widen(by_row.reshape(tiles(rows) * TILE_ROWS, -1)[:rows, :cols]).copy()
    packed, scales, minimums = fields(buffer, rows, cols, fmt)
    codes = np.stack([packed & 15, packed >> 4], axis=4) if fmt.kind == "int4" else packed[:, :, :, :, None]
    # [tiles, G, lines, 16, 2 (nibbles; int8: 1), 4] → [tiles, 16, G, columns of a group]
    values = codes.transpose(0, 3, 1, 2, 4, 5).reshape(*scales.swapaxes(1, 2).shape, -1).astype(np.float32)
    values *= scales.swapaxes(1, 2).astype(np.float32)[..., None]
    values += minimums.swapaxes(1, 2).astype(np.float32)[..., None]
    return np.ascontiguousarray(values.reshape(tiles(rows) * TILE_ROWS, -1)[:rows, :cols])


def widen(raw: Array) -> Array:
    """[…] of float32, float16 or uint16 (bfloat16's bits) → float32 of the same shape; exact."""
    if raw.dtype == np.uint16:
        bits = raw.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return raw.astype(np.float32, copy=False)


def _storage(fmt: Format) -> npt.DTypeLike:
    return {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[fmt.kind]


def _to_float(values: Array, fmt: Format) -> Array:
    """Values of any shape in the storage type of a float format. Raises as `encode`."""
    if values.dtype == _storage(fmt):
        if values.dtype == np.float32:
            _refuse_not_finite(values)
        elif values.size:
            bits = values.view(np.uint16) & 0x7FFF
            if int(bits.max()) >= _MANTISSA_LIMIT[fmt.kind]:
                raise BrokenModel("NaN or infinite values")
        return values
    wide = widen(values)
    _refuse_not_finite(wide)
    if fmt.kind == "float32":
        return wide
    if fmt.kind == "bfloat16":
        converted: Array = _round_to_bfloat16(wide)
        overflow = bool(((converted & 0x7F80) == 0x7F80).any())
    else:
        with np.errstate(over="ignore"):
            converted = wide.astype(np.float16)
        overflow = bool(np.isinf(converted).any())
    if overflow:
        raise UnsupportedModel(f"values up to {np.abs(wide).max():.6g}, which {fmt.kind} cannot hold")
    return converted


def _round_to_bfloat16(values: Array) -> Array:
    """float32 → bfloat16's bits as uint16, rounded to nearest, ties to even. Not for NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    up = (bits >> 16) & 1
    up += 0x7FFF
    up += bits
    up >>= 16
    return up.astype(np.uint16)


def _refuse_not_finite(values: Array) -> None:
    # min and max need no temporary of the size of the values, and NaN survives them.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise BrokenModel("NaN or infinite values")


def _encode_floats(values: Array, cols: int, fmt: Format, out: Array) -> None:
    """values [r, c] in the storage type → the tiles of those rows."""
    r, c = values.shape
    width = cols + cols % 2 if fmt.kind == "bfloat16" else cols
    if r % TILE_ROWS or c < width or not values.flags.c_contiguous:
        padded = np.zeros((tiles(r) * TILE_ROWS, width), values.dtype)
        padded[:r, :c] = values
        values = padded
    target = words(out, r, cols, fmt)
    target[...] = values.view(target.dtype).reshape(len(target), TILE_ROWS, -1).swapaxes(1, 2)


def _encode_codes(values: Array, cols: int, fmt: Format, out: Array) -> None:
    """values float32 [r, c] → the tiles of those rows."""
    codes, scales, minimums = _quantise_rows(values, fmt, tiles(len(values)) * TILE_ROWS, fmt.groups(cols))
    groups = scales.shape[1]
    into, scales_into, minimums_into = fields(out, len(values), cols, fmt)
    # Four codes at a time, as a uint32. A shift by a nibble moves no bit of a code below 16 into the next byte.
    by_row = codes.view(np.uint32).reshape(len(into), TILE_ROWS, groups, into.shape[2], -1)
    packed = by_row[..., 0] | by_row[..., 1] << 4 if fmt.kind == "int4" else by_row[..., 0]
    into.view(np.uint32)[..., 0] = packed.transpose(0, 2, 3, 1)
    for target, source in ((scales_into, scales), (minimums_into, minimums)):
        target[...] = source.reshape(len(into), TILE_ROWS, groups).swapaxes(1, 2)


def _quantise_rows(
    values: Array, fmt: Format, rows: int | None = None, groups: int | None = None
) -> tuple[Array, Array, Array]:
    """values float32 [r, c] → codes uint8 [rows, groups, group], scales and minimums float16 [rows, groups]. What is
    beyond the values is 0."""
    r, c = values.shape
    groups = fmt.groups(c) if groups is None else groups
    codes = np.zeros((r if rows is None else rows, groups, fmt.group), np.uint8)
    scales, minimums = np.zeros((2, len(codes), groups), np.float16)
    whole = c // fmt.group
    if whole:
        grouped = values[:, : whole * fmt.group].reshape(r, whole, fmt.group)
        _encode_groups(grouped, fmt, codes[:r, :whole], scales[:r, :whole], minimums[:r, :whole])
    if c % fmt.group:
        # The last columns are a group of their own with fewer columns. The codes beyond them stay 0.
        tail, last = values[:, None, whole * fmt.group :], slice(whole, whole + 1)
        _encode_groups(tail, fmt, codes[:r, last, : tail.shape[2]], scales[:r, last], minimums[:r, last])
    return codes, scales, minimums


def _encode_groups(grouped: Array, fmt: Format, codes: Array, scales: Array, minimums: Array) -> None:
    """grouped float32 [r, G, n] → codes uint8 [r, G, n], scales and minimums float16 [r, G], in place."""
    levels = 2**fmt.bits - 1
    # NaN and infinities survive `reduceat`. It is twice as fast as min(axis=2), whose inner loop restarts for every
    # group.
    flat, starts = grouped.reshape(-1), np.arange(0, grouped.size, grouped.shape[2])
    low = np.minimum.reduceat(flat, starts).reshape(scales.shape)
    high = np.maximum.reduceat(flat, starts).reshape(scales.shape)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise BrokenModel("NaN or infinite values")
    with np.errstate(over="ignore"):
        minimum = _round(low, down=True)
        offset = minimum.astype(np.float32)
        scale = _round((high - offset) / np.float32(levels), down=False)
    if not (np.isfinite(offset).all() and np.isfinite(scale).all()):
        peak = max(abs(float(low.min())), abs(float(high.max())))
        raise UnsupportedModel(f"values up to {peak:.6g}, beyond the float16 scales of {fmt.name}")
    wide = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    scaled = grouped - offset[:, :, None]
    scaled *= inverse[:, :, None]
    scaled += np.float32(0.5)  # the cast truncates; scaled <= levels + 0.5, for the scale was rounded up
    np.copyto(codes, scaled, casting="unsafe")
    scales[:], minimums[:] = scale, minimum


def _round(values: Array, down: bool) -> Array:
    """float32 → the nearest float16 that is not above the value (`down`), or not below it."""
    near = values.astype(np.float16)
    wrong = near.astype(np.float32) > values if down else near.astype(np.float32) < values
    toward = np.float16(-np.inf if down else np.inf)
    near[wrong] = np.nextafter(near[wrong], toward)
    return near
