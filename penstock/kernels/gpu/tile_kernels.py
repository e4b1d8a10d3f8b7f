"""Triton kernels on packed weights: products of few rows, widening, single rows. Has run in the interpreter only.

A warp reads a chunk at a time: LINES lines (8: in int4 a group of 64 columns) of a tile's 16 words, 512 bytes that lie
together; a program is one tile, its warps' chunks are neighbours. Codes become floats by two operations, without a
conversion (half as fast on many cards): a code's bits, where they stand in the word, under the exponent of 2^23, minus
2^23, give code · 2^s exactly; the activation takes the 2^-s. A group's scale multiplies the sum of its products, its
minimum the sum of its activations. All sums are float32; no atomics, so results come out the same every time.

Tensors: `words` are the weights as int32 (float16 weights: as float16), `halves` as float16 (scales and minimums), both
[granules, …] with `granule_words` of the former from one granule to the next; offsets count words.
"""

from __future__ import annotations

import triton
import triton.language as tl

EXPONENT = tl.constexpr(0x4B000000)  # of 2^23, whose last mantissa bit is 1
EXPONENT_VALUE = tl.constexpr(8388608.0)


@triton.jit
def _numbers(word, c: tl.constexpr, KIND: tl.constexpr):
    """Column c of each word as float32; of integer formats its code times `_factor`."""
    if KIND == "int4" or KIND == "int8":
        WIDTH: tl.constexpr = 15 if KIND == "int4" else 255
        SHIFT: tl.constexpr = (c % 4) * 8 + (c // 4) * 4
        if SHIFT >= 16:
            bits = ((word >> 16) & (WIDTH << (SHIFT - 16))) | EXPONENT
        else:
            bits = (word & (WIDTH << SHIFT)) | EXPONENT
        return bits.to(tl.float32, bitcast=True) - EXPONENT_VALUE
    elif KIND == "bfloat16":
        if c == 0:
            return (word << 16).to(tl.float32, bitcast=True)
        else:
            return (word & -65536).to(tl.float32, bitcast=True)
    elif KIND == "float32":
        return word.to(tl.float32, bitcast=True)
    else:
        return word.to(tl.float32)


@triton.jit
def _tile_dot(
    words, halves, x, at, granule_words, t, x_stride, first, last,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """[ROWS, 16]: rows t [ROWS] of x times a tile at `at`, over the chunks first..last of its columns; with SUM over
    the same tile of one granule after the other, x [T, granules · COLS]."""
    QUANTISED: tl.constexpr = KIND == "int4" or KIND == "int8"
    lines = tl.arange(0, LINES)
    lane = tl.arange(0, 16)
    total = tl.zeros((ROWS, CHUNKS, LINES, 16), tl.float32)
    for start in tl.range(first, last, CHUNKS, loop_unroll_factor=UNROLL):
        chunk = start + tl.arange(0, CHUNKS)
        real = chunk < last  # [CHUNKS]
        if SUM:
            granule = chunk // GRANULE_CHUNKS
            chunk = chunk - granule * GRANULE_CHUNKS
            place = at + granule.to(tl.int64) * granule_words
            origin = granule * COLS
        else:
            place = at + tl.zeros((CHUNKS,), tl.int64)
            origin = tl.zeros((CHUNKS,), tl.int32)
        group = chunk // GROUP_CHUNKS
        place = place + group * GROUP_WORDS  # [CHUNKS]
        line = (chunk - group * GROUP_CHUNKS)[:, None] * LINES + lines[None, :]  # [CHUNKS, LINES]
        column = group[:, None] * GROUP + line * PER_WORD
        there = real[:, None]
        if TAILS:
            there = there & (line < GROUP_LINES)
        spots = words + place[:, None, None] + line[:, :, None] * 16 + lane[None, None, :]
        word = tl.load(spots, mask=there[:, :, None], other=0)  # [CHUNKS, LINES, 16]
        source = x + t[:, None, None].to(tl.int64) * x_stride + (origin[:, None] + column)[None, :, :]
        products = tl.zeros((ROWS, CHUNKS, LINES, 16), tl.float32)
        sums = tl.zeros((ROWS, CHUNKS, LINES), tl.float32)
        for c in tl.static_range(PER_WORD):
            seen = there
            if TAILS:
                seen = seen & (column + c < COLS)
            value = tl.load(source + c, mask=seen[None, :, :], other=0.0)  # [ROWS, CHUNKS, LINES]
            number = _numbers(word, c, KIND)
            if QUANTISED:
                sums += value
                value = value * (1.0 / (1 << (((c % 4) * 8 + (c // 4) * 4) % 16)))
            products += value[:, :, :, None] * number[None, :, :, :]
        if QUANTISED:
            factors = halves + (place + (GROUP_WORDS - 16))[:, None] * 2 + lane[None, :]
            scale = tl.load(factors, mask=real[:, None], other=0.0).to(tl.float32)  # [CHUNKS, 16]
            minimum = tl.load(factors + 16, mask=real[:, None], other=0.0).to(tl.float32)
            total += products * scale[None, :, None, :] + sums[:, :, :, None] * minimum[None, :, None, :]
        else:
            total += products
    return tl.sum(tl.sum(total, 2), 1)


@triton.jit
def spread_kernel(
    words, halves, x, y0, y1, y2, n_rows, limit, x_stride, y0_stride, y1_stride, y2_stride, granule_words,
    OFFSET0: tl.constexpr, OFFSET1: tl.constexpr, OFFSET2: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, TILE_WORDS: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y_i [T, granules · R_i] = x [T, COLS] · block i of each granule, transposed; R_i = 0: there is no such block.
    Of y0 the first `limit` columns are written. Grid: (granules · tiles of all blocks, ROWS rows at a time)."""
    TILES0: tl.constexpr = (R0 + 15) // 16
    TILES1: tl.constexpr = (R1 + 15) // 16
    TILES2: tl.constexpr = (R2 + 15) // 16
    ALL: tl.constexpr = TILES0 + TILES1 + TILES2
    granule = tl.program_id(0) // ALL
    tile = tl.program_id(0) - granule * ALL
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    t = tl.minimum(row, n_rows - 1)
    at = granule.to(tl.int64) * granule_words
    if tile < TILES0:
        at += OFFSET0 + tile * TILE_WORDS
    elif tile < TILES0 + TILES1:
        at += OFFSET1 + (tile - TILES0) * TILE_WORDS
    else:
        at += OFFSET2 + (tile - TILES0 - TILES1) * TILE_WORDS
    found = _tile_dot(
        words, halves, x, at, granule_words, t, x_stride, 0, GRANULE_CHUNKS,
        KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS, LINES, TAILS, CHUNKS,
        ROWS, False, UNROLL,
    )  # fmt: skip
    lane = tl.arange(0, 16)
    t64 = t.to(tl.int64)
    ours = (row < n_rows)[:, None]
    if tile < TILES0:
        inside = tile * 16 + lane
        column = granule * R0 + inside
        kept = ours & ((inside < R0) & (column < limit))[None, :]
        tl.store(y0 + t64[:, None] * y0_stride + column[None, :], found, mask=kept)
    elif tile < TILES0 + TILES1:
        inside = (tile - TILES0) * 16 + lane
        column = granule * R1 + inside
        tl.store(y1 + t64[:, None] * y1_stride + column[None, :], found, mask=ours & (inside < R1)[None, :])
    else:
        inside = (tile - TILES0 - TILES1) * 16 + lane
        column = granule * R2 + inside
        tl.store(y2 + t64[:, None] * y2_stride + column[None, :], found, mask=ours & (inside < R2)[None, :])


@triton.jit
def tanh(x):
    """By one exponential: right to 1e-7 of 1, at infinities too. (Triton's own is not on every backend.)"""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return x * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)))
    elif ACTIVATION == "gelu_tanh":
        return x * (0.5 * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))))
    elif ACTIVATION == "gelu_quick":
        return x / (1.0 + tl.exp(-1.702 * x))
    elif ACTIVATION == "relu2":
        kept = tl.maximum(x, 0.0)
        return kept * kept
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def hidden_kernel(
    words, halves, floats, x, y, n_rows, x_stride, y_stride, granule_words, granule_floats,
    GATE: tl.constexpr, UP: tl.constexpr, GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    R: tl.constexpr, TILE_WORDS: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y [T, granules · R] = act(x · gateᵀ) · (x · upᵀ), or act(x · upᵀ); what is not there has offset -1. Biases count
    float32. R is a multiple of 16. Grid: (granules · tiles, ROWS rows at a time)."""
    TILES: tl.constexpr = R // 16
    granule = tl.program_id(0) // TILES
    tile = tl.program_id(0) - granule * TILES
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    t = tl.minimum(row, n_rows - 1)
    base = granule.to(tl.int64) * granule_words + tile * TILE_WORDS
    bias = floats + granule.to(tl.int64) * granule_floats + tile * 16 + tl.arange(0, 16)
    up = _tile_dot(
        words, halves, x, base + UP, granule_words, t, x_stride, 0, GRANULE_CHUNKS,
        KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS, LINES, TAILS, CHUNKS,
        ROWS, False, UNROLL,
    )  # fmt: skip
    if UP_BIAS >= 0:
        up += tl.load(bias + UP_BIAS)[None, :]
    if GATE >= 0:
        gate = _tile_dot(
            words, halves, x, base + GATE, granule_words, t, x_stride, 0, GRANULE_CHUNKS,
            KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS, LINES, TAILS, CHUNKS,
            ROWS, False, UNROLL,
        )  # fmt: skip
        if GATE_BIAS >= 0:
            gate += tl.load(bias + GATE_BIAS)[None, :]
        found = _activate(gate, ACTIVATION) * up
    else:
        found = _activate(up, ACTIVATION)
    column = granule * R + tile * 16 + tl.arange(0, 16)
    tl.store(y + t.to(tl.int64)[:, None] * y_stride + column[None, :], found, mask=(row < n_rows)[:, None])


@triton.jit
def add_up_kernel(
    words, halves, x, y, n_rows, n_chunks, x_stride, y_stride, split_stride, granule_words,
    OFFSET: tl.constexpr, R: tl.constexpr, TILE_WORDS: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y [T, R] = or += sum over granules of x [T, granule · COLS …] · blockᵀ. With SPLITS > 1, y [SPLITS, T, R] gets
    the sums of so many parts. Grid: (tiles, SPLITS, ROWS rows at a time)."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    t = tl.minimum(row, n_rows - 1)
    each = (n_chunks + SPLITS - 1) // SPLITS
    first = split * each
    last = tl.minimum(first + each, n_chunks)
    at = OFFSET + tile.to(tl.int64) * TILE_WORDS
    found = _tile_dot(
        words, halves, x, at, granule_words, t, x_stride, first, last,
        KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS, LINES, TAILS, CHUNKS,
        ROWS, True, UNROLL,
    )  # fmt: skip
    column = tile * 16 + tl.arange(0, 16)
    spot = y + split * split_stride + t.to(tl.int64)[:, None] * y_stride + column[None, :]
    kept = (row < n_rows)[:, None] & (column < R)[None, :]
    if ADD:
        found += tl.load(spot, mask=kept, other=0.0)
    tl.store(spot, found, mask=kept)


@triton.jit
def sum_parts_kernel(
    parts, y, count, R, y_stride, split_stride, SPLITS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """y [T, R] = or += the sum of parts [SPLITS, T, R], in order. `count`: T · R."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = i < count
    row = i // R
    spot = y + row * y_stride + (i - row * R)
    total = tl.load(parts + i, mask=kept, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * split_stride + i, mask=kept, other=0.0)
    if ADD:
        total += tl.load(spot, mask=kept, other=0.0)
    tl.store(spot, total, mask=kept)


@triton.jit
def _elements(
    words, halves, tile_at, lane, column, kept, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr
):
    """Single numbers of tiles as float32: row `lane` of the tile at `tile_at`, in `column`; all three broadcast."""
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


@triton.jit
def widen_kernel(
    words, halves, out, granule_words, at, n_rows, granule_stride, row_stride,
    COLS: tl.constexpr, TILE_WORDS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [granule_stride · granule + row_stride · row + column] float32 = `n_rows` rows from the tile at `at` of each
    granule on. Grid: (granules, tiles, BLOCK columns at a time)."""
    granule = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lane = tl.arange(0, 16)[:, None]
    column = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = tile * 16 + lane
    kept = (row < n_rows) & (column < COLS)
    tile_at = granule * granule_words + at + tile * TILE_WORDS
    found = _elements(words, halves, tile_at, lane, column, kept, KIND, GROUP, GROUP_WORDS)
    tl.store(out + granule * granule_stride + row.to(tl.int64) * row_stride + column, found, mask=kept)


@triton.jit
def gather_kernel(
    words, halves, tokens, out, granule_words, out_stride,
    AT: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr, TILE_WORDS: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, COLS] = the rows `tokens` int32 [T] of a block of R rows a granule. Grid: (T, BLOCK columns)."""
    token = tl.load(tokens + tl.program_id(0))
    granule = token // R
    inside = token - granule * R
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < COLS
    tile_at = granule.to(tl.int64) * granule_words + AT + (inside // 16) * TILE_WORDS
    found = _elements(words, halves, tile_at, inside % 16, column, kept, KIND, GROUP, GROUP_WORDS)
    tl.store(out + tl.program_id(0).to(tl.int64) * out_stride + column, found, mask=kept)
