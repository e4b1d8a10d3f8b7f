"""Matrix products with packed weights in numpy: widens weights to float32, a slab of tiles at a time, and
multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from penstock.graph.scratch import slab_rows
from penstock.kernels.reference.blocks import widen_blocks
from penstock.spec.format import LINE_COLUMNS, TILE_ROWS, Format, tiles
from penstock.spec.parts import Block

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]


class Scratch:
    """Hands out temporaries from `memory`, uint8 [bytes], which one lane owns. Each call makes a new Scratch, which
    starts from the beginning."""

    def __init__(self, memory: Bytes) -> None:
        self._memory, self._used = memory, 0

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        """A temporary of this dtype, [*shape]. It holds what was there before."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        lo = -(-self._used // 64) * 64
        assert lo + nbytes <= self._memory.nbytes, f"scratch of {self._memory.nbytes} bytes is too small: {lo + nbytes}"
        self._used = lo + nbytes
        view: NDArray[Any] = self._memory[lo : self._used].view(dtype).reshape(shape)
        return view

    def mark(self) -> int:
        return self._used

    def rewind(self, mark: int) -> None:
        self._used = mark


# Elements of single rows that are widened at a time. `take_rows` has no scratch, and allocates some 9 bytes for each.
_ROW_ELEMENTS = 64 * 1024

Fields = tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]


def _fields(packed: Bytes, cols: int, fmt: Format) -> Fields:
    """Views of tiles uint8 [..., tile_bytes] whose last axis is the row: words [..., lines, 16]. For integer formats:
    words [..., G, lines, 16], and scales and minimums float16 [..., G, 16]."""
    if not fmt.is_quantised:
        word = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint32}[fmt.kind]
        return packed.view(word).reshape(*packed.shape[:-1], -1, TILE_ROWS), None, None
    grouped = packed.reshape(*packed.shape[:-1], fmt.groups(cols), fmt.group_bytes)
    words = grouped[..., : -4 * TILE_ROWS].view(np.uint32)
    halves = grouped[..., -4 * TILE_ROWS :].view(np.float16)
    return words.reshape(*words.shape[:-1], -1, TILE_ROWS), halves[..., :TILE_ROWS], halves[..., TILE_ROWS:]


def _padded(cols: int, fmt: Format) -> int:
    """Columns that a tile holds, padding included."""
    return fmt.groups(cols) * fmt.group if fmt.is_quantised else cols + (fmt.kind == "bfloat16") * (cols % 2)


def _expand(fields: Fields, fmt: Format, wide: Float32, codes: Bytes | None) -> None:
    """wide float32 [n, padded columns] = the numbers of fields whose row axis was moved to the front: words [...,
    lines] or [..., G, lines], scales and minimums [..., G]. `codes` uint8, of the same shape as `wide`, is room for the
    codes of integer formats."""
    words, scales, minimums = fields
    if scales is None or minimums is None or codes is None:
        if fmt.kind == "bfloat16":
            columns = wide.view(np.uint32).reshape(*words.shape, 2)
            np.left_shift(words, 16, out=columns[..., 0])
            np.bitwise_and(words, 0xFFFF0000, out=columns[..., 1])
        else:
            np.copyto(wide.reshape(words.shape), words)
        return
    if fmt.kind == "int8":
        np.copyto(codes.view(np.uint32).reshape(words.shape), words)
    else:
        # A word becomes 8 bytes: its low nibbles, then its high nibbles, which are shifted by 32 - 4 bits.
        pairs = codes.view(np.uint64).reshape(words.shape)
        shifted = wide.reshape(-1)[: codes.size // 4].view(np.uint64).reshape(words.shape)
        np.copyto(pairs, words)
        np.left_shift(pairs, 28, out=shifted)
        np.bitwise_or(pairs, shifted, out=pairs)
        np.bitwise_and(pairs, 0x0F0F0F0F0F0F0F0F, out=pairs)
    np.copyto(wide.reshape(-1), codes.reshape(-1))
    grouped = wide.reshape(*scales.shape, -1)
    grouped *= scales.astype(np.float32)[..., None]
    grouped += minimums.astype(np.float32)[..., None]


def widen(packed: Bytes, cols: int, fmt: Format, scratch: Scratch) -> Float32:
    """Tiles uint8 [n, tile_bytes] → float32 [16 n, cols], in scratch."""
    shape = (len(packed) * TILE_ROWS, _padded(cols, fmt))
    wide = scratch.take(shape)
    if fmt.in_blocks:
        wide[...] = widen_blocks(packed, cols, fmt.kind)
        return wide
    codes = scratch.take(shape, np.uint8) if fmt.is_quantised else None
    words, scales, minimums = _fields(packed, cols, fmt)
    by_row = (
        np.moveaxis(words, -1, 1),
        None if scales is None else np.moveaxis(scales, -1, 1),
        None if minimums is None else np.moveaxis(minimums, -1, 1),
    )
    _expand(by_row, fmt, wide, codes)
    return wide[:, :cols]


def take_rows(granules: Bytes, block: Block, rows: NDArray[Any], out: Float32) -> None:
    """out float32 [n, cols] = the rows `rows` (integers [n]) of the block, which is cut into granules uint8 [granules,
    granule_bytes]."""
    fmt, width = block.format, _padded(block.cols, block.format)
    packed = granules[:, block.offset : block.offset + block.nbytes]
    by_tile = packed.reshape(len(granules), tiles(block.rows), -1)
    if fmt.in_blocks:
        for i, row in enumerate(rows.tolist()):
            granule, inside = divmod(row, block.rows)
            tile = by_tile[granule, inside // TILE_ROWS, None]
            out[i] = widen_blocks(tile, block.cols, fmt.kind)[inside % TILE_ROWS]
        return
    fields = _fields(by_tile, block.cols, fmt)
    step = max(1, _ROW_ELEMENTS // width)
    for lo in range(0, len(rows), step):
        granule, row = np.divmod(rows[lo : lo + step], block.rows)
        tile, lane = np.divmod(row, TILE_ROWS)
        words, scales, minimums = (None if f is None else f[granule, tile, ..., lane] for f in fields)
        wide = np.empty((len(row), width), np.float32)
        codes = np.empty(wide.shape, np.uint8) if fmt.is_quantised else None
        assert words is not None
        _expand((words, scales, minimums), fmt, wide, codes)
        out[lo : lo + step] = wide[:, : block.cols]


def block_bytes(granule: Bytes, block: Block) -> Bytes:
    """The block's bytes inside one granule [granule_bytes]."""
    return granule[block.offset : block.offset + block.nbytes]


def vector(granule: Bytes, block: Block) -> Float32:
    """A float32 vector [cols] inside a granule: a bias, or a norm's weight. A view."""
    return block_bytes(granule, block).view(np.float32)


def table(granule: Bytes, block: Block) -> NDArray[Any]:
    """A matrix [rows, cols] that lies row by row in a granule uint8 [granule_bytes], as float32, float16, or uint16
    bits of bfloat16. A view."""
    return block_bytes(granule, block).view(storage_dtype(block.format)).reshape(block.rows, block.cols)


def widen_plain(stored: NDArray[Any], fmt: Format, scratch: Scratch) -> Float32:
    """Rows [R, C] in a float format's storage type as float32 [R, C]. float32 rows are returned as they are, others are
    widened into scratch."""
    if fmt.kind == "float32":
        return stored
    if fmt.kind == "float16":
        wide = scratch.take(stored.shape)
        np.copyto(wide, stored)
        return wide
    bits = scratch.take(stored.shape, np.uint32)
    np.copyto(bits, stored)
    np.left_shift(bits, 16, out=bits)
    return bits.view(np.float32)


def multiply(
    x: Float32, granule: Bytes, block: Block, out: Float32, scratch: Scratch, add: bool = False, apart: bool = False
) -> None:
    """out float32 [T, R] = x float32 [T, C] · block [R, C]ᵀ, or out += that with `add`. `apart`: one row after the
    other, so that none depends on how many are beside it. BLAS takes several rows by other steps than one."""
    packed = block_bytes(granule, block).reshape(tiles(block.rows), -1)
    rows, start = slab_rows(block), scratch.mark()
    for lo in range(0, block.rows, rows):
        hi = min(lo + rows, block.rows)
        scratch.rewind(start)
        slab = widen(packed[lo // TILE_ROWS : tiles(hi)], block.cols, block.format, scratch)
        product = scratch.take((x.shape[0], len(slab)))
        if apart:
            np.matmul(x[:, None], slab.T, out=product[:, None])
        else:
            np.matmul(x, slab.T, out=product)
        if add:
            out[:, lo:hi] += product[:, : hi - lo]
        else:
            out[:, lo:hi] = product[:, : hi - lo]
    scratch.rewind(start)


def _slab_of_neurons(granule: Bytes, block: Block, lo: int, hi: int, scratch: Scratch) -> Float32:
    """Rows lo..hi of a block that lies neuron by neuron, as float32 [hi - lo, padded columns], in scratch."""
    fmt, n, cols = block.format, hi - lo, block.cols
    padded, groups = -(-cols // LINE_COLUMNS) * LINE_COLUMNS, fmt.groups(cols)
    begin = block.offset + lo * block.stride
    rows = as_strided(granule[begin:], (n, fmt.row_bytes(cols)), (block.stride, 1))
    wide = scratch.take((n, padded))
    if not fmt.is_quantised:
        stored = rows[:, : fmt.codes_bytes(cols)].view(storage_dtype(fmt))
        if fmt.kind == "bfloat16":
            np.left_shift(stored, 16, out=wide.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(wide, stored)
        return wide
    numbers = rows[:, : fmt.codes_bytes(cols)]
    if fmt.kind == "int4":
        codes = scratch.take((n, padded), np.uint8).reshape(n, -1, 2, LINE_COLUMNS // 2)
        lines = numbers.reshape(n, -1, LINE_COLUMNS // 2)
        np.bitwise_and(lines, 15, out=codes[:, :, 0])
        np.right_shift(lines, 4, out=codes[:, :, 1])
        numbers = codes.reshape(n, padded)
    np.copyto(wide, numbers)
    halves = rows[:, fmt.codes_bytes(cols) :][:, : 4 * groups].view(np.float16).astype(np.float32)
    for g in range(groups):
        columns = wide[:, g * fmt.group : (g + 1) * fmt.group]
        columns *= halves[:, g, None]
        columns += halves[:, groups + g, None]
    return wide


def _slabs_of_neurons(granule: Bytes, block: Block, scratch: Scratch) -> Iterator[tuple[int, int, Float32]]:
    """(lo, hi, rows lo..hi as `_slab_of_neurons`) of a whole block. Each takes the scratch of the one before."""
    start, step = scratch.mark(), slab_rows(block)
    for lo in range(0, block.rows, step):
        hi = min(lo + step, block.rows)
        yield lo, hi, _slab_of_neurons(granule, block, lo, hi, scratch)
        scratch.rewind(start)


def multiply_neurons(x: Float32, granule: Bytes, block: Block, out: Float32, scratch: Scratch) -> None:
    """out float32 [T, R] = x float32 [T, C] · block [R, C]ᵀ, of a block that lies neuron by neuron."""
    for lo, hi, slab in _slabs_of_neurons(granule, block, scratch):
        np.matmul(x, slab[:, : block.cols].T, out=out[:, lo:hi])


def add_neurons(x: Float32, granule: Bytes, block: Block, out: Float32, scratch: Scratch) -> None:
    """out float32 [T, C] += x float32 [T, R] · block [R, C], of a block that lies neuron by neuron."""
    for lo, hi, slab in _slabs_of_neurons(granule, block, scratch):
        product = scratch.take(out.shape)
        np.matmul(x[:, lo:hi], slab[:, : block.cols], out=product)
        out += product


def narrow(values: Float32, fmt: Format) -> NDArray[Any]:
    """float32 values [...] in a float format's storage type. bfloat16 is rounded to nearest even, its bits are uint16.
    float16 saturates at ±65504 instead of becoming infinite."""
    if fmt.kind == "float32":
        return values
    if fmt.kind == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0  # rounding up could wrap NaN to 0
    return rounded


def storage_dtype(fmt: Format) -> np.dtype[Any]:
    """The numpy type that holds a float format. bfloat16 is held as its bits."""
    return np.dtype({"float32": "float32", "float16": "float16", "bfloat16": "uint16"}[fmt.kind])
