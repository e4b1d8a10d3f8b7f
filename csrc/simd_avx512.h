// 16 lanes as one AVX-512 register (F, BW, VL, DQ). Dot products are by VNNI where the build has it.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace penstock::PENSTOCK_ISA {

using F = __m512;
using I = __m512i;
using Line = __m512i;  // 64 bytes of a tile: 16 rows × 4 bytes

// kFewRows: the most rows of activations that one tile is multiplied with at once. kWideRows, kWideTiles: rows and
// tiles at once where there are many rows. Eight chains of int8 products and eight sums fit into the 32 registers. So
// do 6 × 2 of each, which need one broadcast for two products.
constexpr int kFewRows = 8, kWideRows = 6, kWideTiles = 2;
constexpr bool kHasUnit = true;        // many rows may go through a unit of their own (amx)
constexpr bool kUnpacksBlocks = true;  // products of many rows with weights in blocks go through blocks-many-inl.h

inline F f_zero() { return _mm512_setzero_ps(); }
inline F f_set(float x) { return _mm512_set1_ps(x); }
inline F f_load(const void* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
// One float16 in all lanes.
inline F f_half_of(const void* p) {
    std::int16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
}
inline F f_from(I x) { return _mm512_cvtepi32_ps(x); }
// Where one operand is NaN, the result is the second operand.
inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
inline F f_abs(F x) { return _mm512_abs_ps(x); }
// The magnitude of x with the sign of y.
inline F f_with_sign(F x, F y) {
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x7fffffff), _mm512_castps_si512(x), _mm512_castps_si512(y), 0xca));
}
inline float f_max_of(F x) { return _mm512_reduce_max_ps(x); }
// y, but 0 where x is below `limit`.
inline F f_unless_below(F x, float limit, F y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), y);
}
// 2^n of integers -126 … 127.
inline F f_power(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// y · 2^n of integers -126 … 127; below that it may be anything.
inline F f_scaled(F y, F n) { return _mm512_scalef_ps(y, n); }
// The nearest whole numbers, ties to even.
inline F f_whole(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Lane i: the lanes of v[i], added at distances 8, 4, 2, 1. Where a blend does, there is no shuffle: ports for shuffles
// are few.
inline F f_sums(const F (&v)[16]) {
    F w[8];
    for (int i = 0; i < 8; ++i) {
        w[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, v[i], v[i + 8]), _mm512_shuffle_f32x4(v[i], v[i + 8], 0x4e));
    }
    for (int i = 0; i < 4; ++i) {
        const F crossed = _mm512_mask_blend_ps(0xf0f0, w[i + 4], w[i]);
        w[i] =
            _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, w[i], w[i + 4]), _mm512_shuffle_f32x4(crossed, crossed, 0xb1));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(w[i]), b = _mm512_castps_pd(w[i + 2]);
        w[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, w[i], w[i + 2]),
                             _mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0x55)));
    }
    const F crossed = _mm512_mask_blend_ps(0xaaaa, w[1], w[0]);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, w[0], w[1]), _mm512_permute_ps(crossed, 0xb1));
}
inline float f_sum(F x) { return _mm512_reduce_add_ps(x); }
inline void f_store_half(void* p, F x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// 16 bfloat16 in a row.
inline F f_bf16(const void* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16));
}

// 16 unsigned bytes.
inline F f_bytes(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
// The low nibbles and the high nibbles of 16 bytes, each times scale plus minimum, looked up in a table of the 16
// values.
inline void f_nibbles(const void* p, F scale, F minimum, F& low, F& high) {
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    const F codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
            table = f_fma(codes, scale, minimum);
    low = _mm512_permutexvar_ps(both, table);  // it reads only the low four bits of an index
    high = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table);
}

// One register, which is the whole of F here.
using H = F;
constexpr int kLanes = 16, kRegisters = 32;

inline H h_zero() { return f_zero(); }
inline H h_set(float x) { return f_set(x); }
inline H h_load(const float* p) { return f_load(p); }
// x in a register: else GCC may load it once for each product.
inline H h_keep(H x) {
    asm("" : "+v"(x));
    return x;
}
inline void h_store(float* p, H x) { f_store(p, x); }
inline H h_mul(H x, H y) { return f_mul(x, y); }
inline H h_fma(H x, H y, H z) { return f_fma(x, y, z); }
inline H h_half(const void* p) { return f_half(p); }
inline H h_bf16(const void* p) { return f_bf16(p); }
inline H h_bytes(const void* p) { return f_bytes(p); }
inline void h_nibbles(const void* p, H scale, H minimum, H& low, H& high) { f_nibbles(p, scale, minimum, low, high); }

inline Line line(const void* p) { return _mm512_loadu_si512(p); }
inline void l_store(void* p, Line x) { _mm512_store_si512(p, x); }  // p: a multiple of 64
// x, of which the compiler does not know that it is still the same.
inline Line l_keep(Line x) {
    asm("" : "+v"(x));
    return x;
}
inline Line low_nibbles(Line x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Line high_nibbles(Line x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
// f_byte: byte b of each row as a float. f_bf16_even, f_bf16_odd: the first and second of each row's two bfloat16.
template <int b>
inline F f_byte(Line x) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x, 8 * b), _mm512_set1_epi32(255)));
}
inline F f_bits(Line x) { return _mm512_castsi512_ps(x); }
inline F f_bf16_even(Line x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline F f_bf16_odd(Line x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536))); }

// Bits of each row's word: shifted, and where the mask has them; a | b.
inline Line l_right(Line x, int bits, std::int32_t mask) {
    return _mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(bits)), _mm512_set1_epi32(mask));
}
// With copies of the sign for what comes in.
inline Line l_right_signed(Line x, int bits, std::int32_t mask) {
    return _mm512_and_si512(_mm512_sra_epi32(x, _mm_cvtsi32_si128(bits)), _mm512_set1_epi32(mask));
}
inline Line l_left(Line x, int bits, std::int32_t mask) {
    return _mm512_and_si512(_mm512_sll_epi32(x, _mm_cvtsi32_si128(bits)), _mm512_set1_epi32(mask));
}
inline Line l_or(Line x, Line y) { return _mm512_or_si512(x, y); }
// table [16] at each byte, of which none is above 15.
inline Line l_lookup(Line x, const std::uint8_t* table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), x);
}
// Byte b of each row, unsigned or signed.
constexpr bool kLooksUpWords = true;
// Of each 16 bits the number of `table` [128] that the lower seven bits say. table: a multiple of 64.
inline Line l_words_of(Line x, const std::uint16_t* table) {
    const auto part = [table](int i) { return _mm512_load_si512(table + 32 * i); };
    const Line low = _mm512_permutex2var_epi16(part(0), x, part(1)),
               high = _mm512_permutex2var_epi16(part(2), x, part(3));
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(x, _mm512_set1_epi16(64)), low, high);
}
inline F f_byte_at(Line x, int b) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(8 * b)), _mm512_set1_epi32(255)));
}
inline F f_signed_byte_at(Line x, int b) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sll_epi32(x, _mm_cvtsi32_si128(24 - 8 * b)), 24));
}

// Magnitudes as integers. They are ordered as the floats' magnitudes are, and NaN is above all others.
inline I i_magnitude(F x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }
inline I i_max(I a, I b) { return _mm512_max_epi32(a, b); }
inline std::int32_t i_max_of(I x) { return _mm512_reduce_max_epi32(x); }
inline std::int32_t i_sum(I x) { return _mm512_reduce_add_epi32(x); }
// Rounds to the nearest integers, ties to even. Numbers are within ±127.
inline I i_round(F x) { return _mm512_cvtps_epi32(x); }
inline void i_store_bytes(std::int8_t* to, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}

constexpr bool kAddsPairs = false, kCentres = false;  // dots_avx2.h has these
I i_dot_pairs(I pairs, Line codes, const std::int8_t* four);
I i_of_pairs(I pairs);
template <int n>
void centred_dots(const std::uint8_t* lines, const std::int8_t* fours, I (&to)[n]);
inline I i_zero() { return _mm512_setzero_si512(); }
inline I i_set(std::int32_t x) { return _mm512_set1_epi32(x); }
inline I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
struct Four {
    std::int8_t bytes[4];
};
// acc + Σ over the four bytes of each row: unsigned weights × signed activations. It is exact: nothing saturates.
// `nibbles`: all weights are below 128.
template <bool nibbles>
inline I i_dot(I acc, Line weights, const std::int8_t* four) {
#ifdef __AVX512VNNI__
    // The product reads and broadcasts the four itself. By intrinsics GCC has an instruction for it, and clang makes
    // the broadcasts of several tiles at once and keeps them on the stack: 8 rows took twice as long.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*reinterpret_cast<const Four*>(four)));
    return acc;
#else
    std::int32_t bits;
    __builtin_memcpy(&bits, four, 4);
    const __m512i a = _mm512_set1_epi32(bits);
    const __m512i bytes = _mm512_set1_epi16(255);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8), odd = _mm512_srai_epi16(a, 8);
    acc = _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_and_si512(weights, bytes), even));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), odd));
#endif
}

// Numbers within ±127: lane i of the 16 is the four vectors' lanes i, as bytes.
inline void i_store_fours(std::int32_t* to, I a, I b, I c, I d) {
    const __m512i low = _mm512_set1_epi32(255);
    const __m512i ab = _mm512_or_si512(_mm512_and_si512(a, low), _mm512_slli_epi32(_mm512_and_si512(b, low), 8));
    const __m512i cd = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(c, low), 16), _mm512_slli_epi32(d, 24));
    _mm512_storeu_si512(to, _mm512_or_si512(ab, cd));
}

// 16 bytes of each of 16 rows, from `byte` on, as four lines: lane i of line j has bytes 4 j … + 3 of row i.
inline void turned(const std::uint8_t* const* rows, std::size_t byte, Line (&to)[4]) {
    const auto part = [=](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + byte)); };
    __m512i x[4];
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_inserti32x4(_mm512_castsi128_si512(part(i)), part(4 + i), 1);
        x[i] = _mm512_inserti32x4(_mm512_inserti32x4(x[i], part(8 + i), 2), part(12 + i), 3);
    }
    const __m512i first = _mm512_unpacklo_epi32(x[0], x[1]), second = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i third = _mm512_unpacklo_epi32(x[2], x[3]), fourth = _mm512_unpackhi_epi32(x[2], x[3]);
    to[0] = _mm512_unpacklo_epi64(first, third), to[1] = _mm512_unpackhi_epi64(first, third);
    to[2] = _mm512_unpacklo_epi64(second, fourth), to[3] = _mm512_unpackhi_epi64(second, fourth);
}

// Codes of four rows of nibbles, as they lie: 64 bytes of each row, which are 4 times 16 columns in low nibbles and the
// next 16 in high ones. Line j has in 128 bits L the four rows' bytes 16 L + 4 j … + 3, side by side.
constexpr int kQuadLines = 4;
struct Quads {
    Line both[kQuadLines];
};
[[gnu::always_inline]] inline Quads quads_of(const std::uint8_t* const* rows) {
    __m512i row[4];
    for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_si512(rows[i]);
    const __m512i first = _mm512_unpacklo_epi8(row[0], row[1]), second = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i third = _mm512_unpacklo_epi8(row[2], row[3]), fourth = _mm512_unpackhi_epi8(row[2], row[3]);
    return {{_mm512_unpacklo_epi16(first, third), _mm512_unpackhi_epi16(first, third),
             _mm512_unpacklo_epi16(second, fourth), _mm512_unpackhi_epi16(second, fourth)}};
}
// Which of 16 groups' factors each of the 4 times 32 columns takes.
struct QuadGroups {
    __m512i at;
    explicit QuadGroups(const int* group)
        : at(_mm512_permutexvar_epi32(
              _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
              _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group))))) {}
};
// acc + Σ over the four bytes of each lane: unsigned weights × signed factors.
inline __m512i dot_lanes(__m512i acc, __m512i weights, __m512i factors) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(acc, weights, factors);
#else
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(factors, 8), 8), odd = _mm512_srai_epi16(factors, 8);
    acc = _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_and_si512(weights, _mm512_set1_epi16(255)), even));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), odd));
#endif
}
// Sums of codes times factors: of whole bytes, and of their high nibbles where they stand, which is 16 times as much.
struct QuadSums {
    I whole[kQuadLines], high[kQuadLines];
    void clear() {
        for (int j = 0; j < kQuadLines; ++j) whole[j] = high[j] = i_zero();
    }
    // fours: of each of the 16 groups, the factors of the four rows.
    [[gnu::always_inline]] void add(const Quads& quads, const QuadGroups& groups, const std::int32_t* fours) {
        const __m512i factors = _mm512_permutexvar_epi32(groups.at, _mm512_loadu_si512(fours));
        const __m512i top = _mm512_set1_epi8(static_cast<char>(0xf0));
        for (int j = 0; j < kQuadLines; ++j) {
            whole[j] = dot_lanes(whole[j], quads.both[j], factors);
            high[j] = dot_lanes(high[j], _mm512_and_si512(quads.both[j], top), factors);
        }
    }
    // x[L] = the four registers' bits L of 128, one after the other.
    static void turn(I (&x)[kQuadLines]) {
        const I a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
        const I c = _mm512_shuffle_i32x4(x[2], x[3], 0x44), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
        x[0] = _mm512_shuffle_i32x4(a, c, 0x88), x[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
        x[2] = _mm512_shuffle_i32x4(b, d, 0x88), x[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    // to[k]: the sums of columns 16 k … + 15.
    void columns(I (&to)[2 * kQuadLines]) const {
        I low[kQuadLines], top[kQuadLines];
        for (int j = 0; j < kQuadLines; ++j) {
            low[j] = _mm512_sub_epi32(whole[j], high[j]), top[j] = _mm512_srai_epi32(high[j], 4);
        }
        turn(low), turn(top);
        for (int j = 0; j < kQuadLines; ++j) to[2 * j] = low[j], to[2 * j + 1] = top[j];
    }
};

}  // namespace penstock::PENSTOCK_ISA
