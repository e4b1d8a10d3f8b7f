"""Weights in and out of the formats of `spec.format`, in numpy.

Quantising is FlexGen's groupwise rule (Sheng et al. 2023, §4.3: min and max of each group, asymmetric),
with one difference: the minimum is rounded down and the scale up to float16, so that every value of a
group lies between the group's lowest and highest code and none is clipped. Then for every element

    |value - decode(encode(value))| <= scale / 2 + 2^-20 · max(|minimum|, |minimum + scale · levels|) + 2^-140

with levels = 2^bits - 1. The second term bounds the float32 rounding of both directions, eight operations; the
third is where float32 runs out of exponents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.spec.format import Format

Array = npt.NDArray[Any]

# Elements worked on at a time: 512 KiB of float32 and their temporaries stay in a 2 MiB L2 cache, at 1.5 GB/s of
# float32 per core for int4 (0.9 with groups of 32), and a granule of any size needs no more memory.
_CHUNK = 128 * 1024

_MANTISSA_LIMIT = {"float16": 0x7C00, "bfloat16": 0x7F80}  # exponent all ones: infinite or NaN


def encode(
    values: Array, fmt: Format, rows: int | None = None, cols: int | None = None, out: Array | None = None
) -> Array:
    """values [r, c] float32 (or float16, or uint16 holding bfloat16) → uint8 [fmt.matrix_bytes(rows, cols)].

    The matrix is padded with zero bits to `rows` × `cols` (default r × c): codes beyond the values are 0
    and do not widen a group's range. Bits are copied where the values are in `fmt` already. `out` takes
    the result where given. Raises BrokenModel for NaN or infinite values, UnsupportedModel for values that
    the format cannot hold (a float16 scale, minimum or value beyond 65504).
    """
    r, c = values.shape
    rows, cols = r if rows is None else rows, c if cols is None else cols
    nbytes = fmt.matrix_bytes(rows, cols)
    if out is None:
        out = np.empty(nbytes, np.uint8)
    if r < rows or c < cols or fmt.is_quantised:
        out[:] = 0
    step = max(1, _CHUNK // max(c, 1))
    if not fmt.is_quantised:
        matrix = out.view(_storage(fmt)).reshape(rows, cols)
        for lo in range(0, r, step):
            matrix[lo : min(lo + step, r), :c] = _to_float(values[lo : lo + step], fmt)
        return out
    codes, scales, minimums = runs(out, rows, cols, fmt)
    for lo in range(0, r, step):
        hi = min(lo + step, r)
        _encode_groups(widen(values[lo:hi]), fmt, codes[lo:hi], scales[lo:hi], minimums[lo:hi])
    return out


def runs(buffer: Array, rows: int, cols: int, fmt: Format) -> tuple[Array, Array, Array]:
    """The three runs of a quantised matrix as views: codes uint8 [rows, bytes], scales and minimums
    float16 [rows, groups]."""
    groups, width = fmt.groups(cols), fmt.code_row_bytes(cols)
    codes, rest = buffer[: rows * width], buffer[rows * width :].view(np.float16)
    halves = rest.reshape(2, rows, groups)
    return codes.reshape(rows, width), halves[0], halves[1]


def decode(buffer: Array, rows: int, cols: int, fmt: Format) -> Array:
    """uint8 [fmt.matrix_bytes(rows, cols)] → float32 [rows, cols]."""
    if not fmt.is_quantised:
        return widen(buffer.view(_storage(fmt)).reshape(rows, cols)).copy()
    codes, scales, minimums = runs(buffer, rows, cols, fmt)
    grouped = codes.reshape(rows, fmt.groups(cols), -1)
    if fmt.kind == "int4":
        grouped = np.concatenate([grouped & 15, grouped >> 4], axis=2)
    found = grouped.astype(np.float32) * scales.astype(np.float32)[:, :, None]
    found += minimums.astype(np.float32)[:, :, None]
    return np.ascontiguousarray(found.reshape(rows, -1)[:, :cols])


def widen(raw: Array) -> Array:
    """float32, float16 or uint16 (bfloat16's bits) → float32 of the same shape; exact."""
    if raw.dtype == np.uint16:
        bits = raw.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return raw.astype(np.float32, copy=False)


def _storage(fmt: Format) -> npt.DTypeLike:
    return {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[fmt.kind]


def _to_float(values: Array, fmt: Format) -> Array:
    """Values in the storage type of a float format, checked."""
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
        found: Array = _round_to_bfloat16(wide)
        overflow = bool(((found & 0x7F80) == 0x7F80).any())
    else:
        with np.errstate(over="ignore"):
            found = wide.astype(np.float16)
        overflow = bool(np.isinf(found).any())
    if overflow:
        raise UnsupportedModel(f"values up to {np.abs(wide).max():.6g}, which {fmt.kind} cannot hold")
    return found


def _round_to_bfloat16(values: Array) -> Array:
    """Round to nearest, ties to even, on the bits. No NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    up = (bits >> 16) & 1
    up += 0x7FFF
    up += bits
    up >>= 16
    return up.astype(np.uint16)


def _refuse_not_finite(values: Array) -> None:
    # One pass without a temporary the size of the values: NaN survives min and max.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise BrokenModel("NaN or infinite values")


def _encode_groups(values: Array, fmt: Format, codes: Array, scales: Array, minimums: Array) -> None:
    """values float32 [r, c] → codes [r, G * bytes], scales, minimums float16 [r, G], in place."""
    r, c = values.shape
    whole = c // fmt.group * fmt.group
    per_group = fmt.group * fmt.bits // 8
    if whole:
        grouped = values[:, :whole].reshape(r, -1, fmt.group)  # [r, G, group]
        split = whole // fmt.group
        into = codes[:, : split * per_group].reshape(r, split, per_group)
        _encode_group_run(grouped, fmt, into, scales[:, :split], minimums[:, :split])
    if whole < c:
        # The tail is a group of its own of fewer columns; the codes beyond it stay 0.
        tail = values[:, None, whole:]
        _encode_group_run(tail, fmt, codes[:, None, -per_group:], scales[:, -1:], minimums[:, -1:])


def _encode_group_run(grouped: Array, fmt: Format, codes: Array, scales: Array, minimums: Array) -> None:
    """grouped float32 [r, G, n] → codes uint8 [r, G, bytes], scales and minimums float16 [r, G]."""
    levels = 2**fmt.bits - 1
    # NaN and infinities survive. Twice as fast as min(axis=2), whose inner loop restarts for every group.
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
    scaled += np.float32(0.5)  # the cast truncates; scaled <= levels + 0.5 since the scale is rounded up
    found = scaled.astype(np.uint8)
    if fmt.bits == 4:
        half, n = fmt.group // 2, found.shape[2]
        codes[:, :, : min(n, half)] = found[:, :, :half]
        if n > half:
            codes[:, :, : n - half] |= found[:, :, half:] << 4
    else:
        codes[:, :, : found.shape[2]] = found
    scales[:], minimums[:] = scale, minimum


def _round(values: Array, down: bool) -> Array:
    """float32 → the next float16 that is not above (down) or not below the value."""
    near = values.astype(np.float16)
    wrong = near.astype(np.float32) > values if down else near.astype(np.float32) < values
    toward = np.float16(-np.inf if down else np.inf)
    near[wrong] = np.nextafter(near[wrong], toward)
    return near
