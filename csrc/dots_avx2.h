// Products of unsigned codes with signed bytes, and how bytes of several rows come side by side for them, as AVX2
// registers. The end of simd_avx2.h.
#pragma once

namespace penstock::PENSTOCK_ISA {

// acc + Σ over the four bytes of each row: unsigned weights × signed activations. With `nibbles` all weights are below
// 128, so two products fit into 16 bits: 127 · 127 · 2 does. Otherwise maddubs would saturate, since products reach 255
// · 127 · 2. So even and odd bytes are multiplied apart.
template <bool nibbles>
inline __m256i dot8(__m256i acc, __m256i weights, __m256i a) {
#ifdef __AVXVNNI__
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(weights), "x"(a));
    return acc;
#else
    if constexpr (nibbles) {
        return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, a), _mm256_set1_epi16(1)));
    } else {
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd = _mm256_srai_epi16(a, 8);
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)), even));
        return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), odd));
    }
#endif
}
// Sums of two products each, in 16 bits, of codes below 128. Several are added before i_of_pairs makes 32-bit sums of
// them, so that one multiplication does for several dot products. kAddsPairs: whether that is quicker than i_dot.
#ifdef __AVXVNNI__
constexpr bool kAddsPairs = false;
#else
constexpr bool kAddsPairs = true;
#endif
inline I i_dot_pairs(I pairs, Line codes, const std::int8_t* four) {
    std::int32_t bits;
    __builtin_memcpy(&bits, four, 4);
    const __m256i a = _mm256_set1_epi32(bits);
    pairs.a = _mm256_add_epi16(pairs.a, _mm256_maddubs_epi16(codes.a, a));
    pairs.b = _mm256_add_epi16(pairs.b, _mm256_maddubs_epi16(codes.b, a));
    asm("" : "+x"(pairs.a), "+x"(pairs.b));  // else GCC adds products first, and keeps half of the sums in memory
    return pairs;
}
inline I i_of_pairs(I pairs) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(pairs.a, ones), _mm256_madd_epi16(pairs.b, ones)};
}
template <bool nibbles>
inline I i_dot(I acc, Line weights, const std::int8_t* four) {
    std::int32_t bits;
    __builtin_memcpy(&bits, four, 4);
    const __m256i a = _mm256_set1_epi32(bits);
    return {dot8<nibbles>(acc.a, weights.a, a), dot8<nibbles>(acc.b, weights.b, a)};
}

// One register of products of codes that have 128 added, less these 128: Σ (code - 128) · a. Magnitudes are multiplied
// with numbers that have taken the signs: 128 · 127 · 2 fits into 16 bits. kCentres: whether many rows go this way,
// since i_dot takes twice as long.
#ifdef __AVXVNNI__
constexpr bool kCentres = false;
#else
constexpr bool kCentres = true;
#endif
struct Centred {
    __m256i number, magnitude;
};
inline Centred centred(const void* codes) {
    const __m256i number = _mm256_xor_si256(_mm256_loadu_si256(static_cast<const __m256i*>(codes)),
                                            _mm256_set1_epi8(static_cast<char>(0x80)));
    return {number, _mm256_abs_epi8(number)};
}
inline __m256i centred_dot(__m256i acc, const Centred& codes, const std::int8_t* four) {
    std::int32_t bits;
    __builtin_memcpy(&bits, four, 4);
    const __m256i signs = _mm256_sign_epi8(_mm256_set1_epi32(bits), codes.number);
    const __m256i pairs = _mm256_maddubs_epi16(codes.magnitude, signs);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// Σ over l = 0 … 7 of the four bytes of each row of line l, less 128, times four l of row r, for n rows: to[r]. Half of
// a line after the other: their sums do not fit into the registers beside each other.
template <int n>
inline void centred_dots(const std::uint8_t* lines, const std::int8_t* fours, I (&to)[n]) {
    for (int half = 0; half < 2; ++half) {
        __m256i sums[n];
        for (__m256i& sum : sums) sum = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int l = 0; l < 8; ++l) {
            const Centred codes = centred(lines + 64 * l + 32 * half);
            for (int r = 0; r < n; ++r) sums[r] = centred_dot(sums[r], codes, fours + (l * n + r) * 4);
        }
        for (int r = 0; r < n; ++r) {
            if (half == 0) {
                to[r].a = sums[r];
            } else {
                to[r].b = sums[r];
            }
        }
    }
}

// Numbers within ±127: lane i of the 16 is the four vectors' lanes i, as bytes.
inline __m256i fours8(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i ab = _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi32(_mm256_and_si256(b, low), 8));
    const __m256i cd = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(c, low), 16), _mm256_slli_epi32(d, 24));
    return _mm256_or_si256(ab, cd);
}
inline void i_store_fours(std::int32_t* to, I a, I b, I c, I d) {
    auto* const v = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(v, fours8(a.a, b.a, c.a, d.a));
    _mm256_storeu_si256(v + 1, fours8(a.b, b.b, c.b, d.b));
}

// As in simd_avx512.h: `x.a` of a line has the first eight rows.
inline void turned(const std::uint8_t* const* rows, std::size_t byte, Line (&to)[4]) {
    const auto half = [=](int row, __m256i(&x)[4]) {
        for (int i = 0; i < 4; ++i) {
            const auto part = [&](int at) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[at] + byte));
            };
            x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(part(row + i)), part(row + 4 + i), 1);
        }
        const __m256i first = _mm256_unpacklo_epi32(x[0], x[1]), second = _mm256_unpackhi_epi32(x[0], x[1]);
        const __m256i third = _mm256_unpacklo_epi32(x[2], x[3]), fourth = _mm256_unpackhi_epi32(x[2], x[3]);
        x[0] = _mm256_unpacklo_epi64(first, third), x[1] = _mm256_unpackhi_epi64(first, third);
        x[2] = _mm256_unpacklo_epi64(second, fourth), x[3] = _mm256_unpackhi_epi64(second, fourth);
    };
    __m256i a[4], b[4];
    half(0, a), half(8, b);
    for (int j = 0; j < 4; ++j) to[j] = {a[j], b[j]};
}

// Codes of four rows of nibbles, as they lie: 32 bytes of each row, which are twice 16 columns in low nibbles and the
// next 16 in high ones. Register j has in 128 bits L the four rows' bytes 16 L + 4 j … + 3, side by side.
constexpr int kQuadLines = 2;
struct Quads {
    __m256i both[4];
};
[[gnu::always_inline]] inline Quads quads_of(const std::uint8_t* const* rows) {
    __m256i row[4];
    for (int i = 0; i < 4; ++i) row[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i]));
    const __m256i first = _mm256_unpacklo_epi8(row[0], row[1]), second = _mm256_unpackhi_epi8(row[0], row[1]);
    const __m256i third = _mm256_unpacklo_epi8(row[2], row[3]), fourth = _mm256_unpackhi_epi8(row[2], row[3]);
    return {{_mm256_unpacklo_epi16(first, third), _mm256_unpackhi_epi16(first, third),
             _mm256_unpacklo_epi16(second, fourth), _mm256_unpackhi_epi16(second, fourth)}};
}
// Which of 16 groups' factors each of the twice 32 columns takes.
struct QuadGroups {
    int first, second;
    explicit QuadGroups(const int* group) : first(group[0]), second(group[1]) {}
};
// Sums of codes times factors.
struct QuadSums {
    __m256i low[4], high[4];
    void clear() {
        for (int j = 0; j < 4; ++j) low[j] = high[j] = _mm256_setzero_si256();
    }
    // fours: of each of the 16 groups, the factors of the four rows.
    [[gnu::always_inline]] void add(const Quads& quads, const QuadGroups& groups, const std::int32_t* fours) {
        const __m256i factors =
            _mm256_blend_epi32(_mm256_set1_epi32(fours[groups.first]), _mm256_set1_epi32(fours[groups.second]), 0xf0);
        const __m256i nibble = _mm256_set1_epi8(15);
        for (int j = 0; j < 4; ++j) {
            const __m256i top = _mm256_and_si256(_mm256_srli_epi16(quads.both[j], 4), nibble);
            low[j] = dot8<true>(low[j], _mm256_and_si256(quads.both[j], nibble), factors);
            high[j] = dot8<true>(high[j], top, factors);
        }
    }
    // to[k]: the sums of columns 16 k … + 15.
    void columns(I (&to)[2 * kQuadLines]) const {
        const auto turned = [](const __m256i(&x)[4], I& first, I& second) {
            first = {_mm256_permute2x128_si256(x[0], x[1], 0x20), _mm256_permute2x128_si256(x[2], x[3], 0x20)};
            second = {_mm256_permute2x128_si256(x[0], x[1], 0x31), _mm256_permute2x128_si256(x[2], x[3], 0x31)};
        };
        turned(low, to[0], to[2]), turned(high, to[1], to[3]);
    }
};

}  // namespace penstock::PENSTOCK_ISA
