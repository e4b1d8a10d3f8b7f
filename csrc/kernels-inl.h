// The ops for one instruction set: included once per translation unit, after its simd header.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "activation-inl.h"
#include "kernels.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Rows of activations multiplied with a tile at once. Eight int8 chains fill the registers of AVX-512 without a spill,
// and amortise unpacking nibbles (3 instructions for every 16 dot products).
constexpr int kRows = 8;

// Activations as the kernels read them. For float weights the rows as they are; for integer weights padded to whole
// groups, granule by granule: int8 with a scale per group, or (exact) float32; either with the sum of each group.
struct Rows {
    const float* f = nullptr;
    const std::int8_t* q = nullptr;
    std::ptrdiff_t stride = 0;  // elements of f or q from row to row
    const float* scale = nullptr;
    const float* sum = nullptr;
    std::ptrdiff_t group_stride = 0;

    // Seen from the first column and group of a later granule.
    Rows at(int columns, int groups) const {
        Rows r = *this;
        if (r.f != nullptr) r.f += columns;
        if (r.q != nullptr) r.q += columns;
        if (r.scale != nullptr) r.scale += groups;
        if (r.sum != nullptr) r.sum += groups;
        return r;
    }
};

template <class T>
T* take(Scratch& scratch, std::size_t count) {
    const std::size_t nbytes = (count * sizeof(T) + 63) / 64 * 64;
    if (nbytes > scratch.nbytes) return nullptr;
    auto* found = reinterpret_cast<T*>(scratch.data);
    scratch.data += nbytes;
    scratch.nbytes -= nbytes;
    return found;
}

// ---- one tile ------------------------------------------------------------------------------------------------------

template <int n>
void dot_float(const Matrix& m, const std::uint8_t* p, const Rows& x, std::ptrdiff_t row, F* acc) {
    // Two chains per row, even and odd columns: one fused multiply-add waits 4 cycles for the one before it.
    F even[n], odd[n];
    for (int r = 0; r < n; ++r) even[r] = odd[r] = f_zero();
    const float* a = x.f + row * x.stride;
    int c = 0;
    for (; c + 1 < m.cols; c += 2) {
        F w0, w1;
        if (m.kind == Kind::kBfloat16) {
            const Line both = line(p + std::size_t(c) * 32);
            w0 = f_bf16_even(both), w1 = f_bf16_odd(both);
        } else if (m.kind == Kind::kFloat16) {
            w0 = f_half(p + std::size_t(c) * 32), w1 = f_half(p + std::size_t(c) * 32 + 32);
        } else {
            w0 = f_load(p + std::size_t(c) * 64), w1 = f_load(p + std::size_t(c) * 64 + 64);
        }
        for (int r = 0; r < n; ++r) {
            even[r] = f_fma(w0, f_set(a[r * x.stride + c]), even[r]);
            odd[r] = f_fma(w1, f_set(a[r * x.stride + c + 1]), odd[r]);
        }
    }
    if (c < m.cols) {
        F w;
        if (m.kind == Kind::kBfloat16) {
            w = f_bf16_even(line(p + std::size_t(c) * 32));
        } else if (m.kind == Kind::kFloat16) {
            w = f_half(p + std::size_t(c) * 32);
        } else {
            w = f_load(p + std::size_t(c) * 64);
        }
        for (int r = 0; r < n; ++r) even[r] = f_fma(w, f_set(a[r * x.stride + c]), even[r]);
    }
    for (int r = 0; r < n; ++r) acc[r] = f_add(even[r], odd[r]);
}

// Σ groups: (Σ code · q) · (scale · x scale) + minimum · x sum.
template <int n, bool int4>
void dot_int8(const Matrix& m, const std::uint8_t* p, const Rows& x, std::ptrdiff_t row, F* acc) {
    const int lines = m.group / (int4 ? 8 : 4);
    for (int r = 0; r < n; ++r) acc[r] = f_zero();
    for (int j = 0; j < m.groups(); ++j) {
        const std::int8_t* a = x.q + row * x.stride + std::ptrdiff_t(j) * m.group;
        I even[n], odd[n];
        for (int r = 0; r < n; ++r) even[r] = odd[r] = i_zero();
        for (int i = 0; i < lines; ++i, p += 64) {
            const Line w = line(p);
            if constexpr (int4) {
                const Line low = low_nibbles(w), high = high_nibbles(w);
                for (int r = 0; r < n; ++r) {
                    even[r] = i_dot(even[r], low, a + r * x.stride + 8 * i);
                    odd[r] = i_dot(odd[r], high, a + r * x.stride + 8 * i + 4);
                }
            } else {
                for (int r = 0; r < n; ++r) even[r] = i_dot(even[r], w, a + r * x.stride + 4 * i);
            }
        }
        const F scale = f_half(p), minimum = f_half(p + 32);
        p += 64;
        for (int r = 0; r < n; ++r) {
            const std::ptrdiff_t at = (row + r) * x.group_stride + j;
            const I whole = int4 ? i_add(even[r], odd[r]) : even[r];
            acc[r] = f_fma(f_from(whole), f_mul(scale, f_set(x.scale[at])), acc[r]);
            acc[r] = f_fma(minimum, f_set(x.sum[at]), acc[r]);
        }
    }
}

// The same without rounding activations: Σ groups: (Σ code · x) · scale + minimum · x sum.
template <int n, bool int4>
void dot_exact(const Matrix& m, const std::uint8_t* p, const Rows& x, std::ptrdiff_t row, F* acc) {
    const int lines = m.group / (int4 ? 8 : 4);
    for (int r = 0; r < n; ++r) acc[r] = f_zero();
    for (int j = 0; j < m.groups(); ++j) {
        const float* a = x.f + row * x.stride + std::ptrdiff_t(j) * m.group;
        F even[n], odd[n];
        for (int r = 0; r < n; ++r) even[r] = odd[r] = f_zero();
        const auto four = [&](Line w, int column) {
            const F w0 = f_byte<0>(w), w1 = f_byte<1>(w), w2 = f_byte<2>(w), w3 = f_byte<3>(w);
            for (int r = 0; r < n; ++r) {
                const float* b = a + r * x.stride + column;
                even[r] = f_fma(w0, f_set(b[0]), even[r]);
                odd[r] = f_fma(w1, f_set(b[1]), odd[r]);
                even[r] = f_fma(w2, f_set(b[2]), even[r]);
                odd[r] = f_fma(w3, f_set(b[3]), odd[r]);
            }
        };
        for (int i = 0; i < lines; ++i, p += 64) {
            const Line w = line(p);
            if constexpr (int4) {
                four(low_nibbles(w), 8 * i);
                four(high_nibbles(w), 8 * i + 4);
            } else {
                four(w, 4 * i);
            }
        }
        const F scale = f_half(p), minimum = f_half(p + 32);
        p += 64;
        for (int r = 0; r < n; ++r) {
            const std::ptrdiff_t at = (row + r) * x.group_stride + j;
            acc[r] = f_fma(f_add(even[r], odd[r]), scale, acc[r]);
            acc[r] = f_fma(minimum, f_set(x.sum[at]), acc[r]);
        }
    }
}

template <int n>
void dot(const Matrix& m, const std::uint8_t* p, const Rows& x, std::ptrdiff_t row, F* acc) {
    if (!m.quantised()) {
        dot_float<n>(m, p, x, row, acc);
    } else if (x.q != nullptr) {
        m.kind == Kind::kInt4 ? dot_int8<n, true>(m, p, x, row, acc) : dot_int8<n, false>(m, p, x, row, acc);
    } else {
        m.kind == Kind::kInt4 ? dot_exact<n, true>(m, p, x, row, acc) : dot_exact<n, false>(m, p, x, row, acc);
    }
}

// sink(row, 16 outputs) for every row of x with one tile.
template <class Sink>
void tile_rows(const Matrix& m, const std::uint8_t* tile, const Rows& x, int t, const Sink& sink) {
    F acc[kRows];
    int row = 0;
    const auto step = [&]<int n>() {
        for (; row + n <= t; row += n) {
            dot<n>(m, tile, x, row, acc);
            for (int r = 0; r < n; ++r) sink(row + r, acc[r]);
        }
    };
    step.template operator()<kRows>();
    step.template operator()<4>();
    step.template operator()<2>();
    step.template operator()<1>();
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
