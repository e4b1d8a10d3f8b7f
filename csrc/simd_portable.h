// 16 lanes as arrays, for any processor and compiler. The loops are for the auto-vectoriser.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace penstock::PENSTOCK_ISA {

struct F {
    float v[16];
};
struct I {
    std::int32_t v[16];
};
struct Line {
    std::uint32_t v[16];  // four bytes of each row, little-endian
};

constexpr int kFewRows = 4, kWideRows = 4, kWideTiles = 1;
constexpr bool kHasUnit = false;
constexpr bool kUnpacksBlocks = false;

#define PENSTOCK_LANES for (int i = 0; i < 16; ++i)

inline F f_set(float x) {
    F r;
    PENSTOCK_LANES r.v[i] = x;
    return r;
}
inline F f_zero() { return f_set(0.0F); }
inline F f_load(const void* p) {
    F r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline void f_store(float* p, F x) { std::memcpy(p, x.v, 64); }
inline F f_add(F x, const F& y) {
    PENSTOCK_LANES x.v[i] += y.v[i];
    return x;
}
inline F f_mul(F x, const F& y) {
    PENSTOCK_LANES x.v[i] *= y.v[i];
    return x;
}
inline F f_div(F x, const F& y) {
    PENSTOCK_LANES x.v[i] /= y.v[i];
    return x;
}
inline F f_fma(const F& x, const F& y, F z) {
    PENSTOCK_LANES z.v[i] += x.v[i] * y.v[i];
    return z;
}
inline F f_half(const void* p) {
    std::uint16_t h[16];
    std::memcpy(h, p, 32);
    F r;
    PENSTOCK_LANES r.v[i] = from_half(h[i]);
    return r;
}
// One float16 in all lanes.
inline F f_half_of(const void* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, 2);
    return f_set(from_half(bits));
}
inline F f_from(const I& x) {
    F r;
    PENSTOCK_LANES r.v[i] = static_cast<float>(x.v[i]);
    return r;
}

// Where one operand is NaN, the result is the second operand.
inline F f_max(F x, const F& y) {
    PENSTOCK_LANES x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i];
    return x;
}
inline F f_min(F x, const F& y) {
    PENSTOCK_LANES x.v[i] = x.v[i] < y.v[i] ? x.v[i] : y.v[i];
    return x;
}
inline F f_abs(F x) {
    PENSTOCK_LANES x.v[i] = x.v[i] < 0.0F ? -x.v[i] : x.v[i];
    return x;
}
// The magnitude of x with the sign of y.
inline F f_with_sign(F x, const F& y) {
    PENSTOCK_LANES x.v[i] = std::copysign(x.v[i], y.v[i]);
    return x;
}
inline float f_max_of(const F& x) {
    float most = x.v[0];
    PENSTOCK_LANES most = x.v[i] > most ? x.v[i] : most;
    return most;
}
// y, but 0 where x is below `limit`.
inline F f_unless_below(const F& x, float limit, F y) {
    PENSTOCK_LANES y.v[i] = x.v[i] < limit ? 0.0F : y.v[i];
    return y;
}
// 2^n of integers -126 … 127.
inline F f_power(const F& n) {
    std::uint32_t bits[16];
    for (int i = 0; i < 16; ++i) {
        // For NaN the power is 1: the number that it scales is NaN already.
        const float exponent = n.v[i] >= -126.0F && n.v[i] <= 127.0F ? n.v[i] : 0.0F;
        bits[i] = static_cast<std::uint32_t>(static_cast<std::int32_t>(exponent) + 127) << 23;
    }
    F r;
    std::memcpy(r.v, bits, 64);
    return r;
}
// y · 2^n of integers -126 … 127; below that it may be anything.
inline F f_scaled(const F& y, const F& n) { return f_mul(y, f_power(n)); }
// The nearest whole numbers, ties to even, of magnitudes below 2^22. Of others it may be anything.
inline F f_whole(const F& x) { return f_add(f_add(x, f_set(12582912.0F)), f_set(-12582912.0F)); }
// Lane i of the result is the sum of the lanes of v[i], added at distances 8, 4, 2, 1.
inline F f_sums(const F (&v)[16]) {
    F r;
    for (int k = 0; k < 16; ++k) {
        float w[8];
        for (int i = 0; i < 8; ++i) w[i] = v[k].v[i] + v[k].v[i + 8];
        for (int distance = 4; distance > 0; distance /= 2) {
            for (int i = 0; i < distance; ++i) w[i] += w[i + distance];
        }
        r.v[k] = w[0];
    }
    return r;
}
inline float f_sum(const F& x) {
    float half[8];
    for (int i = 0; i < 8; ++i) half[i] = x.v[i] + x.v[i + 8];
    return ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
}
inline void f_store_half(void* p, const F& x) {
    std::uint16_t h[16];
    PENSTOCK_LANES h[i] = to_half(x.v[i]);
    std::memcpy(p, h, 32);
}
inline F f_bf16(const void* p) {
    std::uint16_t h[16];
    std::memcpy(h, p, 32);
    std::uint32_t bits[16];
    PENSTOCK_LANES bits[i] = std::uint32_t(h[i]) << 16;
    F r;
    std::memcpy(r.v, bits, 64);
    return r;
}

// 16 unsigned bytes as floats.
inline F f_bytes(const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    F r;
    PENSTOCK_LANES r.v[i] = static_cast<float>(bytes[i]);
    return r;
}
// The low nibbles and the high nibbles of 16 bytes, each times scale plus minimum.
inline void f_nibbles(const void* p, const F& scale, const F& minimum, F& low, F& high) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    PENSTOCK_LANES low.v[i] = static_cast<float>(bytes[i] & 15U);
    PENSTOCK_LANES high.v[i] = static_cast<float>(bytes[i] >> 4U);
    low = f_fma(low, scale, minimum), high = f_fma(high, scale, minimum);
}

// One register, which is the whole of F here.
using H = F;
constexpr int kLanes = 16, kRegisters = 16;

inline H h_zero() { return f_zero(); }
inline H h_set(float x) { return f_set(x); }
inline H h_load(const float* p) { return f_load(p); }
inline H h_keep(const H& x) { return x; }
inline void h_store(float* p, const H& x) { f_store(p, x); }
inline H h_mul(const H& x, const H& y) { return f_mul(x, y); }
inline H h_fma(const H& x, const H& y, const H& z) { return f_fma(x, y, z); }
inline H h_half(const void* p) { return f_half(p); }
inline H h_bf16(const void* p) { return f_bf16(p); }
inline H h_bytes(const void* p) { return f_bytes(p); }
inline void h_nibbles(const void* p, const H& scale, const H& minimum, H& low, H& high) {
    f_nibbles(p, scale, minimum, low, high);
}

inline Line line(const void* p) {
    Line r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline void l_store(void* p, const Line& x) { std::memcpy(p, x.v, 64); }
// x, of which the compiler does not know that it is still the same.
inline Line l_keep(Line x) {
    asm("" : "+m"(x));
    return x;
}
inline Line low_nibbles(Line x) {
    PENSTOCK_LANES x.v[i] &= 0x0f0f0f0fU;
    return x;
}
inline Line high_nibbles(Line x) {
    PENSTOCK_LANES x.v[i] = x.v[i] >> 4 & 0x0f0f0f0fU;
    return x;
}
template <int b>
inline F f_byte(const Line& x) {
    F r;
    PENSTOCK_LANES r.v[i] = static_cast<float>(x.v[i] >> 8 * b & 255U);
    return r;
}
inline F f_bits(const Line& x) {
    F r;
    std::memcpy(r.v, x.v, 64);
    return r;
}
inline F f_bf16_even(Line x) {
    PENSTOCK_LANES x.v[i] <<= 16;
    return f_bits(x);
}
inline F f_bf16_odd(Line x) {
    PENSTOCK_LANES x.v[i] &= 0xffff0000U;
    return f_bits(x);
}

// Bits of each row's word: shifted, and where the mask has them; a | b.
inline Line l_right(Line x, int bits, std::int32_t mask) {
    PENSTOCK_LANES x.v[i] = x.v[i] >> bits & static_cast<std::uint32_t>(mask);
    return x;
}
// With copies of the sign for what comes in.
inline Line l_right_signed(Line x, int bits, std::int32_t mask) {
    PENSTOCK_LANES x.v[i] = static_cast<std::uint32_t>(static_cast<std::int32_t>(x.v[i]) >> bits & mask);
    return x;
}
inline Line l_left(Line x, int bits, std::int32_t mask) {
    PENSTOCK_LANES x.v[i] = x.v[i] << bits & static_cast<std::uint32_t>(mask);
    return x;
}
inline Line l_or(Line x, const Line& y) {
    PENSTOCK_LANES x.v[i] |= y.v[i];
    return x;
}
// table [16] at each byte, of which none is above 15.
inline Line l_lookup(Line x, const std::uint8_t* table) {
    for (std::uint32_t& word : x.v) {
        std::uint32_t found = 0;
        for (int b = 0; b < 32; b += 8) found |= std::uint32_t{table[word >> b & 15U]} << b;
        word = found;
    }
    return x;
}
// Byte b of each row, unsigned or signed.
constexpr bool kLooksUpWords = false;
inline F f_byte_at(const Line& x, int b) {
    F r;
    PENSTOCK_LANES r.v[i] = static_cast<float>(x.v[i] >> 8 * b & 255U);
    return r;
}
inline F f_signed_byte_at(const Line& x, int b) {
    F r;
    PENSTOCK_LANES r.v[i] = static_cast<float>(static_cast<std::int8_t>(x.v[i] >> 8 * b & 255U));
    return r;
}

// Magnitudes as integers. They are ordered as the floats' magnitudes are, and NaN is above all others.
inline I i_magnitude(const F& x) {
    I r;
    std::memcpy(r.v, x.v, 64);
    PENSTOCK_LANES r.v[i] &= 0x7fffffff;
    return r;
}
inline I i_max(I x, const I& y) {
    PENSTOCK_LANES x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i];
    return x;
}
inline std::int32_t i_max_of(const I& x) {
    std::int32_t most = x.v[0];
    PENSTOCK_LANES most = x.v[i] > most ? x.v[i] : most;
    return most;
}
inline std::int32_t i_sum(const I& x) {
    std::int32_t sum = 0;
    PENSTOCK_LANES sum += x.v[i];
    return sum;
}
// Rounds to the nearest integers, ties to even, by adding and taking away 1.5 · 2^23. Numbers are within ±32767;
// others come from damaged weights, and give 0.
inline I i_round(const F& x) {
    I r;
    for (int i = 0; i < 16; ++i) {
        const float rounded = (x.v[i] + 12582912.0F) - 12582912.0F;
        r.v[i] = rounded >= -32767.0F && rounded <= 32767.0F ? static_cast<std::int32_t>(rounded) : 0;
    }
    return r;
}
inline void i_store_bytes(std::int8_t* to, const I& x) { PENSTOCK_LANES to[i] = static_cast<std::int8_t>(x.v[i]); }

constexpr bool kAddsPairs = false, kCentres = false;  // dots_avx2.h has these
I i_dot_pairs(I pairs, Line codes, const std::int8_t* four);
I i_of_pairs(I pairs);
template <int n>
void centred_dots(const std::uint8_t* lines, const std::int8_t* fours, I (&to)[n]);
inline I i_zero() { return {}; }
inline I i_set(std::int32_t x) {
    I r;
    PENSTOCK_LANES r.v[i] = x;
    return r;
}
inline I i_add(I x, const I& y) {
    PENSTOCK_LANES x.v[i] += y.v[i];
    return x;
}
template <bool nibbles>
inline I i_dot(I acc, const Line& weights, const std::int8_t* four) {
    for (int b = 0; b < 4; ++b) {
        const std::int32_t a = four[b];
        PENSTOCK_LANES acc.v[i] += static_cast<std::int32_t>(weights.v[i] >> 8 * b & 255U) * a;
    }
    return acc;
}

inline I i_load(const std::int32_t* p) {
    I r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline void i_store(std::int32_t* p, const I& x) { std::memcpy(p, x.v, 64); }
// acc + the low 16 bits of each word times one number, + the high 16 bits times another.
inline I i_dot_twos(I acc, const Line& words, std::int32_t first, std::int32_t second) {
    PENSTOCK_LANES {
        acc.v[i] += static_cast<std::int32_t>(words.v[i] & 0xffffU) * first +
                    static_cast<std::int32_t>(words.v[i] >> 16) * second;
    }
    return acc;
}
// Numbers of 16 bits, those of `high` above those of `low`.
inline I i_words(I low, const I& high) {
    PENSTOCK_LANES {
        const auto word = [](std::int32_t x) { return static_cast<std::uint32_t>(x) & 0xffffU; };
        const std::uint32_t both = word(low.v[i]) | word(high.v[i]) << 16;
        std::memcpy(low.v + i, &both, 4);
    }
    return low;
}

#undef PENSTOCK_LANES

// Numbers within ±127: lane i of the 16 is the four vectors' lanes i, as bytes.
inline void i_store_fours(std::int32_t* to, const I& a, const I& b, const I& c, const I& d) {
    for (int i = 0; i < 16; ++i) {
        const auto byte = [](std::int32_t x) { return static_cast<std::uint32_t>(x) & 255U; };
        const std::uint32_t four = byte(a.v[i]) | byte(b.v[i]) << 8 | byte(c.v[i]) << 16 | byte(d.v[i]) << 24;
        std::memcpy(to + i, &four, 4);
    }
}

}  // namespace penstock::PENSTOCK_ISA

#include "quad-line-inl.h"

namespace penstock::PENSTOCK_ISA {

// 16 bytes of four rows side by side.
inline Line fours_of(const std::uint8_t* const* rows) {
    Line fours{};
    for (int row = 0; row < 4; ++row) {
        for (int i = 0; i < 16; ++i) fours.v[i] |= std::uint32_t{rows[row][i]} << 8 * row;
    }
    return fours;
}
[[gnu::always_inline]] inline Quads quads_of(const std::uint8_t* const* rows) {
    Quads quads{};
    for (int row = 0; row < 4; ++row) {
        for (int i = 0; i < 16; ++i) {
            quads.low.v[i] |= (rows[row][i] & 15U) << 8 * row;
            quads.high.v[i] |= std::uint32_t(rows[row][i] >> 4) << 8 * row;
        }
    }
    return quads;
}

}  // namespace penstock::PENSTOCK_ISA
