"""Triton kernels of FFNs with experts: the router's choice, experts by pairs, and their sum.

A pair is one row and one of its experts: pair a + A · t is the a-th expert of row t. There are two ways to compute
pairs. For few rows a program takes a pair and a tile, straight from the packed weights (`_tile_dot`). For many rows the
pairs are sorted by expert and cut into blocks of at most ROWS pairs of one expert, and a program widens a granule's
rows as it goes and multiplies them with a block.

Weights lie in up to eight slots of one arena, each of which holds experts first..last. Slot i begins `place` pages
behind the pointers. A program whose expert is in none of them does nothing: another launch has it. There are no
atomics, and each pair's output is kept apart, so results are the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.tile_kernels import _activate, _gated, _tile_dot
from penstock.kernels.gpu.widen_kernels import elements

SLOTS = 8


@triton.jit
def route_kernel(
    scores, gates, bias, ids, factors, shared, scores_stride, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, ACTIVE: tl.constexpr, SIGMOID: tl.constexpr,
    BIAS: tl.constexpr, SCORED: tl.constexpr, NORMALISED: tl.constexpr, GATE: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """The ACTIVE experts of each row in rising order, int32 [T, ACTIVE], and the factors of their outputs, by the
    router's products `scores` float32 [T, GROUPS · SIZE]. `shared` float32 [T]: 1, or with GATE the sigmoid of `gates`
    [T]. `bias` [GROUPS · SIZE] is added to scores for the choice with BIAS, to the products with SCORED. G and S are
    powers of 2, at least GROUPS and SIZE. Of equal scores the lowest id is chosen. A row with a score that is not
    finite has factors NaN. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    number, inside = tl.arange(0, G), tl.arange(0, S)[None, :]
    group = number[:, None]
    expert = group * SIZE + inside  # [G, S]
    real = (group < GROUPS) & (inside < SIZE)
    score = tl.load(scores + row * scores_stride + expert, mask=real, other=0.0)
    if SCORED:
        score += tl.load(bias + expert, mask=real, other=0.0)
    bad = tl.where(tl.abs(score) < float("inf"), 0, 1)
    damaged = tl.sum(tl.sum(bad, 1), 0) > 0
    score = tl.where(damaged, 0.0, score)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    else:
        most = tl.max(tl.max(tl.where(real, score, float("-inf")), 1), 0)
        score = tl.where(real, tl.exp(score - most), 0.0)
        score = score / tl.sum(tl.sum(score, 1), 0)
    ranked = score
    if BIAS:
        ranked += tl.load(bias + expert, mask=real, other=0.0)
    ranked = tl.where(real, ranked, float("-inf"))
    if GROUPS > 1:  # those with the largest sums of their two best
        best = tl.max(ranked, 1)  # [G]
        first = tl.min(tl.where(ranked == best[:, None], inside, S), 1)
        total = best + tl.max(tl.where(inside == first[:, None], float("-inf"), ranked), 1)
        open = number < 0
        for _ in tl.static_range(KEPT):
            which = tl.min(tl.where(total == tl.max(total, 0), number, G), 0)
            open = open | (number == which)
            total = tl.where(number == which, float("-inf"), total)
        ranked = tl.where(open[:, None], ranked, float("-inf"))
    chosen = expert < 0
    for _ in tl.static_range(ACTIVE):
        most = tl.max(tl.max(ranked, 1), 0)
        which = tl.min(tl.min(tl.where(ranked == most, expert, G * S), 1), 0)
        taken = (expert == which) & real
        chosen = chosen | taken
        ranked = tl.where(taken, float("-inf"), ranked)
    one = tl.where(chosen, 1, 0)
    of_group = tl.sum(one, 1)  # [G]
    rank = tl.cumsum(one, 1) - one + (tl.cumsum(of_group, 0) - of_group)[:, None]
    factor = score
    if NORMALISED:
        factor = factor / (tl.sum(tl.sum(tl.where(chosen, score, 0.0), 1), 0) + 1e-20)
    factor = tl.where(damaged, float("nan"), factor * scale)
    tl.store(ids + row * ACTIVE + rank, expert, mask=chosen)
    tl.store(factors + row * ACTIVE + rank, factor, mask=chosen)
    share = 1.0
    if GATE:
        share = 1.0 / (1.0 + tl.exp(-tl.load(gates + row)))
    tl.store(shared + row, share)


@triton.jit
def _in_slot(expert, page, nth, found, place, first, last):
    """Looks for an expert in one more slot. (page of the slot, number of the expert in it, whether it was found)."""
    here = (expert >= first) & (expert < last)
    return tl.where(here, place, page), tl.where(here, expert - first, nth), found | here


@triton.jit
def _find(
    expert, p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
    granule_words, PAGE_WORDS: tl.constexpr, GRANULES: tl.constexpr,
):  # fmt: skip
    """(the word at which an expert of GRANULES granules begins, whether some slot has it)."""
    page, nth, found = _in_slot(expert, 0, 0, False, p0, f0, l0)
    page, nth, found = _in_slot(expert, page, nth, found, p1, f1, l1)
    page, nth, found = _in_slot(expert, page, nth, found, p2, f2, l2)
    page, nth, found = _in_slot(expert, page, nth, found, p3, f3, l3)
    page, nth, found = _in_slot(expert, page, nth, found, p4, f4, l4)
    page, nth, found = _in_slot(expert, page, nth, found, p5, f5, l5)
    page, nth, found = _in_slot(expert, page, nth, found, p6, f6, l6)
    page, nth, found = _in_slot(expert, page, nth, found, p7, f7, l7)
    return page.to(tl.int64) * PAGE_WORDS + nth.to(tl.int64) * GRANULES * granule_words, found


_SCALARS = [f"{letter}{i}" for letter in "pfl" for i in range(SLOTS)]


@triton.jit(do_not_specialize=_SCALARS)
def pair_hidden_kernel(
    words, halves, floats, x, ids, y,
    p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
    x_stride, y_stride, granule_words, exponent4, exponent8,
    PAGE_WORDS: tl.constexpr, GRANULES: tl.constexpr, ACTIVE: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,
    GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, R: tl.constexpr, TILE_WORDS: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y float32 [pairs, GRANULES · R] = act(x · gateᵀ) · (x · upᵀ), or act(x · upᵀ), of each pair's expert and row of x
    float32 [T, COLS]. Offsets as of `hidden_kernel`, ROWS is 1. Grid: (pairs, GRANULES · tiles)."""
    pair = tl.program_id(0)
    TILES: tl.constexpr = R // 16
    granule = tl.program_id(1) // TILES
    tile = tl.program_id(1) % TILES
    start, found = _find(
        tl.load(ids + pair), p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6,
        l7, granule_words, PAGE_WORDS, GRANULES,
    )  # fmt: skip
    if found:
        start += granule.to(tl.int64) * granule_words
        base = start + tile * TILE_WORDS
        row = pair // ACTIVE
        sums = _tile_dot(
            words, halves, x, base + UP, base + GATE, granule_words, row, row + 1, x_stride, 0, GRANULE_CHUNKS,
            exponent4, exponent8, KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS,
            LINES, TAILS, CHUNKS, ROWS, UNROLL, False, GATE >= 0,
        )  # fmt: skip
        # Words are of 4 bytes, or of 2 in float16.
        bias = floats + start * 1024 // PAGE_WORDS + tile * 16 + tl.arange(0, 16)
        up = sums[0]
        if UP_BIAS >= 0:
            up += tl.load(bias + UP_BIAS)
        if GATE >= 0:
            gate = sums[ROWS]
            if GATE_BIAS >= 0:
                gate += tl.load(bias + GATE_BIAS)
            up = _gated(gate, up, ACTIVATION)
        else:
            up = _activate(up, ACTIVATION)
        tl.store(y + pair.to(tl.int64) * y_stride + granule * R + tile * 16 + tl.arange(0, 16), up)


@triton.jit(do_not_specialize=_SCALARS)
def pair_down_kernel(
    words, halves, x, ids, y,
    p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
    x_stride, y_stride, granule_words, exponent4, exponent8,
    PAGE_WORDS: tl.constexpr, GRANULES: tl.constexpr, OFFSET: tl.constexpr, R: tl.constexpr, TILE_WORDS: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr,
    GROUP_LINES: tl.constexpr, GROUP_CHUNKS: tl.constexpr, GRANULE_CHUNKS: tl.constexpr, LINES: tl.constexpr,
    TAILS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y float32 [pairs, R] = the sum over the granules of each pair's expert of x float32 [pairs, GRANULES · COLS] ·
    blockᵀ. ROWS is 1. Grid: (pairs, tiles)."""
    pair = tl.program_id(0)
    tile = tl.program_id(1)
    start, found = _find(
        tl.load(ids + pair), p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6,
        l7, granule_words, PAGE_WORDS, GRANULES,
    )  # fmt: skip
    if found:
        tile_at = start + OFFSET + tile * TILE_WORDS
        sums = _tile_dot(
            words, halves, x, tile_at, tile_at, granule_words, pair, pair + 1, x_stride, 0, GRANULES * GRANULE_CHUNKS,
            exponent4, exponent8, KIND, COLS, PER_WORD, GROUP, GROUP_WORDS, GROUP_LINES, GROUP_CHUNKS, GRANULE_CHUNKS,
            LINES, TAILS, CHUNKS, ROWS, UNROLL, True, False,
        )  # fmt: skip
        column = tile * 16 + tl.arange(0, 16)
        tl.store(y + pair.to(tl.int64) * y_stride + column, sums[0], mask=column < R)


@triton.jit
def _block_dot(
    words, halves, x, at, first_word, row, n_rows, total, granule_words,
    GRANULES: tl.constexpr, TILE_WORDS: tl.constexpr, KIND: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_WORDS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """total float32 [ROWS, N] + the products of ROWS rows of x with the rows `row` int32 [N, 1] of a block, summed over
    GRANULES granules. `at` [ROWS, 1]: where each row of x begins; a negative one is none. `first_word`: where the block
    begins in the first granule. The block has `n_rows` rows. Row `at` of x has the columns of all granules."""
    tile_at = first_word + (row // 16) * TILE_WORDS
    for granule in range(GRANULES):
        for start in range(0, COLS, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            kept = (column < COLS) & (row < n_rows)
            numbers = elements(words, halves, tile_at, row % 16, column, kept, KIND, GROUP, GROUP_WORDS)
            value = tl.load(x + at + granule * COLS + column, mask=(at >= 0) & (column < COLS), other=0.0)
            total = tl.dot(value, tl.trans(numbers), total, input_precision=DOT)
        tile_at += granule_words
    return total


@triton.jit
def _pairs_of(
    order, blocks, p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
    granule_words, PAGE_WORDS: tl.constexpr, GRANULES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of the program's block of `blocks`: (the word at which its expert begins, whether it has an expert that is here
    and any pairs, the pairs int32 [ROWS], which of these are real)."""
    entry = blocks + tl.program_id(0) * 3
    lo = tl.load(entry + 1)
    hi = tl.load(entry + 2)
    start, found = _find(
        tl.load(entry), p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
        granule_words, PAGE_WORDS, GRANULES,
    )  # fmt: skip
    place = lo + tl.arange(0, ROWS)
    real = place < hi
    return start, found & (lo < hi), tl.load(order + place, mask=real, other=0), real


@triton.jit(do_not_specialize=_SCALARS)
def block_hidden_kernel(
    words, halves, floats, x, order, blocks, y,
    p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
    x_stride, y_stride, granule_words,
    PAGE_WORDS: tl.constexpr, GRANULES: tl.constexpr, ACTIVE: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,
    GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, R: tl.constexpr, TILE_WORDS: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """As `pair_hidden_kernel`, for blocks of pairs. `order` int32 [pairs]: the pairs, sorted by expert. `blocks` int32
    [n, 3]: the expert of each block, and the range of `order` that it has. R is a power of 2. Grid: (blocks,
    GRANULES)."""
    start, found, pair, real = _pairs_of(
        order, blocks, p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
        granule_words, PAGE_WORDS, GRANULES, ROWS,
    )  # fmt: skip
    if found:
        at = tl.where(real, (pair // ACTIVE).to(tl.int64) * x_stride, -1)[:, None]
        granule = tl.program_id(1)
        start += granule.to(tl.int64) * granule_words
        row = tl.arange(0, R)[:, None]
        up = _block_dot(
            words, halves, x, at, start + UP, row, R, tl.zeros((ROWS, R), tl.float32), granule_words, 1, TILE_WORDS,
            KIND, COLS, GROUP, GROUP_WORDS, BLOCK, DOT,
        )  # fmt: skip
        column = tl.arange(0, R)
        bias = floats + start * 1024 // PAGE_WORDS + column
        if UP_BIAS >= 0:
            up += tl.load(bias + UP_BIAS)[None, :]
        if GATE >= 0:
            gate = _block_dot(
                words, halves, x, at, start + GATE, row, R, tl.zeros((ROWS, R), tl.float32), granule_words, 1,
                TILE_WORDS, KIND, COLS, GROUP, GROUP_WORDS, BLOCK, DOT,
            )  # fmt: skip
            if GATE_BIAS >= 0:
                gate += tl.load(bias + GATE_BIAS)[None, :]
            up = _gated(gate, up, ACTIVATION)
        else:
            up = _activate(up, ACTIVATION)
        spot = y + pair.to(tl.int64)[:, None] * y_stride + granule * R + column[None, :]
        tl.store(spot, up, mask=real[:, None])


@triton.jit(do_not_specialize=_SCALARS)
def block_down_kernel(
    words, halves, x, order, blocks, y,
    p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
    x_stride, y_stride, granule_words,
    PAGE_WORDS: tl.constexpr, GRANULES: tl.constexpr, OFFSET: tl.constexpr, R: tl.constexpr, TILE_WORDS: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, GROUP_WORDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """As `pair_down_kernel`, for blocks of pairs. Grid: (blocks, R / COLUMNS), a program for COLUMNS columns of y."""
    start, found, pair, real = _pairs_of(
        order, blocks, p0, p1, p2, p3, p4, p5, p6, p7, f0, f1, f2, f3, f4, f5, f6, f7, l0, l1, l2, l3, l4, l5, l6, l7,
        granule_words, PAGE_WORDS, GRANULES, ROWS,
    )  # fmt: skip
    if found:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        at = tl.where(real, pair.to(tl.int64) * x_stride, -1)[:, None]
        total = _block_dot(
            words, halves, x, at, start + OFFSET, column[:, None], R, tl.zeros((ROWS, COLUMNS), tl.float32),
            granule_words, GRANULES, TILE_WORDS, KIND, COLS, GROUP, GROUP_WORDS, BLOCK, DOT,
        )  # fmt: skip
        spot = y + pair.to(tl.int64)[:, None] * y_stride + column[None, :]
        tl.store(spot, total, mask=real[:, None] & (column < R)[None, :])


@triton.jit(do_not_specialize=["first", "last"])
def combine_kernel(
    outputs, ids, factors, y, first, last, y_stride, D: tl.constexpr, ACTIVE: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y float32 [T, D] = (or += with ADD) the sum of outputs float32 [T, ACTIVE, D] times their factors, in the order
    of the experts' numbers, over the experts first..last alone. Grid: (T, D / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < D
    total = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        total += tl.load(y + row * y_stride + column, mask=kept, other=0.0)
    for rank in range(ACTIVE):
        expert = tl.load(ids + row * ACTIVE + rank)
        inside = (expert >= first) & (expert < last)
        output = tl.load(outputs + (row * ACTIVE + rank) * D + column, mask=kept & inside, other=0.0)
        total += tl.where(inside, tl.load(factors + row * ACTIVE + rank) * output, 0.0)
    tl.store(y + row * y_stride + column, total, mask=kept)
