// 16 lanes as four NEON registers (AArch64). Dot products are by the dot-product or the i8mm extension where the build
// has it.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace penstock::PENSTOCK_ISA {

struct F {
    float32x4_t a, b, c, d;
};
struct I {
    int32x4_t a, b, c, d;
};
using Line = I;

constexpr int kFewRows = 4, kWideRows = 4, kWideTiles = 1;
constexpr bool kHasUnit = false;
constexpr bool kUnpacksBlocks = false, kLooksUpWords = false;

// f of each of the four registers of its operands.
template <class To, class Function, class... Operands>
[[gnu::always_inline]] inline To by_four(const Function& f, const Operands&... x) {
    return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

inline F f_set(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return {all, all, all, all};
}
inline F f_zero() { return f_set(0.0F); }
inline F f_load(const void* p) {
    const auto* f = static_cast<const float*>(p);
    return {vld1q_f32(f), vld1q_f32(f + 4), vld1q_f32(f + 8), vld1q_f32(f + 12)};
}
inline void f_store(float* p, F x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
inline F f_add(F x, F y) { return by_four<F>(vaddq_f32, x, y); }
inline F f_mul(F x, F y) { return by_four<F>(vmulq_f32, x, y); }
inline F f_div(F x, F y) { return by_four<F>(vdivq_f32, x, y); }

// One register: kLanes lanes of F. Where a kernel's sums fill the registers, it goes over the quarters of F one by one.
using H = float32x4_t;
constexpr int kLanes = 4, kRegisters = 32;

inline H h_zero() { return vdupq_n_f32(0.0F); }
inline H h_set(float x) { return vdupq_n_f32(x); }
inline H h_load(const float* p) { return vld1q_f32(p); }
// x in a register: else GCC may load it once for each product.
inline H h_keep(H x) {
    asm("" : "+w"(x));
    return x;
}
inline void h_store(float* p, H x) { vst1q_f32(p, x); }
inline H h_mul(H x, H y) { return vmulq_f32(x, y); }
inline H h_fma(H x, H y, H z) { return vfmaq_f32(z, x, y); }
// Four numbers of two bytes each, or of one.
inline uint16x4_t h_twos(const void* p) { return vld1_u16(static_cast<const std::uint16_t*>(p)); }
inline H h_half(const void* p) { return vcvt_f32_f16(vreinterpret_f16_u16(h_twos(p))); }
inline H h_bf16(const void* p) { return vreinterpretq_f32_u32(vshll_n_u16(h_twos(p), 16)); }
inline uint32x4_t h_codes(const void* p) {
    std::uint32_t four;
    __builtin_memcpy(&four, p, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}
inline H h_bytes(const void* p) { return vcvtq_f32_u32(h_codes(p)); }
// The low nibbles and the high nibbles of the bytes, each times scale plus minimum.
inline void nibbles(uint32x4_t both, H scale, H minimum, H& low, H& high) {
    low = h_fma(vcvtq_f32_u32(vandq_u32(both, vdupq_n_u32(15))), scale, minimum);
    high = h_fma(vcvtq_f32_u32(vshrq_n_u32(both, 4)), scale, minimum);
}
inline void h_nibbles(const void* p, H scale, H minimum, H& low, H& high) {
    nibbles(h_codes(p), scale, minimum, low, high);
}

inline F f_fma(F x, F y, F z) { return by_four<F>(h_fma, x, y, z); }
inline F f_half(const void* p) {
    const auto* h = static_cast<const std::uint16_t*>(p);
    return {h_half(h), h_half(h + 4), h_half(h + 8), h_half(h + 12)};
}
// One float16 in all lanes.
inline F f_half_of(const void* p) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    const float32x4_t all = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)));
    return {all, all, all, all};
}
inline F f_from(I x) { return by_four<F>(vcvtq_f32_s32, x); }
// Where one operand is NaN, the result is the second operand.
inline F f_max(F x, F y) {
    return by_four<F>([](float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }, x, y);
}
inline F f_min(F x, F y) {
    return by_four<F>([](float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }, x, y);
}
inline F f_abs(F x) { return by_four<F>(vabsq_f32, x); }
// The magnitude of x with the sign of y.
inline F f_with_sign(F x, F y) {
    const auto one = [](float32x4_t a, float32x4_t b) { return vbslq_f32(vdupq_n_u32(0x7fffffffU), a, b); };
    return by_four<F>(one, x, y);
}
inline float f_max_of(F x) { return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.a, x.b), vmaxnmq_f32(x.c, x.d))); }
// y, but 0 where x is below `limit`.
inline F f_unless_below(F x, float limit, F y) {
    const auto one = [&](float32x4_t a, float32x4_t b) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(b), vcltq_f32(a, vdupq_n_f32(limit))));
    };
    return by_four<F>(one, x, y);
}
// 2^n of integers -126 … 127.
inline F f_power(F n) {
    const auto one = [](float32x4_t a) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(a), vdupq_n_s32(127)), 23));
    };
    return by_four<F>(one, n);
}
// y · 2^n of integers -126 … 127; below that it may be anything.
inline F f_scaled(F y, F n) { return f_mul(y, f_power(n)); }
// The nearest whole numbers, ties to even.
inline F f_whole(F x) { return by_four<F>(vrndnq_f32, x); }
// The lanes of x, added at distances 8 and 4.
inline float32x4_t folded(F x) { return vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d)); }
// Lane i: the lanes of v[i], added at distances 8, 4, 2, 1.
inline float32x4_t sums4(const F* v) {
    const auto two = [](float32x4_t x, float32x4_t y) {
        return vaddq_f32(vcombine_f32(vget_low_f32(x), vget_low_f32(y)),
                         vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
    };
    return vpaddq_f32(two(folded(v[0]), folded(v[1])), two(folded(v[2]), folded(v[3])));
}
inline F f_sums(const F (&v)[16]) { return {sums4(v), sums4(v + 4), sums4(v + 8), sums4(v + 12)}; }
inline float f_sum(F x) {
    const float32x4_t four = folded(x);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline void f_store_half(void* p, F x) {
    auto* h = static_cast<std::uint16_t*>(p);
    vst1_u16(h, vreinterpret_u16_f16(vcvt_f16_f32(x.a)));
    vst1_u16(h + 4, vreinterpret_u16_f16(vcvt_f16_f32(x.b)));
    vst1_u16(h + 8, vreinterpret_u16_f16(vcvt_f16_f32(x.c)));
    vst1_u16(h + 12, vreinterpret_u16_f16(vcvt_f16_f32(x.d)));
}
inline F f_bf16(const void* p) {
    const auto* h = static_cast<const std::uint16_t*>(p);
    return {h_bf16(h), h_bf16(h + 4), h_bf16(h + 8), h_bf16(h + 12)};
}

// 16 unsigned bytes.
inline I i_bytes(const void* p) {
    const uint8x16_t bytes = vld1q_u8(static_cast<const std::uint8_t*>(p));
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))};
}
inline F f_bytes(const void* p) { return f_from(i_bytes(p)); }
// The low nibbles and the high nibbles of 16 bytes, each times scale plus minimum.
inline void f_nibbles(const void* p, F scale, F minimum, F& low, F& high) {
    const I both = i_bytes(p);
    nibbles(vreinterpretq_u32_s32(both.a), scale.a, minimum.a, low.a, high.a);
    nibbles(vreinterpretq_u32_s32(both.b), scale.b, minimum.b, low.b, high.b);
    nibbles(vreinterpretq_u32_s32(both.c), scale.c, minimum.c, low.c, high.c);
    nibbles(vreinterpretq_u32_s32(both.d), scale.d, minimum.d, low.d, high.d);
}

inline Line line(const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return {vreinterpretq_s32_u8(vld1q_u8(bytes)), vreinterpretq_s32_u8(vld1q_u8(bytes + 16)),
            vreinterpretq_s32_u8(vld1q_u8(bytes + 32)), vreinterpretq_s32_u8(vld1q_u8(bytes + 48))};
}
inline void l_store(void* p, Line x) {
    auto* const to = static_cast<std::int32_t*>(p);
    vst1q_s32(to, x.a), vst1q_s32(to + 4, x.b);
    vst1q_s32(to + 8, x.c), vst1q_s32(to + 12, x.d);
}
// x, of which the compiler does not know that it is still the same.
inline Line l_keep(Line x) {
    asm("" : "+m"(x));
    return x;
}
inline Line low_nibbles(Line x) {
    return by_four<Line>([](int32x4_t w) { return vandq_s32(w, vdupq_n_s32(0x0f0f0f0f)); }, x);
}
inline Line high_nibbles(Line x) {
    const auto one = [](int32x4_t w) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(w), 4)); };
    return by_four<Line>(one, x);
}

// Bits of each row's word: shifted, and where the mask has them; a | b.
inline Line l_left(Line x, int bits, std::int32_t mask) {
    const auto one = [&](int32x4_t w) { return vandq_s32(vshlq_s32(w, vdupq_n_s32(bits)), vdupq_n_s32(mask)); };
    return by_four<Line>(one, x);
}
inline Line l_right(Line x, int bits, std::int32_t mask) {
    const auto one = [&](int32x4_t w) {  // a shift to the left by less than nothing
        const uint32x4_t shifted = vshlq_u32(vreinterpretq_u32_s32(w), vdupq_n_s32(-bits));
        return vandq_s32(vreinterpretq_s32_u32(shifted), vdupq_n_s32(mask));
    };
    return by_four<Line>(one, x);
}
// As l_right, but what comes from the left are copies of the sign.
inline Line l_right_signed(Line x, int bits, std::int32_t mask) {
    const auto one = [bits, mask](int32x4_t w) {
        return vandq_s32(vshlq_s32(w, vdupq_n_s32(-bits)), vdupq_n_s32(mask));
    };
    return by_four<Line>(one, x);
}
inline Line l_or(Line x, Line y) { return by_four<Line>(vorrq_s32, x, y); }
// table [16] at each byte, of which none is above 15.
inline Line l_lookup(Line x, const std::uint8_t* table) {
    const uint8x16_t all = vld1q_u8(table);
    const auto one = [&](int32x4_t w) { return vreinterpretq_s32_u8(vqtbl1q_u8(all, vreinterpretq_u8_s32(w))); };
    return by_four<Line>(one, x);
}
// Byte b of each row, unsigned or signed.
inline F f_byte_at(Line x, int b) { return f_from(l_right(x, 8 * b, 255)); }
inline F f_signed_byte_at(Line x, int b) {
    const auto one = [](int32x4_t w) { return vshrq_n_s32(w, 24); };
    return f_from(by_four<I>(one, l_left(x, 24 - 8 * b, -1)));
}
template <int b>
inline F f_byte(Line x) {
    return f_byte_at(x, b);
}
inline F f_bits(Line x) { return by_four<F>(vreinterpretq_f32_s32, x); }
inline F f_bf16_even(Line x) { return f_bits(l_left(x, 16, -1)); }
inline F f_bf16_odd(Line x) { return f_bits(l_right(x, 0, -65536)); }

// Magnitudes as integers. They are ordered as the floats' magnitudes are, and NaN is above all others.
inline I i_magnitude(F x) {
    const auto one = [](float32x4_t a) { return vandq_s32(vreinterpretq_s32_f32(a), vdupq_n_s32(0x7fffffff)); };
    return by_four<I>(one, x);
}
inline I i_add(I x, I y) { return by_four<I>(vaddq_s32, x, y); }
inline I i_max(I x, I y) { return by_four<I>(vmaxq_s32, x, y); }
inline std::int32_t i_max_of(I x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d))); }
inline std::int32_t i_sum(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }
// To the nearest integers, ties to even; all within ±127. NaN, of damaged weights, gives 0.
inline I i_round(F x) { return by_four<I>(vcvtnq_s32_f32, x); }
inline void i_store_bytes(std::int8_t* to, I x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b));
    const int16x8_t high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline I i_set(std::int32_t x) {
    const int32x4_t all = vdupq_n_s32(x);
    return {all, all, all, all};
}
constexpr bool kAddsPairs = false, kCentres = false;  // dots_avx2.h has these
I i_dot_pairs(I pairs, Line codes, const std::int8_t* four);
I i_of_pairs(I pairs);
template <int n>
void centred_dots(const std::uint8_t* lines, const std::int8_t* fours, I (&to)[n]);
inline I i_zero() { return i_set(0); }
// acc + Σ over the four bytes of each row: signed weights × signed activations. Two products fit into 16 bits: a weight
// is -128 at least, an activation ±127 at most.
inline int32x4_t dot_signed(int32x4_t acc, int32x4_t weights, int8x16_t a) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(acc, vreinterpretq_s8_s32(weights), a);
#else
    const int8x16_t w = vreinterpretq_s8_s32(weights);
    return vpadalq_s16(acc, vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a)), vmull_high_s8(w, a)));
#endif
}
// acc + Σ over the four bytes of each row: unsigned weights × signed activations. It is exact: nothing saturates.
// `nibbles`: no weight is above 127. Others are taken 128 too small, and 128 times the activations is added.
template <bool nibbles>
inline I i_dot(I acc, Line weights, const std::int8_t* four) {
    std::int32_t bits;
    __builtin_memcpy(&bits, four, 4);
    const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(bits));
#if defined(__ARM_FEATURE_MATMUL_INT8)
    const auto one = [&](int32x4_t sum, int32x4_t w) { return vusdotq_s32(sum, vreinterpretq_u8_s32(w), a); };
#else
    const int32x4_t lacking = nibbles ? vdupq_n_s32(0) : vshlq_n_s32(vpaddlq_s16(vpaddlq_s8(a)), 7);
    const auto one = [&](int32x4_t sum, int32x4_t w) {
        if constexpr (nibbles) return dot_signed(sum, w, a);
        const int32x4_t top = vdupq_n_s32(std::int32_t(0x80808080U));
        return dot_signed(vaddq_s32(sum, lacking), veorq_s32(w, top), a);
    };
#endif
    return by_four<I>(one, acc, weights);
}

inline I i_load(const std::int32_t* p) { return line(p); }
inline void i_store(std::int32_t* p, I x) {
    vst1q_s32(p, x.a), vst1q_s32(p + 4, x.b);
    vst1q_s32(p + 8, x.c), vst1q_s32(p + 12, x.d);
}
// acc + the low 16 bits of each word times one number, + the high 16 bits times another. No word is negative.
inline I i_dot_twos(I acc, Line words, std::int32_t first, std::int32_t second) {
    const auto one = [&](int32x4_t sum, int32x4_t w) {
        const int32x4_t low = vandq_s32(w, vdupq_n_s32(0xffff)), high = vshrq_n_s32(w, 16);
        return vmlaq_n_s32(vmlaq_n_s32(sum, low, first), high, second);
    };
    return by_four<I>(one, acc, words);
}
// Numbers of 16 bits, those of `high` above those of `low`.
inline I i_words(I low, I high) {
    return by_four<I>([](int32x4_t a, int32x4_t b) { return vsliq_n_s32(a, b, 16); }, low, high);
}

// Numbers within ±127: lane i of the 16 is the four vectors' lanes i, as bytes.
inline void i_store_fours(std::int32_t* to, I a, I b, I c, I d) {
    const auto one = [](int32x4_t first, int32x4_t second, int32x4_t third, int32x4_t fourth) {
        return vsliq_n_s32(vsliq_n_s32(vsliq_n_s32(first, second, 8), third, 16), fourth, 24);
    };
    const I fours = by_four<I>(one, a, b, c, d);
    vst1q_s32(to, fours.a), vst1q_s32(to + 4, fours.b);
    vst1q_s32(to + 8, fours.c), vst1q_s32(to + 12, fours.d);
}

}  // namespace penstock::PENSTOCK_ISA

#include "quad-line-inl.h"

namespace penstock::PENSTOCK_ISA {

// 16 bytes of four rows side by side.
inline Line fours_of(const std::uint8_t* const* rows) {
    const uint8x16_t r0 = vld1q_u8(rows[0]), r1 = vld1q_u8(rows[1]), r2 = vld1q_u8(rows[2]), r3 = vld1q_u8(rows[3]);
    const auto words = [](uint8x16_t bytes) { return vreinterpretq_u16_u8(bytes); };
    const uint16x8_t first = words(vzip1q_u8(r0, r1)), second = words(vzip2q_u8(r0, r1));
    const uint16x8_t third = words(vzip1q_u8(r2, r3)), fourth = words(vzip2q_u8(r2, r3));
    return {vreinterpretq_s32_u16(vzip1q_u16(first, third)), vreinterpretq_s32_u16(vzip2q_u16(first, third)),
            vreinterpretq_s32_u16(vzip1q_u16(second, fourth)), vreinterpretq_s32_u16(vzip2q_u16(second, fourth))};
}
[[gnu::always_inline]] inline Quads quads_of(const std::uint8_t* const* rows) {
    const Line both = fours_of(rows);
    return {low_nibbles(both), high_nibbles(both)};
}

}  // namespace penstock::PENSTOCK_ISA
