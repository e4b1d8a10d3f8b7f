// Products of one or two tiles of weights with a few rows of activations, for one instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "blocks-inl.h"
#include "blocks-many-inl.h"
#include "panel-inl.h"
#include "wide-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Calls work.operator()<kind>() for a kind whose rows may lie apart, as those of neurons and of a KV cache do. Formats
// in blocks are not among them.
template <class Work>
void by_kind(Kind kind, const Work& work) {
    switch (kind) {
        case Kind::kFloat32:
            return work.template operator()<Kind::kFloat32>();
        case Kind::kFloat16:
            return work.template operator()<Kind::kFloat16>();
        case Kind::kBfloat16:
            return work.template operator()<Kind::kBfloat16>();
        case Kind::kInt8:
            return work.template operator()<Kind::kInt8>();
        case Kind::kInt4:
            return work.template operator()<Kind::kInt4>();
        default:
            return;
    }
}

template <Kind kind>
inline void two_columns(const std::uint8_t* p, F& even, F& odd) {
    if constexpr (kind == Kind::kBfloat16) {
        const Line both = line(p);
        even = f_bf16_even(both), odd = f_bf16_odd(both);
    } else if constexpr (kind == Kind::kFloat16) {
        even = f_half(p), odd = f_half(p + 32);
    } else {
        even = f_load(p), odd = f_load(p + 64);
    }
}

// Rows of a panel that float32 products take at once: with 16 registers half of a wide one, whose sums of even and of
// odd columns take 12 of them.
constexpr int rows_at_once(int n) { return kRegisters == 16 && n == 6 ? 3 : n; }

// sums += tile · x. Even and odd columns have sums of their own, since a fused multiply-add waits 4 cycles for the one
// before it in the same sum.
template <Kind kind, int n, int k>
void dot_float(const Matrix& m, const Series& series, const Operand& x, Sums<n, k>& sums) {
    constexpr std::size_t kTwo = kind == Kind::kFloat32 ? 128 : 64;  // bytes of two columns
    constexpr int kRows = rows_at_once(n);
    const std::size_t next = m.tile_bytes();
    for (int g = 0; g < series.count; ++g) {
        for (int from_row = 0; from_row < n; from_row += kRows) {
            const float* a = x.f + std::ptrdiff_t(g) * m.cols * n + from_row;
            const std::uint8_t* p = series.first + std::size_t(g) * series.stride;
            F even[kRows][k], odd[kRows][k];
            for (int r = 0; r < kRows; ++r) {
                for (int i = 0; i < k; ++i) even[r][i] = odd[r][i] = f_zero();
            }
            int c = 0;
            for (; c + 1 < m.cols; c += 2, p += kTwo, a += 2 * n) {
                F w0[k], w1[k];
                for (int i = 0; i < k; ++i) {
                    const std::uint8_t* from = p + std::size_t(i) * next;
                    prefetch(from + series.ahead, series.reused);
                    if constexpr (kind == Kind::kFloat32) prefetch(from + series.ahead + 64, series.reused);
                    two_columns<kind>(from, w0[i], w1[i]);
                }
                for (int r = 0; r < kRows; ++r) {
                    const F x0 = f_set(a[r]), x1 = f_set(a[n + r]);
                    for (int i = 0; i < k; ++i) {
                        even[r][i] = f_fma(w0[i], x0, even[r][i]);
                        odd[r][i] = f_fma(w1[i], x1, odd[r][i]);
                    }
                }
            }
            if (c < m.cols) {
                for (int i = 0; i < k; ++i) {
                    const std::uint8_t* from = p + std::size_t(i) * next;
                    F w;
                    if constexpr (kind == Kind::kBfloat16) {
                        w = f_bf16_even(line(from));
                    } else if constexpr (kind == Kind::kFloat16) {
                        w = f_half(from);
                    } else {
                        w = f_load(from);
                    }
                    for (int r = 0; r < kRows; ++r) even[r][i] = f_fma(w, f_set(a[r]), even[r][i]);
                }
            }
            for (int r = 0; r < kRows; ++r) {
                for (int i = 0; i < k; ++i) {
                    F& sum = sums.at[from_row + r][i];
                    sum = f_add(sum, f_add(even[r][i], odd[r][i]));
                }
            }
        }
    }
}

template <bool int4, int kLines, int n, int k>
void dot_int8(const Matrix& m, const Series& series, const Operand& x, Sums<n, k>& out) {
    const int groups = m.groups();
    const std::size_t next = m.tile_bytes(), group_bytes = next / std::size_t(groups);
    const std::int8_t* a = x.q;
    const float *x_scale = x.scale, *x_sum = x.sum;
    Sums<n, k> sums = out;  // a copy, so that it stays in registers
    const std::uint8_t* p = series.first;
    const auto fetch = [&](const std::uint8_t* at) { prefetch(at + series.ahead, series.reused); };
    for (int j = 0, left = groups * series.count; left > 0; ++j, --left, a += m.group * n, x_scale += n, x_sum += n) {
        if (j == groups) j = 0, p += series.stride - next;
        add_group<int4, kLines>(m, p, next, fetch, a, x_scale, x_sum, sums);
        p += group_bytes;
    }
    out = sums;
}

// As dot_int8, but with activations that are not rounded: sums += Σ groups: (Σ code · x) · scale + minimum · x_sum.
template <bool int4, int n>
void dot_exact(const Matrix& m, const Series& series, const Operand& x, Sums<n, 1>& out) {
    constexpr int kRows = rows_at_once(n);
    const int lines = m.group / (int4 ? 8 : 4), groups = m.groups();
    for (int from_row = 0; from_row < n; from_row += kRows) {
        const float *a = x.f + from_row, *x_sum = x.sum + from_row;
        const std::uint8_t* p = series.first;
        F sums[kRows];
        for (int r = 0; r < kRows; ++r) sums[r] = out.at[from_row + r][0];
        for (int j = 0, left = groups * series.count; left > 0; ++j, --left, a += m.group * n, x_sum += n) {
            if (j == groups) j = 0, p += series.stride - m.tile_bytes();
            F even[kRows], odd[kRows];
            for (int r = 0; r < kRows; ++r) even[r] = odd[r] = f_zero();
            const auto two = [&](F w0, F w1, const float* b) {
                for (int r = 0; r < kRows; ++r) {
                    even[r] = f_fma(w0, f_set(b[r]), even[r]);
                    odd[r] = f_fma(w1, f_set(b[n + r]), odd[r]);
                }
            };
            const auto four = [&](Line w, int column) {
                two(f_byte<0>(w), f_byte<1>(w), a + column * n);
                two(f_byte<2>(w), f_byte<3>(w), a + (column + 2) * n);
            };
            for (int l = 0; l < lines; ++l, p += 64) {
                prefetch(p + series.ahead, series.reused);
                const Line w = line(p);
                if constexpr (int4) {
                    four(low_nibbles(w), 8 * l);
                    four(high_nibbles(w), 8 * l + 4);
                } else {
                    four(w, 4 * l);
                }
            }
            const F scale = f_half(p), minimum = f_half(p + 32);
            for (int r = 0; r < kRows; ++r) {
                sums[r] = f_fma(f_add(even[r], odd[r]), scale, sums[r]);
                sums[r] = f_fma(minimum, f_set(x_sum[r]), sums[r]);
            }
            p += 64;
        }
        for (int r = 0; r < kRows; ++r) out.at[from_row + r][0] = sums[r];
    }
}

template <int n, int k>
void dot(const Matrix& m, const Series& weights, const Operand& x, Sums<n, k>& sums) {
    switch (m.kind) {
        case Kind::kFloat32:
            return dot_float<Kind::kFloat32>(m, weights, x, sums);
        case Kind::kFloat16:
            return dot_float<Kind::kFloat16>(m, weights, x, sums);
        case Kind::kBfloat16:
            return dot_float<Kind::kBfloat16>(m, weights, x, sums);
        case Kind::kInt8:
        case Kind::kInt4:
            break;
        default:
            return dot_in_blocks<n, k>(m, weights, x, sums);
    }
    if (x.q != nullptr) {
        if (m.kind == Kind::kInt8) return dot_int8<false, 0>(m, weights, x, sums);
        return m.group == 64 ? dot_int8<true, 8>(m, weights, x, sums) : dot_int8<true, 0>(m, weights, x, sums);
    }
    // One tile at a time: two chains for each sum and four columns of weights fill the registers.
    for (int i = 0; i < k; ++i) {
        Sums<n, 1> one;
        for (int r = 0; r < n; ++r) one.at[r][0] = sums.at[r][i];
        Series series = weights;
        series.first += std::size_t(i) * m.tile_bytes();
        m.kind == Kind::kInt4 ? dot_exact<true>(m, series, x, one) : dot_exact<false>(m, series, x, one);
        for (int r = 0; r < n; ++r) sums.at[r][i] = one.at[r][0];
    }
}

// The rows of a panel that a unit multiplies with each tile.
template <class Start, class Sink>
void unit_rows(const Matrix& m, const Tiles& tiles, Unit unit, const Operand& x, int row, const Start& start,
               const Sink& sink) {
    alignas(64) float sums[kUnitRows][2][kTileRows];
    for (int tile = 0; tile < tiles.count; tile += 2) {
        const int count = std::min(2, tiles.count - tile);
        for (int r = 0; r < kUnitRows; ++r) {
            for (int i = 0; i < count; ++i) f_store(sums[r][i], start(row + r, tile + i));
        }
        unit({m, tiles.series.first + std::size_t(tile) * m.tile_bytes(), m.tile_bytes(), tiles.series.stride,
              tiles.series.count, count, x.q, x.scale, x.sum, &sums[0][0][0]});
        for (int r = 0; r < kUnitRows; ++r) {
            for (int i = 0; i < count; ++i) sink(row + r, tile + i, f_load(sums[r][i]));
        }
    }
}

// Multiplies rows [lo, hi) of x, which are whole panels, with each tile. start(row, tile) gives the 16 sums so far.
// Products are added to them in the order of the granules. sink(row, tile, sums) takes the results.
template <class Start, class Sink>
void tile_rows(const Matrix& m, const Tiles& tiles, const Rows& x, int lo, int hi, const Start& start,
               const Sink& sink) {
    const std::ptrdiff_t groups = std::ptrdiff_t(m.groups()) * tiles.granule;
    const std::ptrdiff_t columns = m.quantised() ? groups * m.group : std::ptrdiff_t(m.cols) * tiles.granule;
    // n rows with k tiles at a time, and the remaining tiles one by one.
    const auto step = [&]<int n, int k>(int row) {
        const int real = std::min(n, hi - row);  // rows of the panel that are the call's
        int tile = 0;
        const auto by_width = [&]<int width>() {
            for (; tile + width <= tiles.count; tile += width) {
                Sums<n, width> sums;
                for (int r = 0; r < n; ++r) {
                    for (int i = 0; i < width; ++i) sums.at[r][i] = r < real ? start(row + r, tile + i) : f_zero();
                }
                Series series = tiles.series;
                series.first += std::size_t(tile) * m.tile_bytes();
                series.reused = x.count > kFewRows;
                dot<n, width>(m, series, x.panel(row).at(columns, groups, n), sums);
                for (int r = 0; r < real; ++r) {
                    for (int i = 0; i < width; ++i) sink(row + r, tile + i, sums.at[r][i]);
                }
            }
        };
        if constexpr (k > 1) by_width.template operator()<k>();
        by_width.template operator()<1>();
    };
    int row = lo;
    if ((m.kind == Kind::kInt4 || m.kind == Kind::kInt8) && x.q != nullptr && !x.by_unit()) {
        row = wide_rows(m, tiles, x, columns, groups, lo, hi, start, sink);
    }
    if constexpr (kUnpacksBlocks) {
        // Whole panels, of weights in blocks that are unpacked for several of them.
        const int wide = x.count > kFewRows ? std::min(hi, x.count / kWideRows * kWideRows) : lo;
        while (in_blocks(m.kind) && x.q != nullptr && tiles.count == kWideTiles &&
               wide - row >= least_unpacked_panels(m.kind) * kWideRows) {
            const int panels = std::min(kUnpackedPanels, (wide - row) / kWideRows);
            WideSums sums[kUnpackedPanels];
            const auto each = [&](const auto& do_it) {
                for (int i = 0; i < panels * kWideRows * kWideTiles; ++i) {
                    const int r = i / kWideTiles, tile = i % kWideTiles;
                    do_it(row + r, tile, sums[r / kWideRows][r % kWideRows][tile]);
                }
            };
            each([&](int r, int tile, F& sum) { sum = start(r, tile); });
            add_wide_panels<kWideRows>(m, tiles.series, x, columns, groups, row, panels, sums);
            each([&](int r, int tile, F& sum) { sink(r, tile, sum); });
            row += panels * kWideRows;
        }
    }
    while (row < hi) {
        const int n = panel_of(row, x.count, x.by_unit()).n;
        if (kHasUnit && n == kUnitRows) {
            unit_rows(m, tiles, x.unit, x.panel(row).at(columns, groups, n), row, start, sink);
        } else if (n == 6) {
            if constexpr (kWideRows == 6) step.template operator()<6, kWideTiles>(row);
        } else if (n == 8) {
            if constexpr (kFewRows == 8) step.template operator()<8, 1>(row);
        } else if (n == 4) {
            step.template operator()<4, kFewRows / 4>(row);
        } else if (n == 2) {
            step.template operator()<2, kFewRows / 2>(row);
        } else {
            step.template operator()<1, kMostTiles>(row);
        }
        row += n;
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
