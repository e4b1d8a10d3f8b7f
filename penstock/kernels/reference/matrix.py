"""Weights to float32 and matrix products, a slab of rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.graph.scratch import slab_rows
from penstock.spec.format import Format
from penstock.spec.parts import Block

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]


class Scratch:
    """Hands out temporaries from a byte range that one lane owns; a new one per call starts over."""

    def __init__(self, memory: Bytes) -> None:
        self._memory, self._used = memory, 0

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        lo = -(-self._used // 64) * 64
        assert lo + nbytes <= self._memory.nbytes, f"scratch of {self._memory.nbytes} bytes is too small: {lo + nbytes}"
        self._used = lo + nbytes
        found: NDArray[Any] = self._memory[lo : self._used].view(dtype).reshape(shape)
        return found

    def mark(self) -> int:
        return self._used

    def rewind(self, mark: int) -> None:
        self._used = mark


def runs(matrix: Bytes, rows: int, cols: int, fmt: Format) -> tuple[Bytes, NDArray[Any], NDArray[Any]]:
    """A matrix at rest as its runs: codes uint8 [rows, code bytes], scales and minimums float16 [rows, G].
    For float formats the last two are empty."""
    width, groups = fmt.code_row_bytes(cols), fmt.groups(cols)
    split, half = rows * width, rows * 2 * groups
    codes = matrix[:split].reshape(rows, width)
    scales = matrix[split : split + half].view(np.float16).reshape(rows, groups)
    minimums = matrix[split + half : split + 2 * half].view(np.float16).reshape(rows, groups)
    return codes, scales, minimums


def widen(
    codes: Bytes, scales: NDArray[Any], minimums: NDArray[Any], cols: int, fmt: Format, scratch: Scratch
) -> Float32:
    """float32 [rows, cols]; for float32 weights a view of them, otherwise scratch."""
    rows = codes.shape[0]
    if fmt.kind == "float32":
        return codes.view(np.float32)
    if fmt.kind == "float16":
        wide = scratch.take((rows, cols))
        np.copyto(wide, codes.view(np.float16))
        return wide
    if fmt.kind == "bfloat16":
        bits = scratch.take((rows, cols), np.uint32)
        np.copyto(bits, codes.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
        return bits.view(np.float32)
    groups, group = fmt.groups(cols), fmt.group
    wide = scratch.take((rows, groups, group))
    if fmt.kind == "int8":
        np.copyto(wide, codes.reshape(rows, groups, group))
    else:
        packed = codes.reshape(rows, groups, group // 2)
        nibbles = scratch.take(packed.shape, np.uint8)
        np.bitwise_and(packed, 15, out=nibbles)
        np.copyto(wide[:, :, : group // 2], nibbles)
        np.right_shift(packed, 4, out=nibbles)
        np.copyto(wide[:, :, group // 2 :], nibbles)
    wide *= scales.astype(np.float32)[:, :, None]
    wide += minimums.astype(np.float32)[:, :, None]
    return wide.reshape(rows, groups * group)[:, :cols]


def block_bytes(granule: Bytes, block: Block) -> Bytes:
    """The block's bytes inside one granule [granule_bytes]."""
    return granule[block.offset : block.offset + block.nbytes]


def vector(granule: Bytes, block: Block) -> Float32:
    """A float32 vector inside a granule: a bias, a norm's weight."""
    return block_bytes(granule, block).view(np.float32)


def multiply(x: Float32, granule: Bytes, block: Block, out: Float32, scratch: Scratch, add: bool = False) -> None:
    """out [T, R] = x [T, C] · block [R, C]ᵀ, or out += with `add`."""
    codes, scales, minimums = runs(block_bytes(granule, block), block.rows, block.cols, block.format)
    step, start = slab_rows(block), scratch.mark()
    for lo in range(0, block.rows, step):
        hi = min(lo + step, block.rows)
        scratch.rewind(start)
        slab = widen(codes[lo:hi], scales[lo:hi], minimums[lo:hi], block.cols, block.format, scratch)
        product = scratch.take((x.shape[0], hi - lo))
        np.matmul(x, slab.T, out=product)
        if add:
            out[:, lo:hi] += product
        else:
            out[:, lo:hi] = product
    scratch.rewind(start)


def narrow(values: Float32, fmt: Format) -> NDArray[Any]:
    """float32 to a float format's storage: bfloat16 as uint16 bits rounded to nearest even; float16
    saturates at ±65504 instead of becoming infinite."""
    if fmt.kind == "float32":
        return values
    if fmt.kind == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def storage_dtype(fmt: Format) -> np.dtype[Any]:
    """How numpy holds a float format; bfloat16 as its bits."""
    return np.dtype({"float32": "float32", "float16": "float16", "bfloat16": "uint16"}[fmt.kind])
