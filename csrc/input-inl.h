// Prepares the operands of a product: lays out activations for the kernels, and cuts weights into tiles that are taken
// together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "scratch.h"
#include "tile-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// `count` numbers from the beginning of scratch, or null if it is too small.
template <class T>
T* take(Scratch& scratch, std::size_t count) {
    const std::size_t nbytes = scratch_aligned(count * sizeof(T));
    if (nbytes > scratch.nbytes) return nullptr;
    auto* memory = reinterpret_cast<T*>(scratch.data);
    scratch.data += nbytes;
    scratch.nbytes -= nbytes;
    return memory;
}

// Stores the first `count` of 16 numbers.
void store_some(float* to, F x, int count) {
    if (count >= kTileRows) {
        f_store(to, x);
        return;
    }
    float lanes[kTileRows];
    f_store(lanes, x);
    for (int i = 0; i < count; ++i) to[i] = lanes[i];
}

// Loads `count` numbers; the others of the 16 are 0.
F load_some(const float* from, int count) {
    if (count >= kTileRows) return f_load(from);
    float lanes[kTileRows] = {};
    for (int i = 0; i < count; ++i) lanes[i] = from[i];
    return f_load(lanes);
}

// ---- activations of a call -----------------------------------------------------------------------------------------

constexpr int kGranuleRows = 64;  // the most neurons of a granule whose neurons have rows of their own
constexpr int kWidestRows = 256;  // and of one in tiles
// Floats from one row's values of a granule's neurons to the next row's.
inline int spaced(const Matrix& up) { return std::max(kGranuleRows, up.rows); }
static_assert(kHiddenRows % kWideRows == 0 && kHiddenRows % kUnitRows == 0, "whole panels");
static_assert(kFewRows <= kMostFewRows, "scratch is sized for so many");

// Rounds one group of a row, `count` numbers padded to `group`, to int8 with scale = max / 127. `sum`: the sum of the
// rounded numbers, as floats. `halves` (null: not wanted): sums of 16 of them each, `stride` numbers apart.
void round_group(const float* from, int count, int group, std::int8_t* q, float* scale, float* sum,
                 std::int16_t* halves, int stride) {
    I most_bits = i_zero();
    for (int i = 0; i < count; i += 16) most_bits = i_max(most_bits, i_magnitude(load_some(from + i, count - i)));
    const std::int32_t bits = i_max_of(most_bits);
    float most;
    std::memcpy(&most, &bits, 4);
    const F up = f_set(most > 0 && bits < 0x7f800000 ? 127.0F / most : 0.0F);
    I total = i_zero();
    std::int32_t both = 0;
    for (int i = 0; i < group; i += 16) {
        const I codes = i < count ? i_round(f_mul(load_some(from + i, count - i), up)) : i_zero();
        i_store_bytes(q + i, codes);
        total = i_add(total, codes);
        if (halves != nullptr) {
            const std::int32_t half = i_sum(codes);
            halves[i / 16 * stride] = static_cast<std::int16_t>(half);
            both += half;
        }
    }
    // NaN and infinite activations stay visible in the scale, so that damaged weights do not pass for zeros.
    *scale = most / 127.0F;
    *sum = *scale * static_cast<float>(halves != nullptr ? both : i_sum(total));
}

// Memory for activations that the weights of one or more granules are multiplied with.
struct Prepared {
    Rows rows;

    // Takes room for `count` rows of `granules` granules, with m.cols columns each. Returns false if scratch is too
    // small.
    static bool plan(const Matrix& m, int granules, int count, bool exact, Scratch& scratch, Prepared& to) {
        exact = exact || !multiplies_codes(m.kind);
        const std::size_t groups = std::size_t(m.groups()) * std::size_t(granules);
        const auto n = std::size_t(laid_out_rows(count));
        const std::size_t width = m.quantised() ? groups * std::size_t(m.group) : std::size_t(m.cols * granules);
        Rows& rows = to.rows;
        rows = Rows{.width = std::ptrdiff_t(width), .groups = std::ptrdiff_t(groups), .count = count};
        if (m.quantised() && !exact) {
            rows.q = take<std::int8_t>(scratch, n * width);
            rows.scale = take<float>(scratch, n * groups);
            if ((m.kind == Kind::kInt4 || m.kind == Kind::kInt8) && m.group % 16 == 0) rows.unit = scratch.unit;
        } else {
            rows.f = take<float>(scratch, n * width);
        }
        if (m.quantised()) rows.sum = take<float>(scratch, n * groups);
        if (rows.q != nullptr && m.group == kBlockGroup) {
            rows.halves = take<std::int16_t>(scratch, 2 * n * groups);
            if (rows.halves == nullptr) return false;
        }
        return (rows.f != nullptr || (rows.q != nullptr && rows.scale != nullptr)) &&
               (rows.sum != nullptr || !m.quantised());
    }

    // Lays out group j of one row's columns `from` for a granule. Float weights have no groups: then it is all columns.
    // The last row brings the zeros of the rows that its panel has beyond it.
    static void put(const Rows& rows, const Matrix& m, int row, int granule, int j, const float* from) {
        const Panel panel = panel_of(row, rows.count, rows.by_unit());
        const int n = panel.n, r = row - panel.row;
        if (row + 1 == rows.count) {
            for (int beyond = r + 1; beyond < n; ++beyond) put_zeros(rows, m, panel, beyond, granule, j);
        }
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
        std::int16_t* const halves =
            rows.halves ? rows.halves + 2 * (panel.row * rows.groups + std::ptrdiff_t(at) * n) + r : nullptr;
        round_group(from, count, m.group, codes, rows.scale + place, rows.sum + place, halves, n);
        if (rows.by_unit() && n == kUnitRows) {
            std::memcpy(rows.q + first + std::ptrdiff_t(r) * m.group, codes, std::size_t(m.group));
            return;
        }
        std::int8_t* to = rows.q + first + r * 4;
        for (int i = 0; i < m.group; i += 4) std::memcpy(to + std::ptrdiff_t(i) * n, codes + i, 4);
    }

  private:
    // As `put`, for row r of a panel, which is none of the call's.
    static void put_zeros(const Rows& rows, const Matrix& m, const Panel& panel, int r, int granule, int j) {
        const int n = panel.n, columns = m.quantised() ? m.group : m.cols;
        const std::ptrdiff_t at = std::ptrdiff_t(granule) * std::max(1, m.groups()) + j;
        const std::ptrdiff_t first = panel.row * rows.width + at * columns * n;
        const std::ptrdiff_t place = panel.row * rows.groups + at * n + r;
        for (int i = 0; rows.f != nullptr && i < columns; ++i) rows.f[first + std::ptrdiff_t(i) * n + r] = 0.0F;
        for (int i = 0; rows.q != nullptr && i < columns; i += 4) {
            std::memset(rows.q + first + std::ptrdiff_t(i) * n + r * 4, 0, 4);
        }
        if (rows.scale != nullptr) rows.scale[place] = 0.0F;
        if (rows.sum != nullptr) rows.sum[place] = 0.0F;
        for (int half = 0; rows.halves != nullptr && half < 2; ++half) {
            rows.halves[2 * (place - r) + half * n + r] = 0;
        }
    }
};

// The activations of a call, laid out a chunk of rows at a time. The activations of a chunk stay in a core's L2 cache
// while all weights are read.
class Input {
  public:
    bool plan(const Matrix& m, const float* x, std::ptrdiff_t x_stride, int granules, int t, bool exact,
              Scratch& scratch) {
        m_ = m, x_ = x, x_stride_ = x_stride, granules_ = granules, t_ = t;
        chunk_ = chunk_rows(m, granules, t, exact || !multiplies_codes(m.kind));
        return Prepared::plan(m, granules, chunk_, exact, scratch, prepared_);
    }

    int chunk() const { return chunk_; }

    // Lays out the rows from `row` on, at most a chunk of them. All threads share the work and wait for each other.
    Rows chunk_at(const Team& team, int row) const {
        if (row > 0) team.barrier();  // all threads have used the chunk before
        Rows rows = prepared_.rows;
        rows.count = std::min(chunk_, t_ - row);
        const int per_granule = std::max(1, m_.groups()), per_row = per_granule * granules_;
        const auto [first, last] = team.share(rows.count * per_row);
        for (int i = first; i < last; ++i) {
            const int r = i / per_row, group = i % per_row, granule = group / per_granule;
            const float* from = x_ + (row + r) * x_stride_ + std::ptrdiff_t(granule) * m_.cols;
            Prepared::put(rows, m_, r, granule, group % per_granule, from);
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

// The cost of a call for `Pool::run`: the bytes of weights that it walks through, once per four rows.
std::size_t cost_of(const Granules& weights, std::size_t bytes_per_granule, int t) {
    return std::size_t(weights.count) * bytes_per_granule * std::size_t((t + 3) / 4);
}
std::size_t bytes_of(const Matrix& m) { return std::size_t(m.tiles()) * m.tile_bytes(); }

// Cuts a matrix into groups of `width` tiles that are multiplied together. With many rows kWideTiles tiles share a
// broadcast. With few rows it matters more that bytes are read in the order in which they lie. So tiles are taken one
// by one, unless they are so short that the work at their beginning and end is most of all work.
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

constexpr auto nothing = [](int, int) { return f_zero(); };  // `start` of `tile_rows` for sums that begin at 0

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
