"""Triton kernels of attention over the paged cache, in any format.

A program has some queries of one KV head: `M` pairs of (row, query head). It reads every SPLITS-th block of N positions
of their sequence, with a running maximum. Blocks are dealt out by turns, so that all splits have work at any position,
although the grid knows only the room for context. A second kernel merges the splits.

Numbers of a row of the cache are taken in the order (group, place in the group), both padded to powers of 2. In int4
they are two halves, one of the low and one of the high nibbles. Scores are sums over that order, and values keep it. So
only the output is brought into the order of columns, when it is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.tile_kernels import tanh


@triton.jit
def _codes_of(pool, halves, block_at, slot, there, HIGH: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
              KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr,
              PLACES: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Rows `slot` [N] of the block at byte `block_at` as float32 [N, WIDE · PLACES]; 0 where not `there` [N]. HIGH:
    high nibbles. WIDE: groups, padded. PLACES: numbers of a group (for int4 half of them), padded. Where they need no
    padding, columns are not masked, since with a mask the compiler would load byte by byte."""
    group = tl.arange(0, WIDE)
    place = tl.arange(0, PLACES)
    if KIND == "int4" or KIND == "int8":
        if KIND == "int4":
            inside = place * 2 < GROUP
            byte = group[:, None] * (GROUP // 2) + place[None, :]
        else:
            inside = place < GROUP
            byte = group[:, None] * GROUP + place[None, :]
        kept = there[:, None, None]
        if WIDE * PLACES != CODES:
            kept = kept & (inside[None, :] & (byte < CODES))[None, :, :]
        spots = pool + block_at + (slot * CODES)[:, None, None] + byte[None, :, :]
        code = tl.load(spots, mask=kept, other=0).to(tl.int32)
        if KIND == "int4":
            code = (code >> 4) if HIGH else (code & 15)
        factors = halves + block_at // 2 + PAGE * CODES // 2 + group[None, :] * PAGE + slot[:, None]
        factor_kept = there[:, None]
        if WIDE != GROUPS:
            factor_kept = factor_kept & (group < GROUPS)[None, :]
        scale = tl.load(factors, mask=factor_kept, other=0.0).to(tl.float32)  # [N, WIDE]
        minimum = tl.load(factors + GROUPS * PAGE, mask=factor_kept, other=0.0).to(tl.float32)
        numbers = code.to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
        return tl.reshape(numbers, (N, WIDE * PLACES))
    else:
        kept = there[:, None]
        if PLACES != E:
            kept = kept & (place < E)[None, :]
        offset = (slot * E)[:, None] + place[None, :]
        if KIND == "float32":
            return tl.load(pool + block_at // 4 + offset, mask=kept, other=0.0)
        elif KIND == "float16":
            return tl.load(pool + block_at // 2 + offset, mask=kept, other=0.0).to(tl.float32)
        else:  # bfloat16, as int16
            bits = tl.load(pool + block_at // 2 + offset, mask=kept, other=0).to(tl.int32)
            return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n_rows", "head_lo", "most_pages"])
def attend_kernel(
    q, keys, values, key_halves, value_halves, positions, sequence, sinks, out, stats, scale,
    n_rows, head_lo, q_stride, out_stride, split_stride, stats_stride, page_stride, head_stride, pages, most_pages,
    G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, TILE_ROWS: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr,
    WIDE: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q float32 [T, H, E] → out float32 [T, H, E], for HEADS KV heads from head_lo on. `sinks` float32 [H], read with
    SINKS. Grid: (tiles, HEADS, SPLITS).

    With SPLITS > 1, out is float32 [SPLITS, T, HEADS · G, E] and not yet divided by the sums. stats float32 [SPLITS, T,
    HEADS · G, 2] gets the largest score and the sum.

    Rows of a tile may be of several sequences. The program then reads one sequence after the other. Strides of the
    pools count bytes. pages: int32 [sequences, most_pages]."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.arange(0, M)
    t = tile * TILE_ROWS + m // G
    real = (m // G < TILE_ROWS) & (t < n_rows)
    query = m % G
    position = tl.load(positions + t, mask=real, other=-1)
    owner = tl.load(sequence + t, mask=real, other=-1)
    j = tl.arange(0, WIDE * PLACES)
    if KIND == "int4":
        inside = (j % PLACES) * 2 < GROUP
        column = (j // PLACES) * GROUP + ((j % PLACES) // 16) * 32 + j % 16
    elif KIND == "int8":
        inside = (j % PLACES) < GROUP
        column = (j // PLACES) * GROUP + j % PLACES
    else:
        inside = j < E
        column = j
    low_kept = inside & (column < E)
    high_kept = inside & (column + 16 < E)
    t64 = t.to(tl.int64)
    spots = q + t64[:, None] * q_stride + ((head_lo + head) * G + query)[:, None] * E + column[None, :]
    low_q = tl.load(spots, mask=real[:, None] & low_kept[None, :], other=0.0)  # [M, WIDE · PLACES]
    low_sum = tl.zeros((M, WIDE * PLACES), tl.float32)
    if KIND == "int4":
        high_q = tl.load(spots + 16, mask=real[:, None] & high_kept[None, :], other=0.0)
        high_sum = tl.zeros((M, WIDE * PLACES), tl.float32)
    peak = tl.full((M,), float("-inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    if SINKS:  # seen before all positions, with a value of 0, and by one split alone
        sink = tl.load(sinks + (head_lo + head) * G + query, mask=real, other=0.0)
        peak = tl.where(split == 0, sink, peak)
        weight = tl.where(split == 0, weight + 1.0, weight)
    for seq in range(tl.min(tl.where(real, owner, 0x7FFFFFFF), 0), tl.max(owner, 0) + 1):
        ours = real & (owner == seq)
        reach = tl.max(tl.where(ours, position, -1), 0)  # -1: no row of the tile is of this sequence
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(tl.min(tl.where(ours, position, 0x7FFFFFFF), 0) - (WINDOW - 1), 0) // N
        for block in range(begin + split, (reach + N) // N, SPLITS):
            positions_read = block * N + tl.arange(0, N)
            there = positions_read <= reach
            page = tl.load(pages + seq * most_pages + (block * N) // PAGE)
            slot = (block * N) % PAGE + tl.arange(0, N)
            block_at = page.to(tl.int64) * page_stride + (head_lo + head) * head_stride
            key = _codes_of(keys, key_halves, block_at, slot, there, False, E, PAGE, KIND, GROUP, GROUPS, CODES, WIDE,
                            PLACES, N)  # fmt: skip
            score = tl.dot(low_q, tl.trans(key), input_precision=PRECISION)
            if KIND == "int4":
                key = _codes_of(keys, key_halves, block_at, slot, there, True, E, PAGE, KIND, GROUP, GROUPS, CODES,
                                WIDE, PLACES, N)  # fmt: skip
                score += tl.dot(high_q, tl.trans(key), input_precision=PRECISION)
            score = score * scale  # [M, N]
            if SOFTCAP > 0:
                score = SOFTCAP * tanh(score / SOFTCAP)
            seen = ours[:, None] & (positions_read[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (positions_read[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(peak, tl.max(score, 1))
            # A row that has seen nothing yet has peak -inf. Base 0 gives it exp(-inf - 0) = 0, and no NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            share = tl.exp(score - base[:, None])
            shrink = tl.exp(peak - base)
            weight = weight * shrink + tl.sum(share, 1)
            peak = higher
            value = _codes_of(values, value_halves, block_at, slot, there, False, E, PAGE, KIND, GROUP, GROUPS, CODES,
                              WIDE, PLACES, N)  # fmt: skip
            low_sum = low_sum * shrink[:, None] + tl.dot(share, value, input_precision=PRECISION)
            if KIND == "int4":
                value = _codes_of(values, value_halves, block_at, slot, there, True, E, PAGE, KIND, GROUP, GROUPS,
                                  CODES, WIDE, PLACES, N)  # fmt: skip
                high_sum = high_sum * shrink[:, None] + tl.dot(share, value, input_precision=PRECISION)
    if SPLITS == 1:
        low_sum = low_sum / weight[:, None]
        target = out + t64[:, None] * out_stride + ((head_lo + head) * G + query)[:, None] * E + column[None, :]
    else:
        split64 = split.to(tl.int64)
        spot = stats + split64 * stats_stride + (t64 * HEADS * G + head * G + query) * 2
        tl.store(spot, peak, mask=real)
        tl.store(spot + 1, weight, mask=real)
        target = out + split64 * split_stride + (t64 * HEADS * G + head * G + query)[:, None] * E + column[None, :]
        real = real & (weight != 0)  # parts that have seen nothing are not stored, since the merge does not read them
    tl.store(target, low_sum, mask=real[:, None] & low_kept[None, :])
    if KIND == "int4":
        if SPLITS == 1:
            high_sum = high_sum / weight[:, None]
        tl.store(target + 16, high_sum, mask=real[:, None] & high_kept[None, :])


@triton.jit(do_not_specialize=["head_lo"])
def merge_splits_kernel(
    parts, stats, out, head_lo, out_stride, split_stride, stats_stride,
    HEADS: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merges the splits of `attend_kernel`, parts [SPLITS, T, HEADS, E] and stats [SPLITS, T, HEADS, 2], into out
    [T, H, E], for HEADS query heads from head_lo on. All float32. Grid: (T, HEADS)."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, ALL)
    column = tl.arange(0, BLOCK)
    spot = stats + split.to(tl.int64) * stats_stride + (t * HEADS + head) * 2
    weight = tl.load(spot + 1, mask=split < SPLITS, other=0.0)
    peak = tl.load(spot, mask=split < SPLITS, other=float("-inf"))
    used = weight != 0  # true for NaN too, so that it shows in the result
    factor = tl.where(used, tl.exp(peak - tl.max(tl.where(used, peak, float("-inf")), 0)), 0.0)
    source = parts + split.to(tl.int64)[:, None] * split_stride + (t * HEADS + head) * E + column[None, :]
    values = tl.load(source, mask=used[:, None] & (column < E)[None, :], other=0.0)  # [ALL, BLOCK]
    total = tl.sum(values * factor[:, None], 0) / tl.sum(weight * factor, 0)
    tl.store(out + t * out_stride + (head_lo + head) * E + column, total, mask=column < E)
