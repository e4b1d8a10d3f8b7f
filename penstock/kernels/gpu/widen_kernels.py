"""Triton kernels that write packed weights as float32: rows of granules, for products of many rows, and single rows.

Tensors, as in `tile_kernels`: `words` are the weights as int32 (float16 weights as float16), `halves` the weights as
float16, for scales and minimums. Both are [granules, …]. `granule_words` is the number of words from one granule to the
next. Offsets count words.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def elements(
    words, halves, tile_at, lane, column, kept, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr
):
    """Single numbers of tiles as float32: row `lane` of the tile at `tile_at`, in `column`. All three broadcast."""
    if KIND == "int4" or KIND == "int8":
        group = column // GROUP
        inside = column - group * GROUP
        place = tile_at + group * GROUP_WORDS
        if KIND == "int4":
            line = inside // 8
            shift = (inside & 3) * 8 + ((inside >> 2) & 1) * 4
            word = tl.load(words + place + line * 16 + lane, mask=kept, other=0)
            code = (word >> shift) & 15
        else:
            line = inside // 4
            word = tl.load(words + place + line * 16 + lane, mask=kept, other=0)
            code = (word >> ((inside & 3) * 8)) & 255
        factor = halves + (place + (GROUP_WORDS - 16)) * 2 + lane
        scale = tl.load(factor, mask=kept, other=0.0).to(tl.float32)
        minimum = tl.load(factor + 16, mask=kept, other=0.0).to(tl.float32)
        return code.to(tl.float32) * scale + minimum
    elif KIND == "bfloat16":
        word = tl.load(words + tile_at + (column // 2) * 16 + lane, mask=kept, other=0)
        return tl.where((column & 1) == 1, word & -65536, word << 16).to(tl.float32, bitcast=True)
    elif KIND == "float32":
        return tl.load(words + tile_at + column * 16 + lane, mask=kept, other=0).to(tl.float32, bitcast=True)
    else:
        return tl.load(words + tile_at + column * 16 + lane, mask=kept, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first_word", "n_rows"])
def widen_kernel(
    words, halves, out, granule_words, first_word, n_rows, granule_stride, row_stride,
    COLS: tl.constexpr, TILE_WORDS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [granule_stride · granule + row_stride · row + column] float32 = `n_rows` rows of each granule, from the tile
    at word `first_word` of the granule on. Grid: (granules, tiles, COLS / BLOCK)."""
    granule = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lane = tl.arange(0, 16)[:, None]
    column = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = tile * 16 + lane
    kept = (row < n_rows) & (column < COLS)
    tile_at = granule * granule_words + first_word + tile * TILE_WORDS
    numbers = elements(words, halves, tile_at, lane, column, kept, KIND, GROUP, GROUP_WORDS)
    tl.store(out + granule * granule_stride + row.to(tl.int64) * row_stride + column, numbers, mask=kept)


@triton.jit
def gather_kernel(
    words, halves, tokens, out, granule_words, out_stride,
    AT: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr, TILE_WORDS: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out float32 [T, COLS] = the rows `tokens` int32 [T] of a block that has R rows in each granule. Grid: (T, COLS /
    BLOCK)."""
    token = tl.load(tokens + tl.program_id(0))
    granule = token // R
    inside = token - granule * R
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < COLS
    tile_at = granule.to(tl.int64) * granule_words + AT + (inside // 16) * TILE_WORDS
    numbers = elements(words, halves, tile_at, inside % 16, column, kept, KIND, GROUP, GROUP_WORDS)
    tl.store(out + tl.program_id(0).to(tl.int64) * out_stride + column, numbers, mask=kept)
