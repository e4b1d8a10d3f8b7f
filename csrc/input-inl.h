// What a call multiplies: activations laid out for the kernels, and weights cut into tiles that are taken together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "scratch.h"
#include "tile-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

template <class T>
T* take(Scratch& scratch, std::size_t count) {
    const std::size_t nbytes = scratch_aligned(count * sizeof(T));
    if (nbytes > scratch.nbytes) return nullptr;
    auto* found = reinterpret_cast<T*>(scratch.data);
    scratch.data += nbytes;
    scratch.nbytes -= nbytes;
    return found;
}

void store_some(float* to, F x, int count) {
    if (count >= kTileRows) {
        f_store(to, x);
        return;
    }
    float lanes[kTileRows];
    f_store(lanes, x);
    for (int i = 0; i < count; ++i) to[i] = lanes[i];
}

// The first `count` of 16, the others 0.
F load_some(const float* from, int count) {
    if (count >= kTileRows) return f_load(from);
    float lanes[kTileRows] = {};
    for (int i = 0; i < count; ++i) lanes[i] = from[i];
    return f_load(lanes);
}

// ---- activations of a call -----------------------------------------------------------------------------------------

constexpr int kGranuleRows = 64;  // neurons of a granule, at most
static_assert(kHiddenRows % kWideRows == 0, "whole panels");
static_assert(kFewRows <= kMostFewRows, "scratch is sized for so many");

// One group of a row as int8 with scale = max / 127, and the sum of what that stands for.
void round_group(const float* from, int count, int group, std::int8_t* q, float* scale, float* sum) {
    I most_bits = i_zero();
    for (int i = 0; i < count; i += 16) most_bits = i_max(most_bits, i_magnitude(load_some(from + i, count - i)));
    const std::int32_t bits = i_max_of(most_bits);
    float most;
    std::memcpy(&most, &bits, 4);
    const F up = f_set(most > 0 && bits < 0x7f800000 ? 127.0F / most : 0.0F);
    I total = i_zero();
    for (int i = 0; i < group; i += 16) {
        const I codes = i < count ? i_round(f_mul(load_some(from + i, count - i), up)) : i_zero();
        i_store_bytes(q + i, codes);
        total = i_add(total, codes);
    }
    // NaN and infinite activations stay visible in the scale: damaged weights must not pass for zeros.
    *scale = most / 127.0F;
    *sum = *scale * static_cast<float>(i_sum(total));
}

// Memory for the activations that weights of one or more granules are multiplied with.
struct Prepared {
    Rows rows;

    // Room for `count` rows, `granules` granules of m.cols columns each. False: scratch is too small.
    static bool plan(const Matrix& m, int granules, int count, bool exact, Scratch& scratch, Prepared& to) {
        const std::size_t groups = std::size_t(m.groups()) * std::size_t(granules), n = std::size_t(count);
        const std::size_t width = m.quantised() ? groups * std::size_t(m.group) : std::size_t(m.cols * granules);
        Rows& rows = to.rows;
        rows = Rows{.width = std::ptrdiff_t(width), .groups = std::ptrdiff_t(groups), .count = count};
        if (m.quantised() && !exact) {
            rows.q = take<std::int8_t>(scratch, n * width);
            rows.scale = take<float>(scratch, n * groups);
        } else {
            rows.f = take<float>(scratch, n * width);
        }
        if (m.quantised()) rows.sum = take<float>(scratch, n * groups);
        return (rows.f != nullptr || (rows.q != nullptr && rows.scale != nullptr)) &&
               (rows.sum != nullptr || !m.quantised());
    }

    // Lays out group j of a granule's columns `from` of one row; of float weights, which know no groups, all columns.
    static void put(const Rows& rows, const Matrix& m, int row, int granule, int j, const float* from) {
        const Panel panel = panel_of(row, rows.count);
        const int n = panel.n, r = row - panel.row;
        if (!m.quantised()) {
            float* to = rows.f + panel.row * rows.width + std::ptrdiff_t(granule) * m.cols * n + r;
            for (int i = 0; i < m.cols; ++i) to[std::ptrdiff_t(i) * n] = from[i];
            return;
        }
        const int at = granule * m.groups() + j, count = std::min(m.group, m.cols - j * m.group);
        const std::ptrdiff_t first = panel.row * rows.width + std::ptrdiff_t(at) * m.group * n;
        const std::ptrdiff_t place = panel.row * rows.groups + std::ptrdiff_t(at) * n + r;
        from += j * m.group;
        if (rows.f != nullptr) {
            float total = 0;
            float* to = rows.f + first + r;
            for (int i = 0; i < m.group; ++i) to[std::ptrdiff_t(i) * n] = i < count ? from[i] : 0.0F;
            for (int i = 0; i < count; ++i) total += from[i];
            rows.sum[place] = total;
            return;
        }
        alignas(64) std::int8_t codes[kMostGroup + 16];
        round_group(from, count, m.group, codes, rows.scale + place, rows.sum + place);
        std::int8_t* to = rows.q + first + r * 4;
        for (int i = 0; i < m.group; i += 4) std::memcpy(to + std::ptrdiff_t(i) * n, codes + i, 4);
    }
};

// What a call multiplies, some rows at a time: those whose activations stay in a core's L2 cache while the weights go
// by.
class Input {
  public:
    bool plan(const Matrix& m, const float* x, std::ptrdiff_t x_stride, int granules, int t, bool exact,
              Scratch& scratch) {
        m_ = m, x_ = x, x_stride_ = x_stride, granules_ = granules, t_ = t;
        chunk_ = chunk_rows(m, granules, t, exact);
        return Prepared::plan(m, granules, chunk_, exact, scratch, prepared_);
    }

    int chunk() const { return chunk_; }

    // The rows from `row` on, at most a chunk, laid out. All threads share the work and wait for each other.
    Rows chunk_at(const Team& team, int row) const {
        if (row > 0) team.barrier();  // the rows before are used up
        Rows rows = prepared_.rows;
        rows.count = std::min(chunk_, t_ - row);
        const int per_granule = std::max(1, m_.groups()), per_row = per_granule * granules_;
        const auto [first, last] = team.share(rows.count * per_row);
        for (int i = first; i < last; ++i) {
            const int r = i / per_row, at = i % per_row, granule = at / per_granule;
            const float* from = x_ + (row + r) * x_stride_ + std::ptrdiff_t(granule) * m_.cols;
            Prepared::put(rows, m_, r, granule, at % per_granule, from);
        }
        team.barrier();
        return rows;
    }

  private:
    Matrix m_;
    const float* x_ = nullptr;
    std::ptrdiff_t x_stride_ = 0;
    int granules_ = 0, t_ = 0, chunk_ = 0;
    Prepared prepared_;
};

// What a call walks through, in bytes; arithmetic counts from four rows on.
std::size_t cost_of(const Granules& weights, std::size_t bytes_per_granule, int t) {
    return std::size_t(weights.count) * bytes_per_granule * std::size_t((t + 3) / 4);
}
std::size_t bytes_of(const Matrix& m) { return std::size_t(m.tiles()) * m.tile_bytes(); }

// How a matrix is cut into tiles that are multiplied together. Many rows share a broadcast between kWideTiles. For few
// rows what counts is that bytes come in the order in which they lie: one tile after the other, unless tiles are so
// short that starting and ending them is most of the work.
struct Cuts {
    int tiles, width, per_granule;
    Cuts(const Matrix& m, int rows)
        : tiles(m.tiles()),
          width(rows > kFewRows         ? kWideTiles
                : m.tile_bytes() > 2048 ? 1
                                        : kMostTiles),
          per_granule((tiles + width - 1) / width) {}
    int granule(int cut) const { return cut / per_granule; }
    int tile(int cut) const { return cut % per_granule * width; }
    Tiles tiles_of(const Granules& weights, const Matrix& m, int cut) const {
        return {std::min(width, tiles - tile(cut)),
                {weights.data + std::size_t(granule(cut)) * weights.stride + m.offset +
                     std::size_t(tile(cut)) * m.tile_bytes(),
                 1, weights.stride}};
    }
};

constexpr auto nothing = [](int, int) { return f_zero(); };  // where a sum starts

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
