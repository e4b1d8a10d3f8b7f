// How rows of neurons become lines of tiles, for instruction sets whose registers hold 16 columns of four rows of int4.
// Included by their simd headers, after `i_dot`.
#pragma once

#include <cstddef>
#include <cstring>

namespace penstock::PENSTOCK_ISA {

// As in simd_avx512.h.
inline void turned(const std::uint8_t* const* rows, std::size_t byte, Line (&to)[4]) {
    alignas(64) std::uint8_t lines[4][16][4];
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 4; ++j) std::memcpy(lines[j][i], rows[i] + byte + 4 * j, 4);
    }
    for (int j = 0; j < 4; ++j) to[j] = line(lines[j]);
}

// 32 columns of four rows of nibbles, as `i_dot` takes them. Lane i of `low` has column i of the four rows, lane i of
// `high` has their column 16 + i.
constexpr int kQuadLines = 1;
struct Quads {
    Line low, high;
};

// Which of 16 groups' factors the columns take.
struct QuadGroups {
    int at;
    explicit QuadGroups(const int* group) : at(*group) {}
};
// Sums of codes times factors.
struct QuadSums {
    I low, high;
    void clear() { low = high = i_zero(); }
    // fours: of each of the 16 groups, the factors of the four rows.
    [[gnu::always_inline]] void add(const Quads& quads, const QuadGroups& groups, const std::int32_t* fours) {
        const auto* const four = reinterpret_cast<const std::int8_t*>(fours + groups.at);
        low = i_dot<true>(low, quads.low, four), high = i_dot<true>(high, quads.high, four);
    }
    // to[k]: the sums of columns 16 k … + 15.
    void columns(I (&to)[2 * kQuadLines]) const { to[0] = low, to[1] = high; }
};

}  // namespace penstock::PENSTOCK_ISA
