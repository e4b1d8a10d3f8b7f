"""Triton kernel between the products of qkv and the cache: bias, q/k norm, rotation, and storing rows in pages of any
format.

Codes are the same as the reference's where the numbers are: divisions are rounded correctly, and the launch forbids
fused multiply-adds (`enable_fp_fusion=False`).
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_HALF = tl.constexpr(65504.0)


@triton.jit
def _turned(
    source, columns, kept, bias, inverse, weight, cos, sin,
    BIAS: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's row: source + bias, normed, then rotated; 0 where not `kept`. HALF: half of the rotated
    dimensions, 0 for none."""
    value = tl.load(source + columns, mask=kept, other=0.0)
    if BIAS:
        value += tl.load(bias + columns, mask=kept, other=0.0)
    if NORM:
        value = value * inverse * tl.load(weight + columns, mask=kept, other=0.0)
    if HALF > 0:
        lower = columns < HALF
        turning = kept & (columns < 2 * HALF)
        pair = tl.where(lower, columns, columns - HALF)
        partner = tl.where(lower, columns + HALF, columns - HALF)
        other = tl.load(source + partner, mask=turning, other=0.0)
        if BIAS:
            other += tl.load(bias + partner, mask=turning, other=0.0)
        if NORM:
            other = other * inverse * tl.load(weight + partner, mask=turning, other=0.0)
        c = tl.load(cos + pair, mask=turning, other=1.0)
        s = tl.load(sin + pair, mask=turning, other=0.0)
        value = tl.where(turning, tl.where(lower, value * c - other * s, value * c + other * s), value)
    return value


@triton.jit
def _half_bits(value, DOWN: tl.constexpr):
    """float32 within ±65504 → the bits, as int32, of the nearest float16 that is not above (DOWN) or not below it. "Not
    below" is right only for numbers of 0 and more."""
    near = value.to(tl.float16)
    back = near.to(tl.float32)
    bits = near.to(tl.int16, bitcast=True).to(tl.int32)
    if DOWN:
        # Below a zero of either sign comes the smallest negative number, 0x8001.
        below = tl.where((bits & 0x7FFF) == 0, -32767, tl.where(bits < 0, bits + 1, bits - 1))
        return tl.where(back > value, below, bits)
    else:
        return tl.where(back < value, bits + 1, bits)


@triton.jit
def _value_of(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _clean(value, kept):
    """(value clipped to ±65504, all 0 if one was NaN; 1 if one was NaN, else 0)."""
    spoilt = tl.max((kept & (value != value)).to(tl.int32), 0)
    value = tl.where(spoilt == 1, 0.0, value)
    return tl.minimum(tl.maximum(value, -MOST_HALF), MOST_HALF), spoilt


@triton.jit
def _codes(value, offset, inverse):
    return ((value - offset) * inverse + 0.5).to(tl.int32)


@triton.jit(do_not_specialize=["head_lo", "most_pages"])
def turn_kernel(
    q_raw, k_raw, v_raw, floats, q_weight, k_weight, cos, sin, positions, sequence, q, keys, values, key_halves,
    value_halves, head_lo, q_stride, granule_floats, page_stride, head_stride, pages, most_pages, eps,
    Q_BIAS: tl.constexpr, K_BIAS: tl.constexpr, V_BIAS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    HALF: tl.constexpr, G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):  # fmt: skip
    """q_raw [T, HEADS, G, E], k_raw and v_raw [T, HEADS, E], all float32 → q float32 [T, H, E] and rows of the cache,
    at positions int32 [T] of the sequences int32 [T].

    Grid: (T, HEADS, G + 2). For a row and the KV head head_lo + i, G programs do its queries, one its key, one its
    value.

    cos, sin: float32 [T, HALF]. floats: the unit's granules as float32, with biases at Q_BIAS, K_BIAS and V_BIAS in
    each. keys, values: the pools in the type of their numbers (bfloat16 as int16, codes as bytes). key_halves,
    value_halves: the pools as int16. pages: int32 [sequences, most_pages]. page_stride and head_stride count bytes.
    CODES: bytes of a row's codes (or numbers)."""
    t = tl.program_id(0)
    head = tl.program_id(1)
    role = tl.program_id(2)
    t64 = t.to(tl.int64)
    granule = floats + head.to(tl.int64) * granule_floats
    columns = tl.arange(0, BLOCK)
    kept = columns < E
    cos += t * HALF
    sin += t * HALF
    if role < G:
        source = q_raw + (t64 * HEADS + head) * G * E + role * E
        bias = granule + Q_BIAS + role * E
        inverse = 1.0
        if NORM:
            inverse = _inverse_rms(source, bias, columns, kept, eps, E, BIAS)
        turned = _turned(source, columns, kept, bias, inverse, q_weight, cos, sin, BIAS, NORM, HALF)
        tl.store(q + t64 * q_stride + ((head_lo + head) * G + role) * E + columns, turned, mask=kept)
    else:
        position = tl.load(positions + t)
        page = tl.load(pages + tl.load(sequence + t) * most_pages + position // PAGE)
        slot = position % PAGE
        block_at = page.to(tl.int64) * page_stride + (head_lo + head) * head_stride
        if role == G:
            source = k_raw + (t64 * HEADS + head) * E
            bias = granule + K_BIAS
            inverse = 1.0
            if NORM:
                inverse = _inverse_rms(source, bias, columns, kept, eps, E, BIAS)
            _store(
                source, bias, inverse, k_weight, cos, sin, keys, key_halves, block_at, slot,
                BIAS, NORM, HALF, E, PAGE, KIND, GROUP, GROUPS, CODES, BLOCK, BLOCK_GROUP,
            )  # fmt: skip
        else:
            source = v_raw + (t64 * HEADS + head) * E
            _store(
                source, granule + V_BIAS, 1.0, k_weight, cos, sin, values, value_halves, block_at, slot,
                BIAS, False, 0, E, PAGE, KIND, GROUP, GROUPS, CODES, BLOCK, BLOCK_GROUP,
            )  # fmt: skip


@triton.jit
def _inverse_rms(source, bias, columns, kept, eps, E: tl.constexpr, BIAS: tl.constexpr):
    value = tl.load(source + columns, mask=kept, other=0.0)
    if BIAS:
        value += tl.load(bias + columns, mask=kept, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(value * value, 0) / E + eps)


@triton.jit
def _store(
    source, bias, inverse, weight, cos, sin, pool, halves, block_at, slot,
    BIAS: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):  # fmt: skip
    """Stores one row of a KV head in slot `slot` of the block that begins at byte `block_at` of the pool."""
    LEVELS: tl.constexpr = 15 if KIND == "int4" else 255
    if KIND == "int4" or KIND == "int8":
        factors = halves + block_at // 2 + PAGE * CODES // 2 + slot
        for g in tl.static_range(GROUPS):
            i = tl.arange(0, BLOCK_GROUP)  # numbers of a group; for int4 its bytes, of two numbers each
            if KIND == "int4":
                low_at = g * GROUP + (i // 16) * 32 + i % 16
                inside = i * 2 < GROUP
                high_at = low_at + 16
                high_kept = inside & (high_at < E)
                high = _turned(source, high_at, high_kept, bias, inverse, weight, cos, sin, BIAS, NORM, HALF)
                high, high_spoilt = _clean(high, high_kept)
            else:
                low_at = g * GROUP + i
                inside = i < GROUP
            low_kept = inside & (low_at < E)
            low = _turned(source, low_at, low_kept, bias, inverse, weight, cos, sin, BIAS, NORM, HALF)
            low, spoilt = _clean(low, low_kept)
            least = tl.min(tl.where(low_kept, low, float("inf")), 0)
            most = tl.max(tl.where(low_kept, low, float("-inf")), 0)
            if KIND == "int4":
                spoilt = tl.maximum(spoilt, high_spoilt)
                least = tl.minimum(least, tl.min(tl.where(high_kept, high, float("inf")), 0))
                most = tl.maximum(most, tl.max(tl.where(high_kept, high, float("-inf")), 0))
            # A NaN anywhere makes the whole group NaN: codes and scale 0, the minimum NaN.
            least = tl.where(spoilt == 1, 0.0, least)
            most = tl.where(spoilt == 1, 0.0, most)
            minimum_bits = _half_bits(least, True)
            offset = _value_of(minimum_bits)
            scale_bits = _half_bits(tl.div_rn(most - offset, LEVELS * 1.0), False)
            scale = _value_of(scale_bits)
            step = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
            code = tl.where(low_kept & (spoilt == 0), _codes(low, offset, step), 0)
            if KIND == "int4":
                code = code | (tl.where(high_kept & (spoilt == 0), _codes(high, offset, step), 0) << 4)
                byte = g * (GROUP // 2) + i
            else:
                byte = low_at
            tl.store(pool + block_at + slot * CODES + byte, code.to(tl.uint8), mask=inside & (byte < CODES))
            tl.store(factors + g * PAGE, scale_bits.to(tl.int16))
            minimum_bits = tl.where(spoilt == 1, 0x7E00, minimum_bits)
            tl.store(factors + (GROUPS + g) * PAGE, minimum_bits.to(tl.int16))
    else:
        columns = tl.arange(0, BLOCK)
        kept = columns < E
        value = _turned(source, columns, kept, bias, inverse, weight, cos, sin, BIAS, NORM, HALF)
        _store_floats(value, columns, kept, pool, block_at, slot, E, KIND)


@triton.jit
def _store_floats(value, columns, kept, pool, block_at, slot, E: tl.constexpr, KIND: tl.constexpr):
    """`_store` of the finished columns of a row that is float32, float16 or bfloat16 in the pool."""
    if KIND == "float32":
        tl.store(pool + block_at // 4 + slot * E + columns, value, mask=kept)
    elif KIND == "float16":  # values beyond its range become the largest; NaN stays
        value = tl.where(value > MOST_HALF, MOST_HALF, tl.where(value < -MOST_HALF, -MOST_HALF, value))
        tl.store(pool + block_at // 2 + slot * E + columns, value.to(tl.float16), mask=kept)
    else:  # bfloat16: rounds to nearest, ties to even, on the bits
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value != value, 0x7FC0, rounded)
        tl.store(pool + block_at // 2 + slot * E + columns, rounded.to(tl.int16), mask=kept)
