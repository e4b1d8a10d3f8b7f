// Products of int4 and int8 weights with rounded activations, group by group, and of many rows, panel by panel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "panel-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// sums += one group of k tiles, which are `next` bytes apart: (Σ code · q) · (scale · x_scale) + minimum · x_sum.
// `kLines`: lines of a group, so that the compiler unrolls them; 0: known at run time only. Calls fetch(address) for
// each line of codes.
template <bool int4, int kLines, int n, int k, class Fetch>
[[gnu::always_inline]] inline void add_group(const Matrix& m, const std::uint8_t* p, std::size_t next,
                                             const Fetch& fetch, const std::int8_t* a, const float* x_scale,
                                             const float* x_sum, Sums<n, k>& sums) {
    const int lines = kLines > 0 ? kLines : m.group / (int4 ? 8 : 4);
    constexpr int kChains = int4 && n * k * (kTileRows / kLanes) < 8 ? 2 : 1;
    constexpr int kHalves = int4 ? 2 : 1;  // codes of a byte
    using Sum = CodeSum<int4 ? 15 : 255>;
    const std::uint8_t* tile[k];
    for (int i = 0; i < k; ++i) {
        tile[i] = p + std::size_t(i) * next;
        asm("" : "+r"(tile[i]));  // else GCC keeps the sums of `next` and every line's offset on the stack
    }
    // All loops over rows, tiles and halves are written out: clang does not do so by itself in a loop that is, and then
    // keeps the sums on the stack (wheels took 1.4 times as long with 14 rows and more).
    Sum whole[n][k][kChains];
#pragma GCC unroll 8
    for (int l = 0; l < lines; ++l) {
#pragma GCC unroll 16
        for (int i = 0; i < k; ++i) fetch(tile[i] + l * 64);
        // Both halves of the codes, or with 16 registers one after the other: there is no room for both beside the
        // sums.
        constexpr int kAtOnce = kRegisters > 16 ? kHalves : 1;
#pragma GCC unroll 2
        for (int first = 0; first < kHalves; first += kAtOnce) {
            Line codes[k][kAtOnce];
#pragma GCC unroll 16
            for (int i = 0; i < k; ++i) {
                const Line w = line(tile[i] + l * 64);
#pragma GCC unroll 16
                for (int h = 0; h < kAtOnce; ++h) {
                    codes[i][h] = !int4 ? w : first + h == 0 ? low_nibbles(w) : high_nibbles(w);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < n; ++r) {
#pragma GCC unroll 16
                for (int i = 0; i < k; ++i) {
#pragma GCC unroll 16
                    for (int h = 0; h < kAtOnce; ++h) {
                        const int half = first + h;
                        const std::int8_t* four = a + ((kHalves * l + half) * n + r) * 4;
                        whole[r][i][half == 0 ? 0 : kChains - 1].add(codes[i][h], four);
                    }
                }
            }
        }
        if constexpr (Sum::kFull > 0) {
            constexpr int kFull = Sum::kFull * kChains / kHalves;  // in lines
            if (l % kFull != kFull - 1 && l != lines - 1) continue;
#pragma GCC unroll 16
            for (int r = 0; r < n; ++r) {
#pragma GCC unroll 16
                for (int i = 0; i < k; ++i) {
                    for (Sum& sum : whole[r][i]) sum.widen();
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < k; ++i) {
        const std::uint8_t* at = tile[i] + lines * 64;
        const F scale = f_half(at), minimum = f_half(at + 32);
#pragma GCC unroll 16
        for (int r = 0; r < n; ++r) {
            I total = whole[r][i][0].total;
            if constexpr (kChains == 2) total = i_add(total, whole[r][i][1].total);
            sums.at[r][i] = f_fma(f_from(total), f_mul(scale, f_set(x_scale[r])), sums.at[r][i]);
            sums.at[r][i] = f_fma(minimum, f_set(x_sum[r]), sums.at[r][i]);
        }
    }
}

// What a panel of many rows fetches while it is multiplied with tiles: lines [first, end) of each group of the next
// tiles, which lie `away` bytes from those in use. Each panel fetches a share of the next tiles, so their bytes come
// evenly while all panels are multiplied: at 1 GB/s a core. If the first panel fetched them all, it would want 18 GB/s.
// `into_l2`: the lines are fetched into the second cache only. The first has no room for two pairs of tiles of 2,048
// columns beside the activations. With 14 and 24 rows this takes 0.88 to 0.94 of the time. With 64 rows, where more
// panels use each line, it takes 1.03 to 1.05 of it.
struct NextLines {
    std::ptrdiff_t away;
    int first, end;
    bool into_l2;
};
constexpr int kPanelsIntoL2 = 4;  // the most panels whose next lines go into the second cache only

// sums += tiles · a wide panel, where tiles and groups lie as m says.
template <bool int4, int kLines, int k>
[[gnu::noinline]] void add_wide(const Matrix& m, const Series& series, int groups, std::size_t next,
                                const NextLines& later, const Operand& x, Sums<kWideRows, k>& out) {
    constexpr int n = kWideRows;
    const std::size_t group_bytes = std::size_t(m.group) * (int4 ? 8 : 16) + 64;
    const std::int8_t* a = x.q;
    const float *x_scale = x.scale, *x_sum = x.sum;
    Sums<n, k> sums = out;  // a copy, so that it stays in registers
    const std::uint8_t* p = series.first;
    for (int j = 0, left = groups * series.count; left > 0; ++j, --left, a += m.group * n, x_scale += n, x_sum += n) {
        if (j == groups) j = 0, p += series.stride - next;
        for (int l = later.first; l < later.end; ++l) {
            for (int i = 0; i < k; ++i) {
                const std::uint8_t* const line = p + later.away + std::size_t(i) * next + l * 64;
                if (later.into_l2) {
                    __builtin_prefetch(line, 0, 2);
                } else {
                    __builtin_prefetch(line, 0, 3);
                }
            }
        }
        add_group<int4, kLines>(m, p, next, [](const std::uint8_t*) {}, a, x_scale, x_sum, sums);
        p += group_bytes;
    }
    out = sums;
}

// As `tile_rows`, for the wide panels of [lo, hi) alone, of int4 or int8 weights. Returns the row after them.
template <class Start, class Sink>
int wide_rows(const Matrix& m, const Tiles& tiles, const Rows& x, std::ptrdiff_t columns, std::ptrdiff_t groups, int lo,
              int hi, const Start& start, const Sink& sink) {
    const int panels = x.count > kFewRows ? (std::min(hi, x.count / kWideRows * kWideRows) - lo) / kWideRows : 0;
    if (panels <= 0) return lo;
    const int per_tile = m.groups(), lines = m.group / (m.kind == Kind::kInt4 ? 8 : 4) + 1;
    const std::size_t next = m.tile_bytes();
    const auto multiply = [&]<int k>(int tile) {
        Series series = tiles.series;
        series.first += std::size_t(tile) * next;
        for (int panel = 0; panel < panels; ++panel) {
            const int row = lo + panel * kWideRows;
            NextLines later{};
            if (tiles.then != nullptr) {
                later = {tiles.then - tiles.series.first, lines * panel / panels, lines * (panel + 1) / panels,
                         panels <= kPanelsIntoL2};
            }
            const Operand operand = x.panel(row).at(columns, groups, kWideRows);
            Sums<kWideRows, k> sums;
            for (int r = 0; r < kWideRows; ++r) {
                for (int i = 0; i < k; ++i) sums.at[r][i] = start(row + r, tile + i);
            }
            if (m.kind == Kind::kInt8) {
                add_wide<false, 0>(m, series, per_tile, next, later, operand, sums);
            } else if (m.group == 64) {
                add_wide<true, 8>(m, series, per_tile, next, later, operand, sums);
            } else {
                add_wide<true, 0>(m, series, per_tile, next, later, operand, sums);
            }
            for (int r = 0; r < kWideRows; ++r) {
                for (int i = 0; i < k; ++i) sink(row + r, tile + i, sums.at[r][i]);
            }
        }
    };
    int tile = 0;
    for (; tile + kWideTiles <= tiles.count; tile += kWideTiles) multiply.template operator()<kWideTiles>(tile);
    if constexpr (kWideTiles > 1) {
        for (; tile < tiles.count; ++tile) multiply.template operator()<1>(tile);
    }
    return lo + panels * kWideRows;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
