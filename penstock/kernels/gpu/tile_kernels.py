"""Triton kernels that multiply packed weights with few rows.

A program computes one tile. A warp reads one chunk at a time: LINES lines (8, in int4 a group of 64 columns) of a
tile's 16 words, 512 bytes that lie together. The chunks of a program's warps are neighbours.

Codes become floats without conversion instructions, which are half as fast on many cards. A byte is shifted into the
upper mantissa, under the exponent of 2^4 (high nibbles) or 2^8 (others). That is exactly 16 + code or 256 + code.
A card of 4.8 TB/s has time for three operations a weight, the product included: at 4.5 bits a weight it loads 8.5e12
weights a second, and does some 30e12 operations.

A group's scale multiplies the sum of its products, after the part that comes from the added 16 or 256 is taken away. A
group's minimum multiplies the sum of its activations. All sums are float32. There are no atomics, so results are the
same every time.

`exponent4` and `exponent8` (EXPONENT4 and EXPONENT8) are arguments because an instruction holds one constant. With the
mask they would be two constants, and cost one operation more for each weight.

Tensors: `words` are the weights as int32 (float16 weights as float16), `halves` the weights as float16, for scales and
minimums. Both are [granules, …]. `granule_words` is the number of words from one granule to the next. Offsets count
words.
"""

from __future__ import annotations

import triton
import triton.language as tl

EXPONENT4, EXPONENT8 = 0x41800000, 0x43800000  # the bits of 2^4 and of 2^8 in float32


@triton.jit
def float_numbers(word, c: tl.constexpr, KIND: tl.constexpr):
    """Column c of each word of a float format as float32."""
    if KIND == "bfloat16":
        if c == 0:
            return (word << 16).to(tl.float32, bitcast=True)
        else:
            return (word & -65536).to(tl.float32, bitcast=True)
    elif KIND == "float32":
        return word.to(tl.float32, bitcast=True)
    else:
        return word.to(tl.float32)


@triton.jit
def _numbers(word, c: tl.constexpr, exponent4, exponent8, KIND: tl.constexpr):
    """Column c of each word as float32. For integer formats it is the code plus 256 (int8) or 16 (high nibbles), which
    `_tile_dot` takes away from the sum. For low nibbles the 256 is subtracted here, exactly: subtracted from the sum it
    would cost 1e-5 of the sum."""
    if KIND == "int4" or KIND == "int8":
        # Byte c % 4 of the word goes to the upper 8 bits of the mantissa, 15..22.
        SHIFT: tl.constexpr = 15 - (c % 4) * 8
        if SHIFT > 0:
            byte = word << SHIFT
        else:
            byte = word >> -SHIFT
        if KIND == "int4" and c >= 4:
            bits = (byte & (15 << 19)) | exponent4
        elif KIND == "int4":
            bits = (byte & (15 << 15)) | exponent8
            return bits.to(tl.float32, bitcast=True) - 256.0
        else:
            bits = (byte & (255 << 15)) | exponent8
        return bits.to(tl.float32, bitcast=True)
    else:
        return float_numbers(word, c, KIND)


@triton.jit
def _factors(halves, place, real, GROUP_WORDS: tl.constexpr):
    """Scales and minimums float32 [CHUNKS, 1, 16] of the groups that begin at the words `place` [CHUNKS]."""
    spot = halves + (place + (GROUP_WORDS - 16))[:, None] * 2 + tl.arange(0, 16)[None, :]
    scale = tl.load(spot, mask=real[:, None], other=0.0).to(tl.float32)
    minimum = tl.load(spot + 16, mask=real[:, None], other=0.0).to(tl.float32)
    return scale[:, None, :], minimum[:, None, :]


@triton.jit
def _tile_dot(
    words, halves, x, tile_at, pair_at, granule_words, row, n_rows, x_stride, first, last, exponent4, exponent8,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, SUM: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """Products of a tile with ROWS rows of x: a tuple of ROWS tensors float32 [16].

    The tile begins at word `tile_at`. The rows are those from `row` on; rows beyond n_rows are the last one again. The
    products go over the chunks first..last of the tile's columns. With PAIR the tuple has as many tensors again, for
    the tile at `pair_at`. With SUM the products go over the same tile of all granules, one after the other, and x is
    [T, granules · COLS].

    Sums are a tuple of [CHUNKS, LINES, 16], and not one tensor with one more axis. So all tensors in the loop keep the
    layout in which words are loaded, and nothing passes through shared memory."""
    QUANTISED: tl.constexpr = KIND == "int4" or KIND == "int8"
    lines = tl.arange(0, LINES)
    lane = tl.arange(0, 16)
    totals = ()
    for _ in tl.static_range(2 * ROWS if PAIR else ROWS):
        totals = totals + (tl.zeros((CHUNKS, LINES, 16), tl.float32),)
    for start in tl.range(first, last, CHUNKS, loop_unroll_factor=UNROLL):
        chunk = start + tl.arange(0, CHUNKS)
        real = chunk < last  # [CHUNKS]
        if SUM:
            granule = chunk // GRANULE_CHUNKS
            chunk = chunk - granule * GRANULE_CHUNKS
            place = granule.to(tl.int64) * granule_words
            origin = granule * COLS
        else:
            place = tl.zeros((CHUNKS,), tl.int64)
            origin = tl.zeros((CHUNKS,), tl.int32)
        group = chunk // GROUP_CHUNKS
        place = place + group * GROUP_WORDS  # [CHUNKS]
        line = (chunk - group * GROUP_CHUNKS)[:, None] * LINES + lines[None, :]  # [CHUNKS, LINES]
        column = group[:, None] * GROUP + line * PER_WORD
        loaded = real[:, None]
        if TAILS:
            loaded = loaded & (line < GROUP_LINES)
        inside = line[:, :, None] * 16 + lane[None, None, :]
        word = tl.load(words + (tile_at + place)[:, None, None] + inside, mask=loaded[:, :, None], other=0)
        if PAIR:
            word2 = tl.load(words + (pair_at + place)[:, None, None] + inside, mask=loaded[:, :, None], other=0)
        if QUANTISED:
            scale, minimum = _factors(halves, tile_at + place, real, GROUP_WORDS)
            if PAIR:
                scale2, minimum2 = _factors(halves, pair_at + place, real, GROUP_WORDS)
        numbers = ()
        for c in tl.static_range(PER_WORD):
            numbers = numbers + (_numbers(word, c, exponent4, exponent8, KIND),)
            if PAIR:
                numbers = numbers + (_numbers(word2, c, exponent4, exponent8, KIND),)
        news = ()
        for r in tl.static_range(ROWS):
            t = tl.minimum(row + r, n_rows - 1).to(tl.int64)
            source = x + t * x_stride + origin[:, None] + column  # [CHUNKS, LINES]
            products = tl.zeros((CHUNKS, LINES, 16), tl.float32)
            products2 = products
            sums = tl.zeros((CHUNKS, LINES), tl.float32)
            added = sums
            for c in tl.static_range(PER_WORD):
                seen = loaded
                if TAILS:
                    seen = seen & (column + c < COLS)
                value = tl.load(source + c, mask=seen, other=0.0)
                if QUANTISED:
                    sums += value
                    if KIND == "int8":
                        added += value * 256.0
                    elif c >= 4:
                        added += value * 16.0
                products += value[:, :, None] * numbers[2 * c if PAIR else c]
                if PAIR:
                    products2 += value[:, :, None] * numbers[2 * c + 1]
            if QUANTISED:
                products = (products - added[:, :, None]) * scale + sums[:, :, None] * minimum
                if PAIR:
                    products2 = (products2 - added[:, :, None]) * scale2 + sums[:, :, None] * minimum2
            news = news + (totals[r] + products,)
            if PAIR:
                news = news + (totals[ROWS + r] + products2,)
        if PAIR:  # `news` has the two tiles' sums by turns; totals have those of one tile after those of the other
            totals = ()
            for r in tl.static_range(ROWS):
                totals = totals + (news[2 * r],)
            for r in tl.static_range(ROWS):
                totals = totals + (news[2 * r + 1],)
        else:
            totals = news
    sums_of_rows = ()
    for r in tl.static_range(2 * ROWS if PAIR else ROWS):
        sums_of_rows = sums_of_rows + (tl.sum(tl.sum(totals[r], 1), 0),)
    return sums_of_rows


@triton.jit(do_not_specialize=["n_rows", "limit"])
def spread_kernel(
    words, halves, x, y0, y1, y2, n_rows, limit, x_stride, y0_stride, y1_stride, y2_stride, granule_words,
    exponent4, exponent8,
    OFFSET0: tl.constexpr, OFFSET1: tl.constexpr, OFFSET2: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, TILE_WORDS: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y_i float32 [T, granules · R_i] = x float32 [T, COLS] · block i of each granule, transposed. R_i = 0: there is no
    such block. Only the first `limit` columns of y0 are written. Grid: (granules · tiles of all blocks, T / ROWS)."""
    TILES0: tl.constexpr = (R0 + 15) // 16
    TILES1: tl.constexpr = (R1 + 15) // 16
    TILES2: tl.constexpr = (R2 + 15) // 16
    ALL: tl.constexpr = TILES0 + TILES1 + TILES2
    granule = tl.program_id(0) // ALL
    tile = tl.program_id(0) % ALL  # Triton 3.6 fails on a difference where ALL is 1
    row = tl.program_id(1) * ROWS
    tile_at = granule.to(tl.int64) * granule_words
    if tile < TILES0:
        tile_at += OFFSET0 + tile * TILE_WORDS
    elif tile < TILES0 + TILES1:
        tile_at += OFFSET1 + (tile - TILES0) * TILE_WORDS
    else:
        tile_at += OFFSET2 + (tile - TILES0 - TILES1) * TILE_WORDS
    sums = _tile_dot(
        words, halves, x, tile_at, tile_at, granule_words, row, n_rows, x_stride, 0, GRANULE_CHUNKS, exponent4,
        exponent8, KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS, LINES, TAILS,
        CHUNKS, ROWS, UNROLL, False, False,
    )  # fmt: skip
    lane = tl.arange(0, 16)
    for r in tl.static_range(ROWS):
        t = (row + r).to(tl.int64)
        if row + r < n_rows:
            if tile < TILES0:
                inside = tile * 16 + lane
                column = granule * R0 + inside
                tl.store(y0 + t * y0_stride + column, sums[r], mask=(inside < R0) & (column < limit))
            elif tile < TILES0 + TILES1:
                inside = (tile - TILES0) * 16 + lane
                tl.store(y1 + t * y1_stride + granule * R1 + inside, sums[r], mask=inside < R1)
            else:
                inside = (tile - TILES0 - TILES1) * 16 + lane
                tl.store(y2 + t * y2_stride + granule * R2 + inside, sums[r], mask=inside < R2)


@triton.jit
def tanh(x):
    """tanh by one exponential. Its error is at most 1e-7, at infinities too. (Triton's own is not on every backend.)"""
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
    elif ACTIVATION == "swiglu_clamped":
        x = tl.where(x > 7.0, 7.0, x)  # NaN stays NaN
        return x / (1.0 + tl.exp(-1.702 * x))
    elif ACTIVATION == "relu2":
        kept = tl.maximum(x, 0.0)
        return kept * kept
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) · up."""
    if ACTIVATION == "swiglu_clamped":
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return _activate(gate, ACTIVATION) * up


@triton.jit(do_not_specialize=["n_rows"])
def hidden_kernel(
    words, halves, floats, x, y, n_rows, x_stride, y_stride, granule_words, granule_floats, exponent4,
    exponent8,
    GATE: tl.constexpr, UP: tl.constexpr, GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    R: tl.constexpr, TILE_WORDS: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y float32 [T, granules · R] = act(x · gateᵀ) · (x · upᵀ), or act(x · upᵀ). GATE, UP: word offsets of the blocks.
    GATE_BIAS, UP_BIAS: offsets in float32. A block or bias that does not exist has offset -1. R is a multiple of 16.
    Grid: (granules · tiles, T / ROWS)."""
    TILES: tl.constexpr = R // 16
    granule = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    row = tl.program_id(1) * ROWS
    base = granule.to(tl.int64) * granule_words + tile * TILE_WORDS
    bias = floats + granule.to(tl.int64) * granule_floats + tile * 16 + tl.arange(0, 16)
    sums = _tile_dot(
        words, halves, x, base + UP, base + GATE, granule_words, row, n_rows, x_stride, 0, GRANULE_CHUNKS, exponent4,
        exponent8, KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS, LINES, TAILS,
        CHUNKS, ROWS, UNROLL, False, GATE >= 0,
    )  # fmt: skip
    column = granule * R + tile * 16 + tl.arange(0, 16)
    for r in tl.static_range(ROWS):
        up = sums[r]
        if UP_BIAS >= 0:
            up += tl.load(bias + UP_BIAS)
        if GATE >= 0:
            gate = sums[ROWS + r]
            if GATE_BIAS >= 0:
                gate += tl.load(bias + GATE_BIAS)
            up = _gated(gate, up, ACTIVATION)
        else:
            up = _activate(up, ACTIVATION)
        if row + r < n_rows:
            tl.store(y + (row + r).to(tl.int64) * y_stride + column, up)


@triton.jit(do_not_specialize=["n_rows", "n_chunks"])
def add_up_kernel(
    words, halves, x, y, n_rows, n_chunks, x_stride, y_stride, split_stride, granule_words, exponent4,
    exponent8,
    OFFSET: tl.constexpr, R: tl.constexpr, TILE_WORDS: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y float32 [T, R] = (or += with ADD) the sum over granules of x float32 [T, granule · COLS …] · blockᵀ. With
    SPLITS > 1, y is [SPLITS, T, R] and gets the sums of so many parts. Grid: (tiles, SPLITS, T / ROWS)."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS
    split_chunks = (n_chunks + SPLITS - 1) // SPLITS
    first = split * split_chunks
    last = tl.minimum(first + split_chunks, n_chunks)
    tile_at = OFFSET + tile.to(tl.int64) * TILE_WORDS
    sums = _tile_dot(
        words, halves, x, tile_at, tile_at, granule_words, row, n_rows, x_stride, first, last, exponent4, exponent8,
        KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS, LINES, TAILS, CHUNKS,
        ROWS, UNROLL, True, False,
    )  # fmt: skip
    column = tile * 16 + tl.arange(0, 16)
    for r in tl.static_range(ROWS):
        if row + r < n_rows:
            spot = y + split.to(tl.int64) * split_stride + (row + r).to(tl.int64) * y_stride + column
            total = sums[r]
            if ADD:
                total += tl.load(spot, mask=column < R, other=0.0)
            tl.store(spot, total, mask=column < R)


@triton.jit(do_not_specialize=["count"])
def sum_parts_kernel(
    parts, y, count, R, y_stride, split_stride, SPLITS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """y float32 [T, R] = (or += with ADD) the sum of parts float32 [SPLITS, T, R], in order. `count`: T · R. Grid:
    (count / BLOCK,)."""
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
