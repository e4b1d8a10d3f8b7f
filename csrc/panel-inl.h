// What products of tiles share, for one instruction set: panels of activations, sums, and where weights lie.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu.h"
#include "kernels.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Rows of activations are multiplied some at a time. n rows make a panel: [columns][n], or for int8 [columns /
// 4][n][4]. So numbers lie in the order in which instructions read them. Many rows are cut into panels of kWideRows and
// a rest, or of kUnitRows where a unit takes them: then int8 is [groups][n][group]. Few rows, and the rest, make one
// panel, which may have a row of zeros at its end: the weights are read and unpacked once per panel, so three rows cost
// less as four than as two and one (an FFN in int4, Zen 4: 0.84 of the time).
struct Panel {
    int row, n;
};

constexpr int kMostPanelRows = std::max(kFewRows, kWideRows);

// The rows of the least panel for `count` rows, at most kMostPanelRows.
constexpr int panel_for(int count) {
    if (count <= 2) return count;
    if (count <= 4) return 4;
    return kWideRows == 6 && count <= 6 ? 6 : kMostPanelRows;
}
static_assert(panel_for(kMostPanelRows) == kMostPanelRows);

inline Panel panel_of(int row, int count, bool by_unit) {
    // Both divisors are constants: no division is made.
    const auto whole = [&](int rows) { return by_unit ? rows / kUnitRows * kUnitRows : rows / kWideRows * kWideRows; };
    const int wide = count > kFewRows ? whole(count) : 0;
    if (row < wide) return {whole(row), by_unit ? kUnitRows : kWideRows};
    int from = wide;
    for (; count - from > kMostPanelRows; from += kMostPanelRows) {  // the rest of a unit's panels
        if (row < from + kMostPanelRows) return {from, kMostPanelRows};
    }
    return {from, panel_for(count - from)};
}

// A panel's activations, granule by granule: `f` float32, or `q` int8 with a `scale` per group. For integer weights
// they are padded to whole groups, and there is the `sum` of each group.
struct Operand {
    const float* f;
    const std::int8_t* q;
    const float *scale, *sum;    // [groups][n]
    const std::int16_t* halves;  // [2 groups][n]: sums of 16 rounded numbers each, where groups have kBlockGroup

    // The same activations from a later column and group on.
    Operand at(std::ptrdiff_t columns, std::ptrdiff_t groups, int n) const {
        return {f ? f + columns * n : nullptr, q ? q + columns * n : nullptr, scale ? scale + groups * n : nullptr,
                sum ? sum + groups * n : nullptr, halves ? halves + 2 * groups * n : nullptr};
    }
};

// All panels of `count` rows, one after the other. Pointers are as in Operand.
struct Rows {
    float* f = nullptr;
    std::int8_t* q = nullptr;
    float *scale = nullptr, *sum = nullptr;
    std::int16_t* halves = nullptr;
    std::ptrdiff_t width = 0, groups = 0;  // columns of a row, padded; groups of a row
    int count = 0;
    Unit unit = nullptr;  // what multiplies wide panels, if not the vectors

    bool by_unit() const { return kHasUnit && unit != nullptr; }
    Operand panel(int row) const { return Operand{f, q, scale, sum, halves}.at(width, groups, row); }
};

// A sum of products of codes up to `most` with rounded activations, as i_dot and i_dot_pairs give them.
template <int most>
struct CodeSum {
    // After so many products of four the sums in 16 bits may be full, and `widen` is due. 0: there are none.
    static constexpr int kFull = kAddsPairs && most < 128 ? 32767 / (2 * 127 * most) : 0;
    I total = i_zero(), pairs = i_zero();

    void add(Line codes, const std::int8_t* four) {
        if constexpr (kFull > 0) {
            pairs = i_dot_pairs(pairs, codes, four);
        } else {
            total = i_dot<(most < 128)>(total, codes, four);
        }
    }
    void widen() {
        if constexpr (kFull > 0) total = i_add(total, i_of_pairs(pairs)), pairs = i_zero();
    }
};

// Sums of n rows × k tiles, 16 outputs each.
template <int n, int k>
struct Sums {
    F at[n][k];
};

// How many bytes ahead of the bytes in use are fetched. The processor's own prefetcher does not reach the RAM's speed
// once there is much arithmetic: with four rows it gave 27 GB/s of 45 without this.
constexpr std::size_t kAhead = 6144;

// Where processors gain by it, weights that are read once bypass the L2 cache, so that nothing in it has to be written
// to the L3 to make room for them (Zen 4, four rows 0.81 -> 0.86 of the RAM's speed, eight 0.58 -> 0.70). With many
// rows (`reused`) they are read again, for the next panel.
const bool kPastL2 = fetches_past_l2();

inline void prefetch(const std::uint8_t* p, bool reused) {
    if (reused || !kPastL2) {
        __builtin_prefetch(p, 0, 3);
    } else {
        __builtin_prefetch(p, 0, 0);
    }
}

// Fetches the beginning of a run of bytes that does not follow the run before it. Without this its first bytes come one
// cache miss after the other.
inline void prefetch_run(const std::uint8_t* p, std::size_t nbytes = kAhead) {
    for (std::size_t i = 0; i < nbytes; i += 64) __builtin_prefetch(p + i);
}

// The same tile in `count` granules, `stride` bytes apart, whose products are added one after the other. The
// activations of a granule follow those of the granule before.
struct Series {
    const std::uint8_t* first;
    int count;
    std::size_t stride;
    std::size_t ahead = kAhead;  // while a byte is used, the byte so far after it is fetched
    bool reused = false;         // further rows read the same weights
};

// `count` adjacent tiles (at most kMostTiles) in each of some granules.
struct Tiles {
    int count;
    Series series;
    int granule = 0;  // the granule of the activations that the first of these granules is multiplied with
    const std::uint8_t* then = nullptr;  // tiles of the same shape that are multiplied next, if that is known
};
constexpr int kMostTiles = 4;

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
