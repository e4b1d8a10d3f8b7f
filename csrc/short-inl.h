// Products of a granule's tiles with few rows, in the order in which their bytes lie. Included after tile-inl.h.
#pragma once

#include "input-inl.h"
#include "tile-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// to [n, tiles · 16] = before (null: 0) + x · a granule of `tiles` tiles. Rows of `to` and `before` are `stride` floats
// apart. This is for short tiles, for which the work of `tile_rows` at each tile's beginning and end is most of all
// work: an FFN of one row in cache reads 181 GB/s of weights this way, and 51 through `tile_rows`. Tiles are taken one
// after the other: two or four at once would read out of the order in which bytes lie. While a byte is used, the byte
// `ahead` bytes after it is fetched. `to` and `before` have `real` of the panel's n rows.
template <bool int4, int kLines, int n>
void dot_short(const Matrix& m, const std::uint8_t* p, int tiles, std::size_t ahead, const Operand& x, int real,
               const float* before, float* to, std::ptrdiff_t stride) {
    const int groups = m.groups();
    const std::size_t next = m.tile_bytes(), group_bytes = next / std::size_t(groups);
    const auto fetch = [&](const std::uint8_t* at) { prefetch(at + ahead, false); };
    for (int tile = 0; tile < tiles; ++tile, p += next, to += kTileRows) {
        Sums<n, 1> sums;
        for (int r = 0; r < n; ++r) {
            sums.at[r][0] = before != nullptr && r < real ? f_load(before + r * stride) : f_zero();
        }
        if (before != nullptr) before += kTileRows;
        for (int j = 0; j < groups; ++j) {
            add_group<int4, kLines>(m, p + std::size_t(j) * group_bytes, next, fetch, x.q + j * m.group * n,
                                    x.scale + j * n, x.sum + j * n, sums);
        }
        for (int r = 0; r < n; ++r) {
            if (r < real) f_store(to + r * stride, sums.at[r][0]);
        }
    }
}

// to [real, rows of m] = before [real, rows of m] (null: 0) + x · m, for `tiles` whole tiles of a granule and a panel
// of n rows, of which `real` are the call's.
void short_panel(const Matrix& m, const std::uint8_t* block, int tiles, std::size_t ahead, int n, int real,
                 const Operand& x, const float* before, float* to) {
    const auto run = [&]<int rows>() {
        if (in_blocks(m.kind)) return dot_short_in_blocks<rows>(m, block, tiles, ahead, x, real, before, to, m.rows);
        if (m.kind == Kind::kInt8)
            return dot_short<false, 0, rows>(m, block, tiles, ahead, x, real, before, to, m.rows);
        if (m.group == 64) return dot_short<true, 8, rows>(m, block, tiles, ahead, x, real, before, to, m.rows);
        dot_short<true, 0, rows>(m, block, tiles, ahead, x, real, before, to, m.rows);
    };
    switch (n) {
        case 8:
            if constexpr (kFewRows == 8) run.template operator()<8>();
            break;
        case 6:
            if constexpr (kFewRows == 8) run.template operator()<6>();
            break;
        case 4:
            return run.template operator()<4>();
        case 2:
            return run.template operator()<2>();
        default:
            return run.template operator()<1>();
    }
}

// to [T, rows of m] = before [T, rows of m] (null: 0) + x · a granule whose matrix begins at `block`, for tiles [lo,
// hi). Activations of the granule are laid out as granule `nth` of x.
void short_tiles(const Matrix& m, const std::uint8_t* block, int lo, int hi, std::size_t ahead, const Rows& x, int nth,
                 const float* before, float* to) {
    const int whole = x.q != nullptr ? std::min(hi, m.rows / kTileRows) : lo;
    for (int row = 0; row < x.count && lo < whole;) {
        const int n = panel_of(row, x.count, x.by_unit()).n;
        const std::ptrdiff_t at = std::ptrdiff_t(row) * m.rows + lo * kTileRows;
        const Operand operand =
            x.panel(row).at(std::ptrdiff_t(nth) * m.groups() * m.group, std::ptrdiff_t(nth) * m.groups(), n);
        short_panel(m, block + std::size_t(lo) * m.tile_bytes(), whole - lo, ahead, n, std::min(n, x.count - row),
                    operand, before != nullptr ? before + at : nullptr, to + at);
        row += n;
    }
    for (int tile = std::max(lo, whole); tile < hi; ++tile) {
        const int column = tile * kTileRows, count = m.rows - column;
        const auto place = [&](int row) { return std::ptrdiff_t(row) * m.rows + column; };
        const Tiles one{1, {block + std::size_t(tile) * m.tile_bytes(), 1, 0}, nth};
        tile_rows(
            m, one, x, 0, x.count,
            [&](int row, int) { return before != nullptr ? load_some(before + place(row), count) : f_zero(); },
            [&](int row, int, F y) { store_some(to + place(row), y, count); });
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
