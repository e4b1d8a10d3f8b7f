"""Triton kernels on FFNs that lie neuron by neuron (`spec/format.py`).

`live_kernel` lists each granule's neurons whose activation is not 0 for some row. The other kernels walk these lists,
so what does not fire is not read (PowerInfer, section 5.4: operators aware of neurons).

A line of 32 columns lies in WORDS words. A word holds PER_WORD columns of one group. All sums are float32 and in one
order, without atomics. A neuron that is not in a list would have added zeros, so lists change no bit.

Tensors: `words` are the weights as int32 (float16 weights as float16), `halves` the weights as float16, for scales and
minimums. Both are [granules, …]. Offsets, and the STRIDE from a neuron's row to the next one's, count words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.tile_kernels import float_numbers


@triton.jit
def _column(word, c: tl.constexpr, KIND: tl.constexpr):
    """The column of number c of a row's word `word`."""
    if KIND == "int4":
        return word // 4 * 32 + c // 4 * 16 + word % 4 * 4 + c % 4
    elif KIND == "int8":
        return word * 4 + c
    elif KIND == "bfloat16":
        return word * 2 + c
    else:
        return word


@triton.jit
def _number(word, c: tl.constexpr, KIND: tl.constexpr):
    """Number c of each word as float32. Of integer formats it is the code."""
    if KIND == "int4":
        return ((word >> (c % 4 * 8 + c // 4 * 4)) & 15).to(tl.float32)
    elif KIND == "int8":
        return ((word >> (c * 8)) & 255).to(tl.float32)
    else:
        return float_numbers(word, c, KIND)


@triton.jit
def _factors(halves, row_at, column, kept, ROW_HALVES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """(scale, minimum) float32 of the groups that `column` lies in, of a row that begins at word `row_at`."""
    spot = halves + row_at * 2 + ROW_HALVES + column // GROUP
    scale = tl.load(spot, mask=kept, other=0.0).to(tl.float32)
    return scale, tl.load(spot + GROUPS, mask=kept, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def live_kernel(hidden, lives, counts, n_rows, hidden_stride, ALL: tl.constexpr, R: tl.constexpr):
    """lives int32 [granules, R] = the granule's neurons that hidden float32 [T, granules · R] has a number other than 0
    of in some row, in order; counts int32 [granules] = how many. With ALL they are all. Grid: (granules,)."""
    granule = tl.program_id(0)
    neuron = tl.arange(0, R)
    live = tl.zeros((R,), tl.int32)
    if ALL:
        live += 1
    else:
        spot = hidden + granule * R + neuron
        for _ in range(0, n_rows):
            live = tl.where(tl.load(spot) != 0.0, 1, live)
            spot += hidden_stride
    place = tl.cumsum(live, 0) - 1
    tl.store(lives + granule * R + place, neuron, mask=live > 0)
    tl.store(counts + granule, tl.sum(live, 0))


@triton.jit(do_not_specialize=["n_rows"])
def multiply_live_kernel(
    words, halves, floats, x, hidden, lives, counts, n_rows, x_stride, hidden_stride, granule_words, granule_floats,
    OFFSET: tl.constexpr, STRIDE: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr,
    COLS: tl.constexpr, PER_WORD: tl.constexpr, ROW_WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden float32 [T, granules · R] *= x float32 [T, COLS] · the neurons' rows, transposed, plus a bias (BIAS: its
    offset in float32, -1 where there is none), for the neurons in `lives`. What is 0 stays 0. Grid: (granules · R,
    T / ROWS)."""
    QUANTISED: tl.constexpr = KIND == "int4" or KIND == "int8"
    granule = tl.program_id(0) // R
    nth = tl.program_id(0) % R
    row = tl.program_id(1) * ROWS
    if nth < tl.load(counts + granule):
        neuron = tl.load(lives + granule * R + nth)
        row_at = granule.to(tl.int64) * granule_words + OFFSET + neuron * STRIDE
        totals = ()
        for _ in tl.static_range(ROWS):
            totals = totals + (tl.zeros((BLOCK,), tl.float32),)
        for start in range(0, ROW_WORDS, BLOCK):
            at = start + tl.arange(0, BLOCK)
            kept = at < ROW_WORDS
            word = tl.load(words + row_at + at, mask=kept, other=0)
            if QUANTISED:
                scale, minimum = _factors(
                    halves, row_at, _column(at, 0, KIND), kept & (_column(at, 0, KIND) < COLS), 2 * ROW_WORDS, GROUP,
                    GROUPS,
                )  # fmt: skip
            news = ()
            for r in tl.static_range(ROWS):
                source = x + tl.minimum(row + r, n_rows - 1).to(tl.int64) * x_stride
                products = tl.zeros((BLOCK,), tl.float32)
                sums = tl.zeros((BLOCK,), tl.float32)
                for c in tl.static_range(PER_WORD):
                    column = _column(at, c, KIND)
                    value = tl.load(source + column, mask=kept & (column < COLS), other=0.0)
                    products += value * _number(word, c, KIND)
                    sums += value
                if QUANTISED:
                    products = products * scale + sums * minimum
                news = news + (totals[r] + products,)
            totals = news
        for r in tl.static_range(ROWS):
            if row + r < n_rows:
                up = tl.sum(totals[r], 0)
                if BIAS >= 0:
                    up += tl.load(floats + granule.to(tl.int64) * granule_floats + BIAS + neuron)
                spot = hidden + (row + r).to(tl.int64) * hidden_stride + granule * R + neuron
                fired = tl.load(spot)
                tl.store(spot, tl.where(fired == 0.0, 0.0, fired * up))


@triton.jit(do_not_specialize=["n_rows", "n_granules"])
def add_live_kernel(
    words, halves, hidden, lives, counts, y, n_rows, n_granules, hidden_stride, y_stride, split_stride, granule_words,
    OFFSET: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, ROW_WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y float32 [T, COLS] = (or += with ADD) the sum over granules of hidden float32 [T, granules · R] · the rows of
    the neurons in `lives`. With SPLITS > 1, y is [SPLITS, T, COLS] and gets the sums of so many parts. Grid: (words of
    a row / BLOCK, SPLITS, T / ROWS)."""
    QUANTISED: tl.constexpr = KIND == "int4" or KIND == "int8"
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS
    kept = at < ROW_WORDS
    step = (n_granules + SPLITS - 1) // SPLITS
    totals = ()
    for _ in tl.static_range(ROWS * PER_WORD):
        totals = totals + (tl.zeros((BLOCK,), tl.float32),)
    granule_at = (split * step).to(tl.int64) * granule_words + OFFSET
    for granule in range(split * step, tl.minimum(split * step + step, n_granules)):
        for nth in range(0, tl.load(counts + granule)):
            neuron = tl.load(lives + granule * R + nth)
            row_at = granule_at + neuron * STRIDE
            word = tl.load(words + row_at + at, mask=kept, other=0)
            if QUANTISED:
                first = _column(at, 0, KIND)
                scale, minimum = _factors(halves, row_at, first, kept & (first < COLS), 2 * ROW_WORDS, GROUP, GROUPS)
            news = ()
            for r in tl.static_range(ROWS):
                source = tl.minimum(row + r, n_rows - 1).to(tl.int64) * hidden_stride + granule * R + neuron
                value = tl.load(hidden + source)
                for c in tl.static_range(PER_WORD):
                    number = _number(word, c, KIND)
                    if QUANTISED:
                        number = number * scale + minimum
                    news = news + (totals[r * PER_WORD + c] + value * number,)
            totals = news
        granule_at += granule_words
    for r in tl.static_range(ROWS):
        if row + r < n_rows:
            for c in tl.static_range(PER_WORD):
                column = _column(at, c, KIND)
                inside = kept & (column < COLS)
                spot = y + split.to(tl.int64) * split_stride + (row + r).to(tl.int64) * y_stride + column
                total = totals[r * PER_WORD + c]
                if ADD:
                    total += tl.load(spot, mask=inside, other=0.0)
                tl.store(spot, total, mask=inside)


@triton.jit
def widen_rows_kernel(
    words, halves, out, granule_words, granule_stride, row_stride,
    OFFSET: tl.constexpr, STRIDE: tl.constexpr, KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out float32 [granules, rows, COLS] = the rows of each granule's neurons. Grid: (granules, rows, words of a row /
    BLOCK)."""
    QUANTISED: tl.constexpr = KIND == "int4" or KIND == "int8"
    granule = tl.program_id(0).to(tl.int64)
    row_at = granule * granule_words + OFFSET + tl.program_id(1) * STRIDE
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    kept = at < ROW_WORDS
    word = tl.load(words + row_at + at, mask=kept, other=0)
    if QUANTISED:
        first = _column(at, 0, KIND)
        scale, minimum = _factors(halves, row_at, first, kept & (first < COLS), 2 * ROW_WORDS, GROUP, GROUPS)
    target = out + granule * granule_stride + tl.program_id(1).to(tl.int64) * row_stride
    for c in tl.static_range(PER_WORD):
        column = _column(at, c, KIND)
        number = _number(word, c, KIND)
        if QUANTISED:
            number = number * scale + minimum
        tl.store(target + column, number, mask=kept & (column < COLS))
