// Products of the KV cache's codes with numbers of 16 bits, for the instruction sets whose lines have 16 columns: what
// attention-codes-inl.h wants. Included after simd_neon.h or simd_portable.h, which have `i_dot_words` of a line.
#pragma once

#include <cstdint>
#include <cstring>

namespace penstock::PENSTOCK_ISA {

// As in codes_avx512.h.
constexpr int kWideBytes = 16, kWideLines = 1, kMostSums = 4, kKeyLines = 1, kCodeQueries = 4, kPairLanes = 1;

// Two numbers of 16 bits, for all lanes.
struct Pair {
    std::int32_t first, second;
};
inline Pair pair_at(const std::int32_t* p) { return {static_cast<std::int16_t>(*p), *p >> 16}; }
template <int parts>
inline Pair pairs_of(const std::int32_t* p, const int*) {
    return pair_at(p);
}

// As in codes_avx512.h: four numbers of 8 bits, for all lanes.
using FourBytes = const std::int8_t*;
inline FourBytes four_bytes_at(const std::int32_t* p) { return reinterpret_cast<const std::int8_t*>(p); }
inline I i_dot_nibbles(I acc, Line nibbles, FourBytes four) { return i_dot<true>(acc, nibbles, four); }
inline I i_of_nibbles(I acc) { return acc; }

// The same for floats.
template <int parts>
inline F f_units(const float* p, const int*) {
    return f_set(*p);
}

template <int shift, int mask>
inline Line l_words(Line x) {
    return l_right(x, shift, mask << 16 | mask);
}
inline I i_dot_words(I acc, Line words, Pair two) { return i_dot_twos(acc, words, two.first, two.second); }
inline void key_lines(const std::uint8_t* row, std::size_t row_bytes, Line (&to)[4]) {
    alignas(64) std::uint32_t turned[4][16];
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 4; ++j) std::memcpy(turned[j] + i, row + std::size_t(i) * row_bytes + 4 * j, 4);
    }
    for (int j = 0; j < 4; ++j) to[j] = line(turned[j]);
}
template <int first, int n>
inline void wide_lines(const std::uint8_t* row, std::size_t row_bytes, Line (&to)[n]) {
    static_assert(first == 0 && n == 1);
    const std::uint8_t* const rows[4] = {row, row + row_bytes, row + 2 * row_bytes, row + 3 * row_bytes};
    to[0] = fours_of(rows);
}
inline void wide_columns(I (&)[kWideLines]) {}
inline void i_zip(I&, I&) {}  // of two rows in a line, which there are not

}  // namespace penstock::PENSTOCK_ISA
