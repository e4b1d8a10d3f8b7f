// 16 lanes as two AVX2 registers. Needs FMA and F16C too.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace penstock::PENSTOCK_ISA {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
using Line = I;

constexpr int kFewRows = 4, kWideRows = 6, kWideTiles = 1;
constexpr bool kHasUnit = false;
constexpr bool kUnpacksBlocks = true;

inline F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F f_load(const void* p) {
    const auto* f = static_cast<const float*>(p);
    return {_mm256_loadu_ps(f), _mm256_loadu_ps(f + 8)};
}
inline void f_store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F f_half(const void* p) {
    const auto* h = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
// One float16 in all lanes.
inline F f_half_of(const void* p) {
    std::int16_t bits;
    __builtin_memcpy(&bits, p, 2);
    const __m256 all = _mm256_cvtph_ps(_mm_set1_epi16(bits));
    return {all, all};
}
inline F f_from(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
// Where one operand is NaN, the result is the second operand.
inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F f_abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// The magnitude of x with the sign of y.
inline F f_with_sign(F x, F y) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_or_ps(_mm256_andnot_ps(sign, x.a), _mm256_and_ps(sign, y.a)),
            _mm256_or_ps(_mm256_andnot_ps(sign, x.b), _mm256_and_ps(sign, y.b))};
}
inline float f_max_of(F x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    m = _mm256_max_ps(m, _mm256_permute2f128_ps(m, m, 1));
    m = _mm256_max_ps(m, _mm256_shuffle_ps(m, m, 0x4e));
    m = _mm256_max_ps(m, _mm256_shuffle_ps(m, m, 0xb1));
    return _mm256_cvtss_f32(m);
}
// y, but 0 where x is below `limit`.
inline F f_unless_below(F x, float limit, F y) {
    const __m256 least = _mm256_set1_ps(limit);
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, least, _CMP_NLT_UQ), y.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, least, _CMP_NLT_UQ), y.b)};
}
// 2^n of integers -126 … 127.
inline __m256 power8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F f_power(F n) { return {power8(n.a), power8(n.b)}; }
// y · 2^n of integers -126 … 127; below that it may be anything.
inline F f_scaled(F y, F n) { return f_mul(y, f_power(n)); }
// The nearest whole numbers, ties to even.
inline F f_whole(F x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
// Lane i of the result is the sum of the lanes of v[i], added at distances 8, 4, 2, 1. Where a blend does, there is no
// shuffle: ports for shuffles are few.
inline __m256 sums8(const F* v) {
    __m256 w[8];
    for (int i = 0; i < 8; ++i) w[i] = _mm256_add_ps(v[i].a, v[i].b);
    for (int i = 0; i < 4; ++i) {
        w[i] = _mm256_add_ps(_mm256_blend_ps(w[i], w[i + 4], 0xf0), _mm256_permute2f128_ps(w[i], w[i + 4], 0x21));
    }
    for (int i = 0; i < 2; ++i) {
        const __m256d a = _mm256_castps_pd(w[i]), b = _mm256_castps_pd(w[i + 2]);
        w[i] = _mm256_add_ps(_mm256_blend_ps(w[i], w[i + 2], 0xcc), _mm256_castpd_ps(_mm256_shuffle_pd(a, b, 5)));
    }
    const __m256 crossed = _mm256_blend_ps(w[1], w[0], 0xaa);
    return _mm256_add_ps(_mm256_blend_ps(w[0], w[1], 0xaa), _mm256_permute_ps(crossed, 0xb1));
}
inline F f_sums(const F (&v)[16]) { return {sums8(v), sums8(v + 8)}; }
inline float f_sum(F x) {
    float v[8];
    _mm256_storeu_ps(v, _mm256_add_ps(x.a, x.b));
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline void f_store_half(void* p, F x) {
    auto* h = static_cast<__m128i*>(p);
    _mm_storeu_si128(h, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(h + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline F f_bf16(const void* p) {
    const auto* h = static_cast<const __m128i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(h)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(h + 1)), 16))};
}

// 16 unsigned bytes.
inline I i_bytes(const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8)))};
}
inline F f_bytes(const void* p) { return f_from(i_bytes(p)); }
// The low nibbles and the high nibbles of 16 bytes, each times scale plus minimum.
inline void f_nibbles(const void* p, F scale, F minimum, F& low, F& high) {
    const I both = i_bytes(p);
    const __m256i mask = _mm256_set1_epi32(15);
    low = f_fma(f_from({_mm256_and_si256(both.a, mask), _mm256_and_si256(both.b, mask)}), scale, minimum);
    high = f_fma(f_from({_mm256_srli_epi32(both.a, 4), _mm256_srli_epi32(both.b, 4)}), scale, minimum);
}

// One register: kLanes lanes of F. Where a kernel's sums fill the registers, it goes over the halves of F one by one.
using H = __m256;
constexpr int kLanes = 8, kRegisters = 16;

inline H h_zero() { return _mm256_setzero_ps(); }
inline H h_set(float x) { return _mm256_set1_ps(x); }
inline H h_load(const float* p) { return _mm256_loadu_ps(p); }
// x in a register: else GCC may load it once for each product.
inline H h_keep(H x) {
    asm("" : "+x"(x));
    return x;
}
inline void h_store(float* p, H x) { _mm256_storeu_ps(p, x); }
inline H h_mul(H x, H y) { return _mm256_mul_ps(x, y); }
inline H h_fma(H x, H y, H z) { return _mm256_fmadd_ps(x, y, z); }
inline H h_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline H h_bf16(const void* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline __m256i h_codes(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))); }
inline H h_bytes(const void* p) { return _mm256_cvtepi32_ps(h_codes(p)); }
inline void h_nibbles(const void* p, H scale, H minimum, H& low, H& high) {
    const __m256i both = h_codes(p);
    low = h_fma(_mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15))), scale, minimum);
    high = h_fma(_mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4)), scale, minimum);
}

inline Line line(const void* p) {
    const auto* v = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
inline void l_store(void* p, Line x) {  // p: a multiple of 32
    _mm256_store_si256(static_cast<__m256i*>(p), x.a);
    _mm256_store_si256(static_cast<__m256i*>(p) + 1, x.b);
}
// x, of which the compiler does not know that it is still the same.
inline Line l_keep(Line x) {
    asm("" : "+x"(x.a), "+x"(x.b));
    return x;
}
inline __m256i low4(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Line low_nibbles(Line x) { return {low4(x.a), low4(x.b)}; }
inline Line high_nibbles(Line x) { return {low4(_mm256_srli_epi16(x.a, 4)), low4(_mm256_srli_epi16(x.b, 4))}; }
template <int b>
inline F f_byte(Line x) {
    const __m256i mask = _mm256_set1_epi32(255);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * b), mask)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.b, 8 * b), mask))};
}
inline F f_bits(const Line& x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline F f_bf16_even(Line x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
inline F f_bf16_odd(Line x) {
    const __m256i mask = _mm256_set1_epi32(-65536);
    return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}

// Bits of each row's word: shifted, and where the mask has them; a | b.
inline Line l_right(Line x, int bits, std::int32_t mask) {
    const __m128i by = _mm_cvtsi32_si128(bits);
    const __m256i kept = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(_mm256_srl_epi32(x.a, by), kept), _mm256_and_si256(_mm256_srl_epi32(x.b, by), kept)};
}
// With copies of the sign for what comes in.
inline Line l_right_signed(Line x, int bits, std::int32_t mask) {
    const __m128i by = _mm_cvtsi32_si128(bits);
    const __m256i kept = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(_mm256_sra_epi32(x.a, by), kept), _mm256_and_si256(_mm256_sra_epi32(x.b, by), kept)};
}
inline Line l_left(Line x, int bits, std::int32_t mask) {
    const __m128i by = _mm_cvtsi32_si128(bits);
    const __m256i kept = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(_mm256_sll_epi32(x.a, by), kept), _mm256_and_si256(_mm256_sll_epi32(x.b, by), kept)};
}
inline Line l_or(Line x, Line y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
// table [16] at each byte, of which none is above 15.
inline Line l_lookup(Line x, const std::uint8_t* table) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(all, x.a), _mm256_shuffle_epi8(all, x.b)};
}
// Byte b of each row, unsigned or signed.
constexpr bool kLooksUpWords = false;
inline F f_byte_at(Line x, int b) {
    const Line bytes = l_right(x, 8 * b, 255);
    return {_mm256_cvtepi32_ps(bytes.a), _mm256_cvtepi32_ps(bytes.b)};
}
inline F f_signed_byte_at(Line x, int b) {
    const Line high = l_left(x, 24 - 8 * b, -1);
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(high.a, 24)), _mm256_cvtepi32_ps(_mm256_srai_epi32(high.b, 24))};
}

// Magnitudes as integers. They are ordered as the floats' magnitudes are, and NaN is above all others.
inline I i_magnitude(F x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
inline I i_max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline std::int32_t i_max_of(I x) {
    __m256i m = _mm256_max_epi32(x.a, x.b);
    m = _mm256_max_epi32(m, _mm256_permute2x128_si256(m, m, 1));
    m = _mm256_max_epi32(m, _mm256_shuffle_epi32(m, 0x4e));
    m = _mm256_max_epi32(m, _mm256_shuffle_epi32(m, 0xb1));
    return _mm256_cvtsi256_si32(m);
}
inline std::int32_t i_sum(I x) {
    __m256i s = _mm256_add_epi32(x.a, x.b);
    s = _mm256_add_epi32(s, _mm256_permute2x128_si256(s, s, 1));
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4e));
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0xb1));
    return _mm256_cvtsi256_si32(s);
}
// To the nearest integers, ties to even; all within ±127.
inline I i_round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void i_store_bytes(std::int8_t* to, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I i_set(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I i_add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }

}  // namespace penstock::PENSTOCK_ISA

#include "dots_avx2.h"
