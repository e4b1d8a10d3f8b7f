"""Puts matrices that a GGUF file holds quantised into tiles, number for number (`spec.blocks`).

This is the whole interface: `format_of` says which format a GGUF tensor's type becomes, `row_bytes` how long its rows
are in the file, and `encode_blocks` writes the tiles of a part's block:

    fmt = format_of("Q4_K")                                      # q4_k; None for a type that is not known
    raw = np.frombuffer(file, np.uint8).reshape(rows, row_bytes("Q4_K", columns))
    encode_blocks(raw[lo:hi], "Q4_K", block.rows, block.cols, out=granule[block.offset : block.end])
    encode_blocks(raw, "Q6_K", block.rows, block.cols, first_column=64 * nth, out=…)            # `down`, `o`

Rows of a file that are permuted (q and k of llama) are permuted in `raw`: a row's bytes stay together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import BrokenModel
from penstock.spec.blocks import BLOCKS, GROUP, Blocks, Code
from penstock.spec.format import TILE_ROWS, Format, parse_format, tiles
from penstock.store.header import KINDS
from penstock.units import round_up

Array = npt.NDArray[Any]

_LARGEST_EXPONENT = 252  # of MXFP4, whose largest number is 6 · 2^(252 - 127)
_LINE_BYTES = 64
_TILE_COLUMNS = 64  # the most columns of a tile's block of the formats with blocks of 32 (`Blocks.span`)
# q4_1 is int4 with groups of 32: its file's blocks have d and m, as q5_1's have.
_Q4_1 = Blocks(GROUP, 20, Code(4), GROUP, 2)


def format_of(gguf_type: str) -> Format | None:
    """The format that holds a tensor of a GGUF type, as `gguf.GGMLQuantizationType` names it, exactly. None for a type
    that there is no format for."""
    name = gguf_type.upper()
    if name in KINDS:
        return Format(KINDS[name])
    return parse_format(name) if name == "Q4_1" or name.lower() in BLOCKS else None


def row_bytes(gguf_type: str, columns: int) -> int:
    """Bytes of a row of so many columns in the file. Raises BrokenModel where a block of it is not whole. Of formats of
    folders, as `store.quantised` has the row: its last block is filled up."""
    blocks = _blocks(gguf_type)
    if blocks.word:
        return -(-columns // blocks.columns) * blocks.nbytes
    if columns % blocks.columns:
        raise BrokenModel(f"rows of {columns} numbers in {gguf_type}, whose blocks have {blocks.columns}")
    return columns // blocks.columns * blocks.nbytes


def encode_blocks(
    raw: Array, gguf_type: str, rows: int, cols: int, first_column: int = 0, out: Array | None = None
) -> Array:
    """raw uint8 [r, bytes of a row] of a quantised GGUF type → uint8 [fmt.matrix_bytes(rows, cols)], the tiles of
    columns first_column … first_column + cols of these rows, in `format_of(gguf_type)`.

    `out`: an array for the result. Where it is uint8 [slices, bytes], slice i becomes the columns first_column +
    i · cols …: a block of the file that several slices share is then read once.

    Rows beyond r and columns beyond the file's are zero bits. `cols` is a multiple of 32, and `first_column` one of the
    columns of a tile's block (`Blocks.span`).

    Raises BrokenModel for scales that are NaN or infinite, or make numbers so.
    """
    blocks, fmt = _blocks(gguf_type), format_of(gguf_type)
    assert fmt is not None and len(raw) <= rows and raw.shape[1] % blocks.nbytes == 0
    nbytes = fmt.matrix_bytes(rows, cols)
    out = np.empty(nbytes, np.uint8) if out is None else out
    into = out if out.ndim == 2 else out[None]
    raw = raw if raw.strides[1] == 1 else np.ascontiguousarray(raw)
    assert into.shape[1] == nbytes and into.strides[1] == 1
    finite = _native.repack(
        fmt.kind, raw.ctypes.data, raw.strides[0], len(raw), raw.shape[1] // blocks.nbytes, first_column, cols,
        len(into), into.ctypes.data, into.strides[0],
    )  # fmt: skip
    if fmt.kind == "mxfp4" and bool((raw[:, :: blocks.nbytes] > _LARGEST_EXPONENT).any()):
        raise BrokenModel("scales that make numbers beyond float32")
    if not finite:
        raise BrokenModel("NaN or infinite scales")
    into[:, tiles(len(raw)) * fmt.tile_bytes(cols) :] = 0
    return out


def widened(raw: Array, gguf_type: str, cols: int, first_column: int = 0) -> npt.NDArray[np.float32]:
    """As `encode_blocks`, but the numbers themselves, float32 [r, cols], of any columns. Raises BrokenModel as it
    does."""
    whole, fmt = max(_blocks(gguf_type).columns, _TILE_COLUMNS), format_of(gguf_type)
    assert fmt is not None
    before = first_column % whole
    first_column, wanted, cols = first_column - before, cols, round_up(before + cols, whole)
    rows, nbytes = len(raw), fmt.matrix_bytes(len(raw), cols)
    memory = np.empty(nbytes + _LINE_BYTES, np.uint8)
    tiled = memory[-memory.ctypes.data % _LINE_BYTES :][:nbytes]
    encode_blocks(raw, gguf_type, rows, cols, first_column, tiled)
    wide, numbers = np.empty((rows, cols), np.float32), np.arange(rows, dtype=np.int32)
    _native.Compute("portable", 1).gather(
        weights=tiled.ctypes.data, count=1, stride=nbytes, matrix=_native.Matrix(rows, cols, fmt.kind, fmt.group, 0),
        tokens=numbers.ctypes.data, t=rows, rows=wide.ctypes.data,
    )  # fmt: skip
    return wide[:, before : before + wanted]


def is_finite(packed: Array, cols: int, fmt: Format) -> bool:
    """Whether the floats in the headers of a matrix in tiles, uint8 [bytes], of a format of `spec.blocks`, are finite,
    and codes of float8 numbers."""
    blocks = BLOCKS[fmt.kind]
    span = blocks.span(cols)
    each_block = packed.reshape(-1, blocks.block_bytes(span))
    lo, hi = TILE_ROWS * blocks.scale_bytes(span), TILE_ROWS * blocks.header_bytes(span)
    if blocks.word:
        infinite = np.uint32(0x7F800000)
        words, codes = np.ascontiguousarray(each_block[:, :hi]).view(np.uint32), each_block[:, hi:]
        nan = fmt.kind == "float8" and bool(((codes & 127) == 127).any())
        return not nan and not bool((words & infinite == infinite).any())
    halves = np.ascontiguousarray(each_block[:, lo:hi]).view(np.uint16)
    return not bool((halves & 0x7C00 == 0x7C00).any())


def _blocks(gguf_type: str) -> Blocks:
    return _Q4_1 if gguf_type.lower() == "q4_1" else BLOCKS[gguf_type.lower()]
