// Products of the KV cache's codes with numbers of 16 bits, as AVX2 registers: what attention-codes-inl.h wants.
// Included after simd_avx2.h.
#pragma once

namespace penstock::PENSTOCK_ISA {

// As in codes_avx512.h.
constexpr int kWideBytes = 32, kWideLines = kWideBytes / 16, kMostSums = 4, kKeyLines = 1, kCodeQueries = 4;

using Pair = __m256i;
constexpr int kPairLanes = 8;
inline Pair pair_at(const std::int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline I i_load(const std::int32_t* p) { return line(p); }
inline void i_store(std::int32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, x.b);
}

// Of each 16 bits those from `shift` on that `mask` has.
template <int shift, int mask>
inline __m256i words16(__m256i x) {
    if constexpr (shift > 0) x = _mm256_srli_epi16(x, shift);
    if constexpr (mask << shift >= 0x8000) return x;
    return _mm256_and_si256(x, _mm256_set1_epi16(mask));
}
template <int shift, int mask>
inline Line l_words(Line x) {
    return {words16<shift, mask>(x.a), words16<shift, mask>(x.b)};
}
// acc + Σ over the two words of each lane: word · number.
inline __m256i dot_words8(__m256i acc, __m256i words, __m256i two) {
#ifdef __AVXVNNI__
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(words), "x"(two));
    return acc;
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(words, two));
#endif
}
inline I i_dot_words(I acc, Line words, Pair two) {
    return {dot_words8(acc.a, words.a, two), dot_words8(acc.b, words.b, two)};
}
// As in codes_avx512.h.
using FourBytes = __m256i;
inline FourBytes four_bytes_at(const std::int32_t* p) { return pair_at(p); }
inline __m256i dot_nibbles8(__m256i acc, __m256i nibbles, __m256i four) {
#ifdef __AVXVNNI__
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(nibbles), "x"(four));
    return acc;
#else
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(nibbles, four));
#endif
}
inline I i_dot_nibbles(I acc, Line nibbles, FourBytes four) {
    return {dot_nibbles8(acc.a, nibbles.a, four), dot_nibbles8(acc.b, nibbles.b, four)};
}
inline I i_of_nibbles(I acc) {
#ifdef __AVXVNNI__
    return acc;
#else
    return i_of_pairs(acc);
#endif
}
// The two numbers of the columns of kWideBytes bytes, whose two units of 16 bytes are in one group or in two (`parts`).
// Those of unit k lie `further[k]` further than p.
template <int parts>
inline Pair pairs_of(const std::int32_t* p, const int* further) {
    const __m256i all = _mm256_set1_epi32(p[0]);
    if constexpr (parts == 1) return all;
    return _mm256_blend_epi32(all, _mm256_set1_epi32(p[further[1]]), 0xf0);
}
// The same for floats.
template <int parts>
inline F f_units(const float* p, const int* further) {
    const __m256 x = _mm256_castsi256_ps(pairs_of<parts>(reinterpret_cast<const std::int32_t*>(p), further));
    return {x, x};
}
// Numbers of 16 bits, those of `high` above those of `low`.
inline I i_words(I low, I high) {
    return {_mm256_blend_epi16(low.a, _mm256_slli_epi32(high.a, 16), 0xaa),
            _mm256_blend_epi16(low.b, _mm256_slli_epi32(high.b, 16), 0xaa)};
}

// kWideBytes bytes of four keys: register j has in lane 4 k + i bytes 16 k + 4 j … + 3 of row i.
inline void key_lines4(const std::uint8_t* row, std::size_t row_bytes, __m256i (&to)[4]) {
    __m256i rows[4];
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + std::size_t(i) * row_bytes));
    }
    const __m256i first = _mm256_unpacklo_epi32(rows[0], rows[1]), second = _mm256_unpackhi_epi32(rows[0], rows[1]);
    const __m256i third = _mm256_unpacklo_epi32(rows[2], rows[3]), fourth = _mm256_unpackhi_epi32(rows[2], rows[3]);
    to[0] = _mm256_unpacklo_epi64(first, third), to[1] = _mm256_unpackhi_epi64(first, third);
    to[2] = _mm256_unpacklo_epi64(second, fourth), to[3] = _mm256_unpackhi_epi64(second, fourth);
}
// Of 16 / kWideLines keys: the first four's registers, then the others'.
inline void key_lines(const std::uint8_t* row, std::size_t row_bytes, Line (&to)[4]) {
    __m256i low[4], high[4];
    key_lines4(row, row_bytes, low), key_lines4(row + 4 * row_bytes, row_bytes, high);
    for (int j = 0; j < 4; ++j) to[j] = {low[j], high[j]};
}

// Four rows' bytes side by side: lines first … first + n - 1 of kWideBytes bytes from rows[0 … 3] on. `wide_columns`
// says which columns the lanes of all lines are.
template <int first, int n>
inline void wide_lines(const std::uint8_t* row, std::size_t row_bytes, Line (&to)[n]) {
    __m256i rows[4];
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + std::size_t(i) * row_bytes));
    }
    for (int j = 0; j < n; ++j) {
        const bool high = first + j != 0;
        const __m256i a = high ? _mm256_unpackhi_epi8(rows[0], rows[1]) : _mm256_unpacklo_epi8(rows[0], rows[1]);
        const __m256i b = high ? _mm256_unpackhi_epi8(rows[2], rows[3]) : _mm256_unpacklo_epi8(rows[2], rows[3]);
        to[j] = {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
    }
}
// As in codes_avx512.h, of the four registers of both.
inline void wide_columns(I (&x)[kWideLines]) {
    const I first = {_mm256_permute2x128_si256(x[0].a, x[0].b, 0x20), _mm256_permute2x128_si256(x[1].a, x[1].b, 0x20)};
    x[1] = {_mm256_permute2x128_si256(x[0].a, x[0].b, 0x31), _mm256_permute2x128_si256(x[1].a, x[1].b, 0x31)};
    x[0] = first;
}
// As in codes_avx512.h.
inline void zip8(__m256i& even, __m256i& odd) {
    const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
    even = _mm256_permute2x128_si256(low, high, 0x20), odd = _mm256_permute2x128_si256(low, high, 0x31);
}
inline void i_zip(I& even, I& odd) {
    zip8(even.a, odd.a), zip8(even.b, odd.b);
    const __m256i second = even.b;
    even.b = odd.a, odd.a = second;
}

}  // namespace penstock::PENSTOCK_ISA
