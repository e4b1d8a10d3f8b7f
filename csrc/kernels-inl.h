// The ops for one instruction set: included once per translation unit, after its simd header.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "activation-inl.h"
#include "kernels.h"
#include "tile-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

template <class T>
T* take(Scratch& scratch, std::size_t count) {
    const std::size_t nbytes = (count * sizeof(T) + 63) / 64 * 64;
    if (nbytes > scratch.nbytes) return nullptr;
    auto* found = reinterpret_cast<T*>(scratch.data);
    scratch.data += nbytes;
    scratch.nbytes -= nbytes;
    return found;
}

// ---- activations of a call -----------------------------------------------------------------------------------------

// One group of a row: int8 with scale = max / 127, or a padded copy.
void prepare_group(const float* from, int count, int group, std::int8_t* q, float* f, float* scale, float* sum) {
    if (f != nullptr) {
        float total = 0;
        for (int i = 0; i < group; ++i) f[i] = i < count ? from[i] : 0.0F;
        for (int i = 0; i < count; ++i) total += from[i];
        *sum = total;
        return;
    }
    // The largest magnitude as bits: floats of one sign order like integers, and NaN is above all of them.
    std::uint32_t most_bits = 0;
    for (int i = 0; i < count; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        most_bits = std::max(most_bits, bits & 0x7fffffffU);
    }
    float most;
    std::memcpy(&most, &most_bits, 4);
    const float up = most > 0 && most_bits < 0x7f800000U ? 127.0F / most : 0.0F;
    std::int32_t total = 0;
    for (int i = 0; i < count; ++i) {
        // Adding and taking away 1.5 · 2^23 rounds to nearest even, and unlike lrintf is vectorised.
        const float rounded = (from[i] * up + 12582912.0F) - 12582912.0F;
        q[i] = static_cast<std::int8_t>(rounded);
        total += q[i];
    }
    for (int i = count; i < group; ++i) q[i] = 0;
    // NaN and infinite activations stay visible in the scale: damaged weights must not pass for zeros.
    *scale = most / 127.0F;
    *sum = *scale * static_cast<float>(total);
}

// Lays out the activations of `granules` granules, `m.cols` columns each. All threads share the work; a barrier has
// to follow. False: scratch is too small.
struct Prepared {
    Rows rows;
    std::int8_t* q = nullptr;
    float* f = nullptr;
    float *scale = nullptr, *sum = nullptr;

    static bool plan(const Matrix& m, const float* x, std::ptrdiff_t x_stride, int granules, int t, bool exact,
                     Scratch& scratch, Prepared& to) {
        if (!m.quantised()) {
            to.rows = Rows{.f = x, .stride = x_stride};
            return true;
        }
        const std::size_t groups = std::size_t(m.groups()) * std::size_t(granules), rows = std::size_t(t);
        const std::size_t width = groups * std::size_t(m.group);
        to.sum = take<float>(scratch, rows * groups);
        if (exact) {
            to.f = take<float>(scratch, rows * width);
        } else {
            to.q = take<std::int8_t>(scratch, rows * width);
            to.scale = take<float>(scratch, rows * groups);
        }
        to.rows = Rows{.f = to.f,
                       .q = to.q,
                       .stride = std::ptrdiff_t(width),
                       .scale = to.scale,
                       .sum = to.sum,
                       .group_stride = std::ptrdiff_t(groups)};
        return to.sum != nullptr && (to.f != nullptr || (to.q != nullptr && to.scale != nullptr));
    }

    void fill(const Team& team, const Matrix& m, const float* x, std::ptrdiff_t x_stride, int granules, int t) const {
        if (!m.quantised()) return;
        const int per_granule = m.groups(), per_row = per_granule * granules;
        const auto [first, last] = team.share(t * per_row);
        for (int i = first; i < last; ++i) {
            const int row = i / per_row, at = i % per_row, granule = at / per_granule, j = at % per_granule;
            const int column = j * m.group, count = std::min(m.group, m.cols - column);
            const float* from = x + row * x_stride + std::ptrdiff_t(granule) * m.cols + column;
            const std::ptrdiff_t to = row * rows.stride + std::ptrdiff_t(at) * m.group;
            const std::ptrdiff_t place = row * rows.group_stride + at;
            prepare_group(from, count, m.group, q ? q + to : nullptr, f ? f + to : nullptr,
                          scale ? scale + place : nullptr, sum + place);
        }
    }
};

void store_some(float* to, F x, int count) {
    if (count >= kTileRows) {
        f_store(to, x);
        return;
    }
    float lanes[kTileRows];
    f_store(lanes, x);
    for (int i = 0; i < count; ++i) to[i] = lanes[i];
}

void add_some(float* to, F x, int count) {
    if (count >= kTileRows) {
        f_store(to, f_add(f_load(to), x));
        return;
    }
    float lanes[kTileRows];
    f_store(lanes, x);
    for (int i = 0; i < count; ++i) to[i] += lanes[i];
}

// What a call walks through, in bytes; arithmetic counts from four rows on.
std::size_t cost_of(const Granules& weights, std::size_t bytes_per_granule, int t) {
    return std::size_t(weights.count) * bytes_per_granule * std::size_t((t + 3) / 4);
}
std::size_t bytes_of(const Matrix& m) { return std::size_t(m.tiles()) * m.tile_bytes(); }

// ---- ops -----------------------------------------------------------------------------------------------------------

bool project(Pool& pool, const Granules& weights, const Matrix& m, const float* x, std::ptrdiff_t x_stride, int t,
             float* out, std::ptrdiff_t out_stride, int out_cols, bool exact, Scratch scratch) {
    Prepared prepared;
    if (!Prepared::plan(m, x, x_stride, 1, t, exact, scratch, prepared)) return false;
    pool.run(cost_of(weights, bytes_of(m), t), [&](const Team& team) {
        prepared.fill(team, m, x, x_stride, 1, t);
        if (m.quantised()) team.barrier();
        const int tiles = m.tiles();
        const auto [first, last] = team.share(weights.count * tiles);
        for (int i = first; i < last; ++i) {
            const int granule = i / tiles, tile = i % tiles, column = granule * m.rows + tile * kTileRows;
            const int count = std::min({kTileRows, m.rows - tile * kTileRows, out_cols - column});
            if (count <= 0) continue;
            const std::uint8_t* p =
                weights.data + std::size_t(granule) * weights.stride + m.offset + std::size_t(tile) * m.tile_bytes();
            tile_rows(m, p, prepared.rows, t,
                      [&](int row, F y) { store_some(out + row * out_stride + column, y, count); });
        }
    });
    return true;
}

// This thread's tiles of `sum`, granule by granule: weights are read in the order in which they lie.
void accumulate_share(const Team& team, const Granules& weights, const Matrix& m, const Rows& x, int t, float* sum,
                      bool first_granule) {
    const auto [first, last] = team.share(m.tiles());
    for (int g = 0; g < weights.count; ++g) {
        const int width = m.quantised() ? m.groups() * m.group : m.cols;
        const Rows seen = x.at(g * width, g * m.groups());
        for (int tile = first; tile < last; ++tile) {
            const std::uint8_t* p =
                weights.data + std::size_t(g) * weights.stride + m.offset + std::size_t(tile) * m.tile_bytes();
            const int column = tile * kTileRows, count = std::min(kTileRows, m.rows - column);
            tile_rows(m, p, seen, t, [&](int row, F y) {
                float* to = sum + std::ptrdiff_t(row) * m.rows + column;
                if (first_granule && g == 0) {
                    // 0 + y, as for the granules that follow: the sum of a unit that starts later has the same bits.
                    store_some(to, f_add(f_zero(), y), count);
                } else {
                    add_some(to, y, count);
                }
            });
        }
    }
}

bool accumulate(Pool& pool, const Granules& weights, const Matrix& m, const float* x, std::ptrdiff_t x_stride, int t,
                float* sum, bool first, bool exact, Scratch scratch) {
    Prepared prepared;
    if (!Prepared::plan(m, x, x_stride, weights.count, t, exact, scratch, prepared)) return false;
    pool.run(cost_of(weights, bytes_of(m), t), [&](const Team& team) {
        prepared.fill(team, m, x, x_stride, weights.count, t);
        if (m.quantised()) team.barrier();
        accumulate_share(team, weights, m, prepared.rows, t, sum, first);
    });
    return true;
}

bool ffn(Pool& pool, const Granules& weights, const FfnShape& shape, const float* h, int t, float* partial, bool first,
         bool exact, Scratch scratch) {
    const Matrix &up = shape.up, &down = shape.down;
    const bool gated = shape.gate.rows > 0;
    const int neurons = up.rows;
    Prepared input;
    if (!Prepared::plan(up, h, up.cols, 1, t, exact, scratch, input)) return false;
    // As many granules at a time as the scratch holds hidden values of, up to 64: more gains nothing.
    int block = std::min(weights.count, 64);
    float *hidden = nullptr, *gates = nullptr;
    Prepared inner;
    for (; block > 0; block = block > 1 ? block / 2 : 0) {
        Scratch left = scratch;
        const std::size_t values = std::size_t(t) * std::size_t(block) * std::size_t(neurons);
        hidden = take<float>(left, values);
        gates = gated ? take<float>(left, values) : hidden;
        if (hidden != nullptr && gates != nullptr &&
            Prepared::plan(down, hidden, std::ptrdiff_t(block) * neurons, block, t, exact, left, inner)) {
            break;
        }
    }
    if (block == 0) return false;
    const std::ptrdiff_t stride = std::ptrdiff_t(block) * neurons;
    pool.run(cost_of(weights, bytes_of(up) * (gated ? 2 : 1) + bytes_of(down), t), [&](const Team& team) {
        input.fill(team, up, h, up.cols, 1, t);
        for (int begin = 0; begin < weights.count; begin += block) {
            const int granules = std::min(block, weights.count - begin), tiles = up.tiles();
            const std::uint8_t* base = weights.data + std::size_t(begin) * weights.stride;
            team.barrier();  // the input is ready; hidden values of the block before are used up
            const auto [lo, hi] = team.share(granules * tiles);
            for (int i = lo; i < hi; ++i) {
                const int granule = i / tiles, tile = i % tiles, neuron = tile * kTileRows;
                const std::uint8_t* at = base + std::size_t(granule) * weights.stride;
                const std::ptrdiff_t column = std::ptrdiff_t(granule) * neurons + neuron;
                const auto fill = [&](const Matrix& m, std::size_t bias, float* to) {
                    const F b = bias ? f_load(at + bias + std::size_t(neuron) * 4) : f_zero();
                    tile_rows(m, at + m.offset + std::size_t(tile) * m.tile_bytes(), input.rows, t,
                              [&](int row, F y) { f_store(to + row * stride + column, bias ? f_add(y, b) : y); });
                };
                fill(up, shape.up_bias, hidden);
                if (gated) fill(shape.gate, shape.gate_bias, gates);
                for (int row = 0; row < t; ++row) {
                    float* to = hidden + row * stride + column;
                    activate(shape.activation, gates + row * stride + column, gated ? to : nullptr, to, kTileRows);
                }
            }
            team.barrier();
            if (down.quantised()) {
                inner.fill(team, down, hidden, stride, granules, t);
                team.barrier();
            }
            accumulate_share(team, {base, granules, weights.stride}, down, inner.rows, t, partial, first && begin == 0);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
