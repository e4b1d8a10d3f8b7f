// FFNs whose `up` (where there is a gate) and `down` lie neuron by neuron: what multiplies a neuron that does not fire
// is not read. Where `gate` (or `up` without one) lies so too, nothing is read of neurons that are not active. Included
// after fours-inl.h.
//
// A neuron's row of D columns is added to the sum of its four as a whole, times the neuron's value. The neurons of a
// four are added in the order in which they lie, so that neither the neurons left out nor the threads change a bit.
#pragma once

#include <array>
#include <atomic>
#include <utility>

namespace penstock::PENSTOCK_ISA {
namespace {

// The most neurons whose rows are added at a time, so that a sum is loaded and stored once for them.
constexpr int kTogether = 8;
constexpr int kFourNeurons = kSumGranules * kGranuleRows;

inline std::size_t row_bytes(const Matrix& m) { return m.codes_bytes() + 4 * std::size_t(m.groups()); }
inline const std::uint8_t* row_at(const Matrix& m, const std::uint8_t* granule, int neuron) {
    return granule + m.offset + std::size_t(neuron) * m.row_stride;
}
// Bytes of a granule's records, for `Pool::run`: as if all fired.
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

// Calls run.operator()<kind>() for the matrix's kind.
template <class Run>
void by_kind(const Matrix& m, const Run& run) {
    switch (m.kind) {
        case Kind::kFloat32:
            return run.template operator()<Kind::kFloat32>();
        case Kind::kFloat16:
            return run.template operator()<Kind::kFloat16>();
        case Kind::kBfloat16:
            return run.template operator()<Kind::kBfloat16>();
        case Kind::kInt8:
            return run.template operator()<Kind::kInt8>();
        case Kind::kInt4:
            return run.template operator()<Kind::kInt4>();
        default:  // formats in blocks do not lie neuron by neuron
            return;
    }
}

// Calls each(column) for every 32nd column of [lo, hi), and enter(g) before the first column of a group.
template <Kind kind, class Enter, class Each>
[[gnu::always_inline]] inline void walk(const Matrix& m, int lo, int hi, const Enter& enter, const Each& each) {
    const int group = NeuronRow<kind>::kScaled ? m.group : up_to(m.cols, kLineColumns);
    for (int c = lo; c < hi;) {
        enter(c / group);
        for (const int end = std::min(hi, (c / group + 1) * group); c < end; c += kLineColumns) each(c);
    }
}

// y [n] = x[i] [D] · a neuron's row, for n rows of activations.
template <Kind kind, int n>
void dot_row(const Matrix& m, const std::uint8_t* at, const float* const* x, float* y) {
    NeuronRow<kind> row(m, at);
    F even[n], odd[n];
    for (int i = 0; i < n; ++i) even[i] = odd[i] = f_zero();
    const int whole = m.cols / kLineColumns * kLineColumns;
    const auto enter = [&](int g) { row.group(g); };
    walk<kind>(m, 0, whole, enter, [&](int c) {
        F low, high;
        row.two(c, low, high);
        for (int i = 0; i < n; ++i) {
            even[i] = f_fma(low, f_load(x[i] + c), even[i]);
            odd[i] = f_fma(high, f_load(x[i] + c + 16), odd[i]);
        }
    });
    walk<kind>(m, whole, m.cols, enter, [&](int c) {
        F low, high;
        row.two(c, low, high);
        const int left = m.cols - c;
        for (int i = 0; i < n; ++i) {
            even[i] = f_fma(low, load_some(x[i] + c, left), even[i]);
            if (left > 16) odd[i] = f_fma(high, load_some(x[i] + c + 16, left - 16), odd[i]);
        }
    });
    for (int i = 0; i < n; ++i) y[i] = f_sum(f_add(even[i], odd[i]));
}

// Calls to(i, x[i] · a neuron's row of m, plus its bias) for `count` rows of activations. `bias_at`: the byte of the
// granule where m's biases begin (0: none).
template <Kind kind, class To>
void dot_rows(const Matrix& m, std::size_t bias_at, const std::uint8_t* granule, int neuron, const float* const* x,
              int count, const To& to) {
    const std::uint8_t* const row = row_at(m, granule, neuron);
    const float bias = bias_at != 0 ? reinterpret_cast<const float*>(granule + bias_at)[neuron] : 0.0F;
    float y[4];
    for (int i = 0; i < count;) {
        int n = 1;
        if (count - i >= 4) {
            dot_row<kind, 4>(m, row, x + i, y), n = 4;
        } else if (count - i >= 2) {
            dot_row<kind, 2>(m, row, x + i, y), n = 2;
        } else {
            dot_row<kind, 1>(m, row, x + i, y);
        }
        for (int j = 0; j < n; ++j) to(i + j, y[j] + bias);
        i += n;
    }
}

// values [count] *= x[i] · a neuron's row of `up`, plus its bias.
template <Kind kind>
void times_up(const FfnShape& shape, const std::uint8_t* granule, int neuron, const float* const* x, int count,
              float* values) {
    dot_rows<kind>(shape.up, shape.up_bias, granule, neuron, x, count, [&](int i, float y) { values[i] *= y; });
}

// sum [count] += Σ k neurons: value · its 32 numbers, of which `count` are wanted, at the end of a row.
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

// to [t, D] += Σ k neurons: value · row. `values` [k]: of each neuron, its value in each of the t rows. `one`: t is 1.
// While a row is used, as much of another one is fetched: `next` [k].
template <Kind kind, int k, bool one>
void add_rows(const Matrix& m, const std::uint8_t* const* at, const float* const* values, int t, float* to,
              const std::uint8_t* const* next) {
    const auto readers = [&]<std::size_t... i>(std::index_sequence<i...>) {
        return std::array<NeuronRow<kind>, k>{NeuronRow<kind>(m, at[i])...};
    };
    auto rows = readers(std::make_index_sequence<k>());
    F first[k];
    for (int i = 0; i < k; ++i) first[i] = f_set(values[i][0]);
    const int whole = m.cols / kLineColumns * kLineColumns;
    const auto enter = [&](int g) {
        for (std::size_t i = 0; i < k; ++i) rows[i].group(g);
    };
    constexpr std::ptrdiff_t kStep = NeuronRow<kind>::kStep;
    for (int i = 0; i < k; ++i) prefetch_run(next[i] + m.codes_bytes(), row_bytes(m) - m.codes_bytes());
    walk<kind>(m, 0, whole, enter, [&](int c) {
        const std::ptrdiff_t at_byte = c / kLineColumns * kStep;
        if (kStep >= 64 || at_byte % 64 == 0) {
            for (int i = 0; i < k; ++i) {
                __builtin_prefetch(next[i] + at_byte);
                if constexpr (kStep > 64) __builtin_prefetch(next[i] + at_byte + 64);
            }
        }
        if constexpr (one) {
            F a = f_load(to + c), b = f_load(to + c + 16);
            for (int i = 0; i < k; ++i) {
                F low, high;
                rows[std::size_t(i)].two(c, low, high);
                a = f_fma(first[i], low, a), b = f_fma(first[i], high, b);
            }
            f_store(to + c, a), f_store(to + c + 16, b);
        } else {
            F low[k], high[k];
            for (int i = 0; i < k; ++i) rows[std::size_t(i)].two(c, low[i], high[i]);
            for (int row = 0; row < t; ++row) {
                float* const sum = to + std::ptrdiff_t(row) * m.cols + c;
                F a = f_load(sum), b = f_load(sum + 16);
                for (int i = 0; i < k; ++i) {
                    const F value = f_set(values[i][row]);
                    a = f_fma(value, low[i], a), b = f_fma(value, high[i], b);
                }
                f_store(sum, a), f_store(sum + 16, b);
            }
        }
    });
    walk<kind>(m, whole, m.cols, enter, [&](int c) {
        F low[k], high[k];
        for (int i = 0; i < k; ++i) rows[std::size_t(i)].two(c, low[i], high[i]);
        for (int row = 0; row < t; ++row) {
            add_last<k>(low, high, values, row, m.cols - c, to + std::ptrdiff_t(row) * m.cols + c);
        }
    });
}

// ---- few rows: a thread takes whole fours ---------------------------------------------------------------------------

// The neurons of a four that any row wants, in the order in which they lie.
struct Wanted {
    int count = 0;
    std::int16_t at[kFourNeurons];                     // granule of the four times kGranuleRows, plus neuron
    alignas(64) float values[kFourNeurons][kFewRows];  // [wanted neuron][row]
};

// Lists the neurons of a four that some row fires. Their activation is computed granule by granule, in tiles, unless
// it is there.
void list_fired(const FfnOp& op, const Four& four, const Zeros& zeros, const Rows& x, Wanted& wanted) {
    alignas(64) float computed[kFewRows * kGranuleRows];
    const auto granule_at = [&](int g) { return op.weights.data + std::size_t(four.lo + g) * op.weights.stride; };
    for (int g = 0; g < four.hi - four.lo; ++g) {
        const Zeros here = zeros.at(0, four.lo + g);
        const float* fired = computed;
        bool any;
        if (op.values != nullptr) {
            fired = op.values + std::ptrdiff_t(four.lo + g) * x.count * kGranuleRows;
            any = !all_zero(fired, x.count * kGranuleRows);
            for (int row = 0; row < x.count; ++row) here.note(row, fired + row * kGranuleRows, op.shape.up.rows);
        } else {
            const std::uint8_t* const next = granule_at(g + 1 < four.hi - four.lo ? g + 1 : g);
            any = fire(op.shape, granule_at(g), next, x, 0, x.count, here, computed);
        }
        if (!any && op.skips) continue;
        for (int i = 0; i < op.shape.up.rows; ++i) {
            float* const values = wanted.values[wanted.count];
            bool wants = !op.skips;
            for (int row = 0; row < x.count; ++row) {
                values[row] = fired[row * kGranuleRows + i];
                wants = wants || values[row] != 0.0F;
            }
            if (wants) wanted.at[wanted.count++] = static_cast<std::int16_t>(g * kGranuleRows + i);
        }
    }
}

// Lists the neurons of a four that are active in some of t rows.
void list_active(const FfnOp& op, const Four& four, const Zeros& zeros, int t, Wanted& wanted) {
    for (int g = 0; g < four.hi - four.lo; ++g) {
        const Zeros here = zeros.at(0, four.lo + g);
        for (int row = 0; here.fired != nullptr && row < t; ++row) {
            std::fill_n(here.fired + row * here.stride, op.shape.up.rows, std::uint8_t{0});
        }
        if (!here.any_active(0, t, op.shape.up.rows)) continue;
        for (int i = 0; i < op.shape.up.rows; ++i) {
            bool wants = false;
            for (int row = 0; row < t; ++row) wants = wants || here.is_active(row, i);
            if (wants) wanted.at[wanted.count++] = static_cast<std::int16_t>(g * kGranuleRows + i);
        }
    }
}

// Computes the activations of the neurons that are listed, for t rows of h, and leaves those in the list that fire.
void fire_records(const FfnOp& op, const Four& four, const Zeros& zeros, const float* const* h, int t, Wanted& wanted) {
    const FfnShape& shape = op.shape;
    const Matrix& first = shape.first();
    const auto granule_at = [&](int g) { return op.weights.data + std::size_t(four.lo + g) * op.weights.stride; };
    const auto fetch = [&](int i) {
        if (i >= wanted.count) return;
        const int g = wanted.at[i] / kGranuleRows;
        prefetch_run(row_at(first, granule_at(g), wanted.at[i] % kGranuleRows), row_bytes(first));
    };
    constexpr int kRowsAhead = 3;
    for (int i = 0; i < kRowsAhead; ++i) fetch(i);
    by_kind(first, [&]<Kind kind>() {
        for (int i = 0; i < wanted.count; ++i) {
            fetch(i + kRowsAhead);
            float* const values = wanted.values[i];
            std::fill(values + t, values + kFewRows, 0.0F);
            dot_rows<kind>(first, shape.first_bias(), granule_at(wanted.at[i] / kGranuleRows),
                           wanted.at[i] % kGranuleRows, h, t, [&](int row, float y) { values[row] = y; });
        }
    });
    float* const all = wanted.values[0];
    const int numbers = wanted.count * kFewRows;
    std::fill(all + numbers, all + up_to(numbers, kTileRows), 0.0F);
    activate(shape.activation, all, nullptr, all, up_to(numbers, kTileRows));
    int kept = 0;
    for (int i = 0; i < wanted.count; ++i) {
        const int neuron = wanted.at[i] % kGranuleRows;
        const Zeros here = zeros.at(0, four.lo + wanted.at[i] / kGranuleRows);
        bool wants = !op.skips;
        float values[kFewRows];
        for (int row = 0; row < t; ++row) {
            values[row] = here.counts(row, neuron, wanted.values[i][row]);
            wants = wants || values[row] != 0.0F;
            if (here.fired != nullptr) here.fired[row * here.stride + neuron] = values[row] != 0.0F;
        }
        if (!wants) continue;
        wanted.at[kept] = wanted.at[i];
        std::copy_n(values, t, wanted.values[kept++]);
    }
    wanted.count = kept;
}

// to [T, D] = the sum over the neurons of a four.
void sum_neurons(const FfnOp& op, const Rows& x, const Four& four, float* to) {
    const FfnShape& shape = op.shape;
    const Matrix& down = shape.down;
    const bool gated = shape.gate.rows > 0;
    const int t = x.count, d = shape.width();
    const Zeros zeros = zeros_of(op);
    Wanted wanted;
    const float* h[kFewRows];
    for (int row = 0; row < t; ++row) h[row] = op.h + std::ptrdiff_t(row) * d;
    const auto granule_at = [&](int g) { return op.weights.data + std::size_t(four.lo + g) * op.weights.stride; };
    const auto granule_of = [&](int i) { return granule_at(wanted.at[i] / kGranuleRows); };
    if (shape.by_records()) {
        list_active(op, four, zeros, t, wanted);
        fire_records(op, four, zeros, h, t, wanted);
    } else {
        list_fired(op, four, zeros, x, wanted);
    }
    // Rows lie apart, and the processor's own prefetcher finds none of them. The first ones are fetched now, the others
    // while those before them are used.
    for (int i = 0; i < std::min(wanted.count, kTogether); ++i) {
        const int neuron = wanted.at[i] % kGranuleRows;
        if (gated) prefetch_run(row_at(shape.up, granule_of(i), neuron), row_bytes(shape.up));
        prefetch_run(row_at(down, granule_of(i), neuron), row_bytes(down));
    }
    if (gated) {
        by_kind(shape.up, [&]<Kind kind>() {
            for (int i = 0; i < wanted.count; ++i) {
                if (i + 1 < wanted.count) {
                    const std::uint8_t* next = row_at(shape.up, granule_of(i + 1), wanted.at[i + 1] % kGranuleRows);
                    prefetch_run(next, row_bytes(shape.up));
                }
                times_up<kind>(shape, granule_of(i), wanted.at[i] % kGranuleRows, h, t, wanted.values[i]);
            }
        });
    }
    begin_sum(four.continues ? op.sum.pending : nullptr, std::size_t(t) * std::size_t(d), to);
    by_kind(down, [&]<Kind kind>() {
        const std::uint8_t *rows[kTogether], *next[kTogether];
        const float* values[kTogether];
        const auto row_of = [&](int i) { return row_at(down, granule_of(i), wanted.at[i] % kGranuleRows); };
        for (int i = 0; i < wanted.count;) {
            const int left = wanted.count - i;
            const int n = left >= 8 && t == 1 ? 8 : left >= 4 ? 4 : 1;
            for (int j = 0; j < n; ++j) {
                rows[j] = row_of(i + j), values[j] = wanted.values[i + j];
                next[j] = i + n + j < wanted.count ? row_of(i + n + j) : rows[j];
            }
            const auto add = [&]<bool one>() {
                if constexpr (one) {
                    if (n == 8) return add_rows<kind, 8, one>(down, rows, values, t, to, next);
                }
                n == 4 ? add_rows<kind, 4, one>(down, rows, values, t, to, next)
                       : add_rows<kind, 1, one>(down, rows, values, t, to, next);
            };
            t == 1 ? add.template operator()<true>() : add.template operator()<false>();
            i += n;
        }
    });
}

// ---- many rows: threads share the hidden values of some granules, then the columns of their sum ---------------------

// The values of a granule's neurons: of each neuron `count` rows that want it, and its value in each.
struct Values {
    float* value;               // [neuron][rows]
    std::int32_t *row, *count;  // [neuron][rows], [neuron]
    int rows;

    static bool take_from(Scratch& scratch, int rows, Values& to) {
        const std::size_t all = std::size_t(kGranuleRows) * std::size_t(rows);
        to = {take<float>(scratch, all), take<std::int32_t>(scratch, all), take<std::int32_t>(scratch, kGranuleRows),
              rows};
        return to.value != nullptr && to.row != nullptr && to.count != nullptr;
    }
};

// out [end - from, kGranuleRows] = the activations of a granule's records for rows [from, end) of h, which lie D
// apart; 0 where a neuron is not active.
void fire_rows(const FfnShape& shape, const std::uint8_t* granule, const float* h, int from, int end,
               const Zeros& zeros, float* out) {
    const Matrix& first = shape.first();
    by_kind(first, [&]<Kind kind>() {
        for (int i = 0; i < shape.up.rows; ++i) {
            const float* rows[kHiddenRows];
            int at[kHiddenRows], count = 0;
            for (int row = from; row < end; ++row) {
                out[(row - from) * kGranuleRows + i] = 0.0F;
                if (!zeros.is_active(row, i)) continue;
                rows[count] = h + std::ptrdiff_t(row) * shape.width(), at[count++] = row - from;
            }
            dot_rows<kind>(first, shape.first_bias(), granule, i, rows, count,
                           [&](int j, float y) { out[at[j] * kGranuleRows + i] = y; });
        }
    });
    for (int row = from; row < end; ++row) {
        float* const x = out + (row - from) * kGranuleRows;
        activate(shape.activation, x, nullptr, x, shape.up.rows);
        zeros.keep_counting(row, x, shape.up.rows);
        zeros.note(row, x, shape.up.rows);
    }
}

// Computes the values of granule g for the rows x, which begin at row0 of the call.
void value_neurons(const FfnOp& op, int g, const Rows& x, int row0, const Values& to) {
    const FfnShape& shape = op.shape;
    const std::uint8_t* const granule = op.weights.data + std::size_t(g) * op.weights.stride;
    alignas(64) float fired[kHiddenRows * kGranuleRows];
    std::fill_n(to.count, kGranuleRows, 0);
    for (int from = 0; from < x.count; from += kHiddenRows) {
        const int end = std::min(from + kHiddenRows, x.count);
        const Zeros zeros = zeros_of(op).at(row0, g);
        if (shape.by_records()) {
            const float* const h = op.h + std::ptrdiff_t(row0) * shape.width();
            fire_rows(shape, granule, h, from, end, zeros, fired);
        } else {
            fire(shape, granule, granule + op.weights.stride, x, from, end, zeros, fired);
        }
        for (int row = from; row < end; ++row) {
            for (int i = 0; i < shape.up.rows; ++i) {
                const float value = fired[(row - from) * kGranuleRows + i];
                if (value == 0.0F && op.skips) continue;
                const std::ptrdiff_t at = std::ptrdiff_t(i) * to.rows + to.count[i]++;
                to.value[at] = value, to.row[at] = row;
            }
        }
    }
    if (shape.gate.rows == 0) return;
    by_kind(shape.up, [&]<Kind kind>() {
        for (int i = 0; i < shape.up.rows; ++i) {
            for (int from = 0; from < to.count[i]; from += kFewRows) {
                const int n = std::min(kFewRows, to.count[i] - from);
                const std::ptrdiff_t at = std::ptrdiff_t(i) * to.rows + from;
                const float* rows[kFewRows];
                for (int j = 0; j < n; ++j) rows[j] = op.h + std::ptrdiff_t(row0 + to.row[at + j]) * shape.width();
                times_up<kind>(shape, granule, i, rows, n, to.value + at);
            }
        }
    });
}

// sum [rows, kSumColumns] += the neurons of a granule, for the columns from `column` on.
template <Kind kind>
void add_columns(const FfnOp& op, int g, const Values& from, int column, float* sum) {
    constexpr int kVectors = kSumColumns / 16;
    const Matrix& down = op.shape.down;
    const std::uint8_t* const granule = op.weights.data + std::size_t(g) * op.weights.stride;
    const int end = std::min(column + kSumColumns, up_to(down.cols, kLineColumns));
    for (int i = 0; i < op.shape.up.rows; ++i) {
        if (from.count[i] == 0) continue;
        NeuronRow<kind> row(down, row_at(down, granule, i));
        F w[kVectors];
        for (F& each : w) each = f_zero();
        walk<kind>(
            down, column, end, [&](int group) { row.group(group); },
            [&](int c) { row.two(c, w[(c - column) / 16], w[(c - column) / 16 + 1]); });
        const std::ptrdiff_t at = std::ptrdiff_t(i) * from.rows;
        for (int j = 0; j < from.count[i]; ++j) {
            float* const to = sum + std::ptrdiff_t(from.row[at + j]) * kSumColumns;
            const F value = f_set(from.value[at + j]);
            for (int k = 0; k < kVectors; ++k) f_store(to + 16 * k, f_fma(value, w[k], f_load(to + 16 * k)));
        }
    }
}

// Adds up the fours of granules [fours.begin, fours.end), for the columns from `column` on and `count` rows from row0
// on. `values`: of these granules. `own` [count, kSumColumns]: this thread's.
void sum_values(const FfnOp& op, const Fours& fours, const std::vector<Values>& values, int column, int row0, int count,
                float* own) {
    const int d = op.shape.width(), columns = std::min(kSumColumns, d - column);
    const FfnSum& sum = op.sum;
    // Calls run(place in a sum [T, D], place in `own`, how many numbers of 16 are wanted). It is compiled once for
    // whole vectors alone, without the branches of the others.
    const auto each = [&](const auto& run) {
        for (int row = 0; row < count; ++row) {
            const std::ptrdiff_t at = (std::ptrdiff_t(row0) + row) * d + column;
            float* const to = own + row * kSumColumns;
            if (columns == kSumColumns) {
                for (int c = 0; c < kSumColumns; c += 16) run(at + c, to + c, 16);
            } else {
                for (int c = 0; c < columns; c += 16) run(at + c, to + c, columns - c);
            }
        }
    };
    for (int i = 0; i < fours.count; ++i) {
        const Four four = fours.at(i);
        const bool starts = fours.starts(i);
        if (four.continues) {
            each([&](std::ptrdiff_t at, float* to, int some) { f_store(to, load_some(sum.pending + at, some)); });
        } else {
            std::fill_n(own, std::ptrdiff_t(count) * kSumColumns, 0.0F);
        }
        by_kind(op.shape.down, [&]<Kind kind>() {
            for (int g = four.lo; g < four.hi; ++g) {
                add_columns<kind>(op, g, values[std::size_t(g - fours.begin)], column, own);
            }
        });
        if (four.keeps) {
            each([&](std::ptrdiff_t at, float* from, int some) { store_some(sum.pending + at, f_load(from), some); });
        } else if (starts) {
            each([&](std::ptrdiff_t at, float* from, int some) {
                store_some(sum.partial + at, f_add(f_zero(), f_load(from)), some);
            });
        } else {
            each([&](std::ptrdiff_t at, float* from, int some) {
                store_some(sum.partial + at, f_add(load_some(sum.partial + at, some), f_load(from)), some);
            });
        }
    }
}

// What neurons' activation gives, for few rows: threads take granules as they come.
bool fire_neurons(Pool& pool, const FireOp& op) {
    if (op.t > kFewRows || op.shape.up.rows > kGranuleRows) return false;
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(op.shape.first(), op.h, op.shape.width(), 1, op.t, op.exact, scratch)) return false;
    std::atomic<int> next{0};
    pool.run(cost_of(op.weights, bytes_of(op.shape.first()), op.t), [&](const Team& team) {
        const Rows x = input.chunk_at(team, 0);
        const auto granule_at = [&](int g) { return op.weights.data + std::size_t(g) * op.weights.stride; };
        for (int g; (g = next.fetch_add(1, std::memory_order_relaxed)) < op.weights.count;) {
            float* const to = op.values + std::ptrdiff_t(g) * op.t * kGranuleRows;
            if (op.shape.up.rows < kGranuleRows) std::fill_n(to, op.t * kGranuleRows, 0.0F);
            fire(op.shape, granule_at(g), granule_at(std::min(g + 1, op.weights.count - 1)), x, 0, op.t, Zeros{}, to);
        }
    });
    return true;
}

bool neurons_many(Pool& pool, const FfnOp& op, std::size_t cost) {
    const Granules& weights = op.weights;
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(op.shape.first(), op.h, op.shape.width(), 1, op.t, op.exact, scratch)) return false;
    const int rows = input.chunk();
    const int busy = std::min(pool.threads(), kScratchThreads);
    auto* const sums = take<float>(scratch, std::size_t(busy) * std::size_t(rows) * kSumColumns);
    std::vector<Values> values;  // of as many granules at a time as scratch has room for
    for (Values one; values.size() < kValueGranules && Values::take_from(scratch, rows, one);) values.push_back(one);
    if (sums == nullptr || values.empty()) return false;
    const int block = std::min(weights.count, static_cast<int>(values.size()));
    pool.run(cost, [&](const Team& team) {
        for (int row0 = 0; row0 < op.t; row0 += rows) {
            const Rows x = input.chunk_at(team, row0);
            for (int begin = 0; begin < weights.count; begin += block) {
                const int end = std::min(begin + block, weights.count);
                if (begin > 0) team.barrier();  // all threads have used the values of the block before
                const auto [lo, hi] = team.share(end - begin);
                for (int i = lo; i < hi; ++i) value_neurons(op, begin + i, x, row0, values[std::size_t(i)]);
                team.barrier();
                if (team.id() >= busy) continue;
                const Fours fours(op.sum, begin, end, weights.count);
                const int step = std::min(team.size(), busy) * kSumColumns;
                for (int column = team.id() * kSumColumns; column < op.shape.width(); column += step) {
                    sum_values(op, fours, values, column, row0, x.count,
                               sums + std::ptrdiff_t(team.id()) * rows * kSumColumns);
                }
            }
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
