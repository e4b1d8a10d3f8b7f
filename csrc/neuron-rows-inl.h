// Rows of FFNs that lie neuron by neuron: a neuron's numbers, their products with activations, and their sums. `down`,
// and `up` beside a gate, lie neuron by neuron, and are not read for a neuron that does not fire. If the matrix that is
// activated (`gate`, or `up` without a gate) lies so too, nothing is read of neurons that are not active. Included
// after fours-inl.h.
//
// A neuron's row of D columns is added to the sum of its four as a whole, times the neuron's value. The neurons of a
// four are added in the order in which they lie, so that neither the neurons left out nor the threads change a bit.
#pragma once

#include <array>
#include <utility>

namespace penstock::PENSTOCK_ISA {
namespace {

// The most neurons whose rows are added at a time, so that a sum is loaded and stored once for them.
constexpr int kTogether = 8;
// Bytes that are fetched ahead of the place in the rows that are read side by side: further on in the same rows, then
// of the next rows. From RAM they go into the second cache. On an AMD EPYC (Zen 4) rows of float16 took 1.7 times as
// long with 8 KB ahead in the first cache. Rejected: to fetch the same place in the next kTogether rows, 64 KB ahead in
// float16, into the first cache. These bytes left it before they were read.
constexpr std::size_t kFetchedBytes = 32768;
// As kFetchedBytes, but into the first cache: where rows are in the second already, or few columns are at hand.
constexpr std::size_t kNearBytes = 8192;
constexpr int kFourNeurons = kSumNeurons;

inline std::size_t row_bytes(const Matrix& m) { return m.codes_bytes() + 4 * std::size_t(m.groups()); }
inline const std::uint8_t* row_at(const Matrix& m, const std::uint8_t* granule, int neuron) {
    return granule + m.offset + std::size_t(neuron) * m.row_stride;
}
// A neuron's bias, which lies at byte `at` of the granule with those of all its neurons (0: there are none).
inline float bias_of(const std::uint8_t* granule, std::size_t at, int neuron) {
    return at != 0 ? reinterpret_cast<const float*>(granule + at)[neuron] : 0.0F;
}
// Bytes of a granule's records if all its neurons fire: the cost of a granule, for `Pool::run`.
inline std::size_t neuron_bytes(const FfnShape& shape) {
    const std::size_t rows = (shape.gate.rows > 0 ? 2 : 1) + (shape.by_records() ? 1 : 0);
    return std::size_t(shape.up.rows) * row_bytes(shape.down) * rows;
}

// Reads the numbers of one neuron's row, 32 columns at a time.
template <Kind kind>
struct NeuronRow {
    static constexpr bool kScaled = kind == Kind::kInt8 || kind == Kind::kInt4;
    // Bytes of 32 columns.
    static constexpr int kStep = kind == Kind::kInt4      ? 16
                                 : kind == Kind::kInt8    ? 32
                                 : kind == Kind::kFloat32 ? 128
                                                          : 64;
    const std::uint8_t *codes, *scales, *minimums;
    F scale, minimum;

    NeuronRow(const Matrix& m, const std::uint8_t* row)
        : codes(row),
          scales(row + m.codes_bytes()),
          minimums(scales + 2 * std::size_t(m.groups())),
          scale(f_zero()),
          minimum(f_zero()) {}
    // Goes to group g. Floats have none.
    void group(int g) {
        if constexpr (kScaled) scale = f_half_of(scales + 2 * g), minimum = f_half_of(minimums + 2 * g);
    }
    void two(int column, F& low, F& high) const {
        if constexpr (kind == Kind::kInt4) {
            f_nibbles(codes + column / 2, scale, minimum, low, high);
        } else if constexpr (kind == Kind::kInt8) {
            low = f_fma(f_bytes(codes + column), scale, minimum);
            high = f_fma(f_bytes(codes + column + 16), scale, minimum);
        } else if constexpr (kind == Kind::kFloat32) {
            low = f_load(codes + 4 * column), high = f_load(codes + 4 * column + 64);
        } else if constexpr (kind == Kind::kFloat16) {
            low = f_half(codes + 2 * column), high = f_half(codes + 2 * column + 32);
        } else {
            low = f_bf16(codes + 2 * column), high = f_bf16(codes + 2 * column + 32);
        }
    }
};

// Calls each(column) for every 32nd column of [lo, hi), and enter(g) before the first column of a group. Groups are
// counted. When each column was divided by the group's size, a row of int4 in groups of 64 took two thirds longer.
template <Kind kind, class Enter, class Each>
[[gnu::always_inline]] inline void walk(const Matrix& m, int lo, int hi, const Enter& enter, const Each& each) {
    if (lo >= hi) return;
    const int group = NeuronRow<kind>::kScaled ? m.group : up_to(m.cols, kLineColumns);
    int g = lo / group;
    for (int c = lo; c < hi; ++g) {
        enter(g);
        for (const int end = std::min(hi, (g + 1) * group); c < end; c += kLineColumns) each(c);
    }
}

// sum [count] += Σ over k neurons: value · the first `count` of 32 numbers of its row. For the last columns of rows.
template <int k>
[[gnu::noinline]] void add_last(const F (&low)[k], const F (&high)[k], const float* const* values, int row, int count,
                                float* sum) {
    F a = load_some(sum, count), b = count > 16 ? load_some(sum + 16, count - 16) : f_zero();
    for (int i = 0; i < k; ++i) {
        const F value = f_set(values[i][row]);
        a = f_fma(value, low[i], a), b = f_fma(value, high[i], b);
    }
    store_some(sum, a, count);
    if (count > 16) store_some(sum + 16, b, count - 16);
}

// to [t, hi - lo] += Σ k neurons: value · columns [lo, hi) of their rows. `values` [k]: of each neuron, its value in
// each of the t rows. `one`: t is 1. `lo`: a multiple of 512. While rows are used, kFetchedBytes are fetched: further
// on in these rows, then of the rows `next` [k]. `near`: kNearBytes are fetched instead, into the first cache.
template <Kind kind, int k, bool one, bool near = false>
void add_rows(const Matrix& m, const std::uint8_t* const* at, const float* const* values, int t, int lo, int hi,
              float* to, const std::uint8_t* const* next) {
    const auto readers = [&]<std::size_t... i>(std::index_sequence<i...>) {
        return std::array<NeuronRow<kind>, k>{NeuronRow<kind>(m, at[i])...};
    };
    auto rows = readers(std::make_index_sequence<k>());
    F first[k];
    for (int i = 0; i < k; ++i) first[i] = f_set(values[i][0]);
    const int whole = hi < m.cols ? hi : m.cols / kLineColumns * kLineColumns;
    const std::ptrdiff_t apart = hi - lo;
    const auto enter = [&](int g) {
        for (std::size_t i = 0; i < k; ++i) rows[i].group(g);
    };
    constexpr std::size_t kStep = NeuronRow<kind>::kStep;
    const std::size_t from = std::size_t(lo) / kLineColumns * kStep;
    const std::size_t end = (std::size_t(hi) + kLineColumns - 1) / kLineColumns * kStep;
    const std::size_t ahead = std::min((near ? kNearBytes : kFetchedBytes) / k, end - from);
    for (int i = 0; i < k; ++i) prefetch_run(next[i] + m.codes_bytes(), row_bytes(m) - m.codes_bytes());
    walk<kind>(m, lo, whole, enter, [&](int c) {
        const std::size_t at_byte = std::size_t(c) / kLineColumns * kStep, later = at_byte + ahead;
        if (kStep >= 64 || at_byte % 64 == 0) {
            for (int i = 0; i < k; ++i) {
                const std::uint8_t* const p = later < end ? at[i] + later : next[i] + from + (later - end);
                __builtin_prefetch(p, 0, near ? 3 : 2);
                if constexpr (kStep > 64) __builtin_prefetch(p + 64, 0, near ? 3 : 2);
            }
        }
        if constexpr (one) {
            float* const sum = to + (c - lo);
            F a = f_load(sum), b = f_load(sum + 16);
            for (int i = 0; i < k; ++i) {
                F low, high;
                rows[std::size_t(i)].two(c, low, high);
                a = f_fma(first[i], low, a), b = f_fma(first[i], high, b);
            }
            f_store(sum, a), f_store(sum + 16, b);
        } else {
            F low[k], high[k];
            for (int i = 0; i < k; ++i) rows[std::size_t(i)].two(c, low[i], high[i]);
            for (int row = 0; row < t; ++row) {
                float* const sum = to + row * apart + (c - lo);
                F a = f_load(sum), b = f_load(sum + 16);
                for (int i = 0; i < k; ++i) {
                    const F value = f_set(values[i][row]);
                    a = f_fma(value, low[i], a), b = f_fma(value, high[i], b);
                }
                f_store(sum, a), f_store(sum + 16, b);
            }
        }
    });
    walk<kind>(m, whole, hi, enter, [&](int c) {
        F low[k], high[k];
        for (int i = 0; i < k; ++i) rows[std::size_t(i)].two(c, low[i], high[i]);
        for (int row = 0; row < t; ++row) {
            add_last<k>(low, high, values, row, hi - c, to + row * apart + (c - lo));
        }
    });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
