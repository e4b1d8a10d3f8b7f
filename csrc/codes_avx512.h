// Products of the KV cache's codes with numbers of 16 bits, as AVX-512 registers: what attention-codes-inl.h wants.
// Included after simd_avx512.h.
#pragma once

namespace penstock::PENSTOCK_ISA {

// `kWideBytes` bytes of a row are multiplied with weights at once, as kWideLines lines. kMostSums: registers' worth of
// sums that a tile of these products has. kCodeQueries: queries that share codes in registers, of keys.
constexpr int kWideBytes = 64, kWideLines = kWideBytes / 16, kMostSums = 16, kKeyLines = 2, kCodeQueries = 4;

// Two numbers of 16 bits, as each lane wants them.
using Pair = __m512i;
constexpr int kPairLanes = 16;
inline Pair pair_at(const std::int32_t* p) { return _mm512_loadu_si512(p); }

inline I i_load(const std::int32_t* p) { return _mm512_loadu_si512(p); }
inline void i_store(std::int32_t* p, I x) { _mm512_storeu_si512(p, x); }

// Of each 16 bits those from `shift` on that `mask` has.
template <int shift, int mask>
inline Line l_words(Line x) {
    if constexpr (shift > 0) x = _mm512_srli_epi16(x, shift);
    if constexpr (mask << shift >= 0x8000) return x;
    return _mm512_and_si512(x, _mm512_set1_epi16(mask));
}
// acc + Σ over the two words of each lane: word · number.
inline I i_dot_words(I acc, Line words, Pair two) {
#ifdef __AVX512VNNI__
    // Else GCC copies sums from register to register between products.
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(words), "v"(two));
    return acc;
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(words, two));
#endif
}
// Four numbers of 8 bits, as each lane wants them. acc + Σ over the four bytes of each lane: nibble · number, of
// kUnitSteps products at most; i_of_nibbles makes sums of 32 bits of it. 8 products of two times 15 · 127 fit into 16
// bits.
using FourBytes = __m512i;
inline FourBytes four_bytes_at(const std::int32_t* p) { return _mm512_loadu_si512(p); }
inline I i_dot_nibbles(I acc, Line nibbles, FourBytes four) {
#ifdef __AVX512VNNI__
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(nibbles), "v"(four));
    return acc;
#else
    return _mm512_add_epi16(acc, _mm512_maddubs_epi16(nibbles, four));
#endif
}
inline I i_of_nibbles(I acc) {
#ifdef __AVX512VNNI__
    return acc;
#else
    return _mm512_madd_epi16(acc, _mm512_set1_epi16(1));
#endif
}
// The two numbers of the columns of kWideBytes bytes, whose four units of 16 bytes are in one group, in two of two
// units each, or anyhow (`parts`). Those of unit k lie `further[k]` further than p.
template <int parts>
inline Pair pairs_of(const std::int32_t* p, const int* further) {
    __m512i all = _mm512_set1_epi32(p[0]);
    if constexpr (parts == 2) all = _mm512_mask_set1_epi32(all, 0xff00, p[further[2]]);
    if constexpr (parts == 4) {
        all = _mm512_mask_set1_epi32(all, 0x00f0, p[further[1]]);
        all = _mm512_mask_set1_epi32(all, 0x0f00, p[further[2]]);
        all = _mm512_mask_set1_epi32(all, 0xf000, p[further[3]]);
    }
    return all;
}
// The same for floats.
template <int parts>
inline F f_units(const float* p, const int* further) {
    return _mm512_castsi512_ps(pairs_of<parts>(reinterpret_cast<const std::int32_t*>(p), further));
}
// Numbers of 16 bits, those of `high` above those of `low`.
inline I i_words(I low, I high) { return _mm512_mask_blend_epi16(0xaaaaaaaaU, low, _mm512_slli_epi32(high, 16)); }

// kWideBytes bytes of 16 / kWideLines keys: lane 4 k + i of to[j] has bytes 16 k + 4 j … + 3 of row i.
inline void key_lines(const std::uint8_t* row, std::size_t row_bytes, Line (&to)[4]) {
    __m512i rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = _mm512_loadu_si512(row + std::size_t(i) * row_bytes);
    const __m512i first = _mm512_unpacklo_epi32(rows[0], rows[1]), second = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i third = _mm512_unpacklo_epi32(rows[2], rows[3]), fourth = _mm512_unpackhi_epi32(rows[2], rows[3]);
    to[0] = _mm512_unpacklo_epi64(first, third), to[1] = _mm512_unpackhi_epi64(first, third);
    to[2] = _mm512_unpacklo_epi64(second, fourth), to[3] = _mm512_unpackhi_epi64(second, fourth);
}

// Four rows' bytes side by side: lines first … first + n - 1 of kWideBytes bytes from rows[0 … 3] on. `wide_columns`
// says which columns the lanes of all lines are.
template <int first, int n>
inline void wide_lines(const std::uint8_t* row, std::size_t row_bytes, Line (&to)[n]) {
    __m512i rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = _mm512_loadu_si512(row + std::size_t(i) * row_bytes);
    for (int j = 0; j < n; ++j) {
        const bool high = (first + j) / 2 != 0;
        const __m512i a = high ? _mm512_unpackhi_epi8(rows[0], rows[1]) : _mm512_unpacklo_epi8(rows[0], rows[1]);
        const __m512i b = high ? _mm512_unpackhi_epi8(rows[2], rows[3]) : _mm512_unpacklo_epi8(rows[2], rows[3]);
        to[j] = (first + j) % 2 != 0 ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b);
    }
}
// Lane 4 k + i of x[j] becomes lane 4 j + i of x[k]. So sums of lines of values become those of bytes 16 k … 16 k + 15,
// and sums of lines of keys those of 16 keys and the unit k.
inline void wide_columns(I (&x)[kWideLines]) {
    const I a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
    const I c = _mm512_shuffle_i32x4(x[2], x[3], 0x44), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_i32x4(a, c, 0x88), x[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    x[2] = _mm512_shuffle_i32x4(b, d, 0x88), x[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}
// Lanes of `even` and `odd` in turns: the first 16 of them, and the last 16.
inline void i_zip(I& even, I& odd) {
    const I low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const I first = _mm512_permutex2var_epi32(even, low, odd);
    odd = _mm512_permutex2var_epi32(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd), even = first;
}

}  // namespace penstock::PENSTOCK_ISA
