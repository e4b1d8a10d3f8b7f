// 16 lanes as two AVX2 registers (with FMA and F16C).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock::PENSTOCK_ISA {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
using Line = I;

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
inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F f_half(const void* p) {
    const auto* h = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
inline F f_from(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
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

inline Line line(const void* p) {
    const auto* v = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
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
inline F f_bf16_even(Line x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
inline F f_bf16_odd(Line x) {
    const __m256i mask = _mm256_set1_epi32(-65536);
    return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}

inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I i_add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
// In 16 bits by even and odd bytes: maddubs would saturate at 255 · 127 · 2.
inline __m256i dot8(__m256i acc, __m256i weights, __m256i even, __m256i odd) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)), even));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), odd));
}
inline I i_dot(I acc, Line weights, const std::int8_t* four) {
    std::int32_t bits;
    __builtin_memcpy(&bits, four, 4);
    const __m256i a = _mm256_set1_epi32(bits);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd = _mm256_srai_epi16(a, 8);
    return {dot8(acc.a, weights.a, even, odd), dot8(acc.b, weights.b, even, odd)};
}

}  // namespace penstock::PENSTOCK_ISA
