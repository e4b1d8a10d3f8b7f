// FFNs that lie neuron by neuron, of many rows: threads share the hidden values of some granules, then the columns of
// their sum. Included after neuron-rows-inl.h.
#pragma once

#include <vector>

namespace penstock::PENSTOCK_ISA {
namespace {

// The values of a granule's neurons. A neuron has a list of the rows that want it, and its value in each of them.
struct Values {
    float* value;               // [neuron][rows], of which the first count[neuron] are used
    std::int32_t *row, *count;  // [neuron][rows], [neuron]
    int rows;

    static bool take_from(Scratch& scratch, int rows, Values& to) {
        const std::size_t all = std::size_t(kGranuleRows) * std::size_t(rows);
        to = {take<float>(scratch, all), take<std::int32_t>(scratch, all), take<std::int32_t>(scratch, kGranuleRows),
              rows};
        return to.value != nullptr && to.row != nullptr && to.count != nullptr;
    }
};

// Multiplies rows [from, end) of x with the rows of the neurons that are `wanted`, 16 neurons at a time. Then calls
// to(i, sums [end - from, kTileRows], column) for each neuron i, whose sums are in that column.
template <class Is, class To>
void dot_granule(const Matrix& m, const std::uint8_t* granule, const Rows& x, int from, int end, const Is& wanted,
                 const To& to) {
    alignas(64) float sums[kHiddenRows][kTileRows];
    Fetches fetches;
    int some[kTileRows], count = 0;
    const auto multiply = [&] {
        const std::uint8_t* rows[kTileRows];
        for (int i = 0; i < kTileRows; ++i) rows[i] = row_at(m, granule, some[std::min(i, count - 1)]);
        dot_turned(m, rows, x, from, end, fetches, sums);
        for (int i = 0; i < count; ++i) to(some[i], sums, i);
        count = 0;
    };
    for (int i = 0; i < m.rows; ++i) {
        if (wanted(i)) some[count++] = i;
        if (count == kTileRows) multiply();
    }
    if (count > 0) multiply();
}

// out [end - from, kGranuleRows] = rows [from, end) of the input · a granule's `first`, plus its bias; 0 where a neuron
// is not active. The input is x, rounded to integers, or h, the same rows as floats, which lie D apart.
void multiply_active(const FfnShape& shape, const std::uint8_t* granule, const Rows& x, const float* h, int from,
                     int end, const Zeros& zeros, float* out) {
    const Matrix& first = shape.first();
    const auto bias = [&](int i) { return bias_of(granule, shape.first_bias(), i); };
    std::fill_n(out, (end - from) * kGranuleRows, 0.0F);
    if (by_turning(first, x)) {
        alignas(64) std::uint8_t active[kGranuleRows] = {};
        zeros.at(from, 0).join_active(end - from, first.rows, active);
        return dot_granule(
            first, granule, x, from, end, [&](int i) { return active[i] != 0; },
            [&](int i, const float (*sums)[kTileRows], int at) {
                for (int row = from; row < end; ++row) {
                    if (zeros.is_active(row, i)) out[(row - from) * kGranuleRows + i] = sums[row - from][at] + bias(i);
                }
            });
    }
    Fetches fetches;
    by_kind(first.kind, [&]<Kind kind>() {
        for (int i = 0; i < first.rows; ++i) {
            const float* rows[kHiddenRows];
            int at[kHiddenRows], count = 0;
            for (int row = from; row < end; ++row) {
                if (!zeros.is_active(row, i)) continue;
                rows[count] = h + std::ptrdiff_t(row) * shape.width(), at[count++] = row - from;
            }
            const std::uint8_t* const weights = row_at(first, granule, i);
            dot_rows<kind, 1>(first, &weights, rows, count, fetches,
                              [&](int, int j, float y) { out[at[j] * kGranuleRows + i] = y + bias(i); });
        }
    });
}

// out [end - from, kGranuleRows] = the activations of a granule's records.
void fire_rows(const FfnShape& shape, const std::uint8_t* granule, const Rows& x, const float* h, int from, int end,
               const Zeros& zeros, float* out) {
    multiply_active(shape, granule, x, h, from, end, zeros, out);
    for (int row = from; row < end; ++row) {
        float* const values = out + (row - from) * kGranuleRows;
        activate(shape.activation, values, nullptr, values, shape.up.rows);
        zeros.keep_counting(row, values, shape.up.rows);
        zeros.note(row, values, shape.up.rows);
    }
}

// Multiplies each value of a granule's neurons with the neuron's row of `up` · the row of x that wants it.
void multiply_values(const FfnOp& op, const std::uint8_t* granule, const Rows& x, int row0, const Values& to) {
    const FfnShape& shape = op.shape;
    const Matrix& up = shape.up;
    const auto bias = [&](int i) { return bias_of(granule, shape.up_bias, i); };
    if (by_turning(up, x)) {
        int seen[kGranuleRows] = {};  // of each neuron, how many of its rows came before
        for (int from = 0; from < x.count; from += kHiddenRows) {
            const int end = std::min(from + kHiddenRows, x.count);
            dot_granule(
                up, granule, x, from, end,
                [&](int i) { return seen[i] < to.count[i] && to.row[i * to.rows + seen[i]] < end; },
                [&](int i, const float (*sums)[kTileRows], int of) {
                    for (; seen[i] < to.count[i]; ++seen[i]) {
                        const std::ptrdiff_t at = std::ptrdiff_t(i) * to.rows + seen[i];
                        if (to.row[at] >= end) return;
                        to.value[at] *= sums[to.row[at] - from][of] + bias(i);
                    }
                });
        }
        return;
    }
    Fetches fetches;
    by_kind(up.kind, [&]<Kind kind>() {
        for (int i = 0; i < up.rows; ++i) {
            for (int from = 0; from < to.count[i]; from += kFewRows) {
                const int n = std::min(kFewRows, to.count[i] - from);
                const std::ptrdiff_t at = std::ptrdiff_t(i) * to.rows + from;
                const float* rows[kFewRows];
                for (int j = 0; j < n; ++j) rows[j] = op.h + std::ptrdiff_t(row0 + to.row[at + j]) * shape.width();
                const std::uint8_t* const weights = row_at(up, granule, i);
                dot_rows<kind, 1>(up, &weights, rows, n, fetches,
                                  [&](int, int j, float y) { to.value[at + j] *= y + bias(i); });
            }
        }
    });
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
            fire_rows(shape, granule, x, h, from, end, zeros, fired);
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
    if (shape.gate.rows > 0) multiply_values(op, granule, x, row0, to);
}

constexpr int kHeldColumns = 128;  // columns of a neuron's row that are held in registers, as floats

// For each row, whether at most kFewNeurons of a granule's neurons have a value in it.
void find_few(const FfnShape& shape, const Values& from, std::vector<int>& some) {
    std::fill(some.begin(), some.end(), 0);
    for (int i = 0; i < shape.up.rows; ++i) {
        const std::ptrdiff_t at = std::ptrdiff_t(i) * from.rows;
        for (int j = 0; j < from.count[i]; ++j) some[std::size_t(from.row[at + j])] += from.value[at + j] != 0.0F;
    }
    for (int& each : some) each = each <= kFewNeurons;
}

// sum [rows, kSumColumns] += the neurons of a granule as floats, for up to kHeldColumns columns from `column` on, in
// the rows that have few of them. If the list of these rows is null, in all rows.
template <Kind kind>
void add_columns(const FfnOp& op, int g, const Values& from, int column, float* sum, const int* few = nullptr) {
    constexpr int kVectors = kHeldColumns / 16;
    const Matrix& down = op.shape.down;
    const std::uint8_t* const granule = op.weights.data + std::size_t(g) * op.weights.stride;
    const int end = std::min(column + kHeldColumns, up_to(down.cols, kLineColumns));
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
            if (few != nullptr && (few[from.row[at + j]] == 0 || from.value[at + j] == 0.0F)) continue;
            float* const to = sum + std::ptrdiff_t(from.row[at + j]) * kSumColumns;
            const F value = f_set(from.value[at + j]);
            for (int k = 0; k < kVectors; ++k) f_store(to + 16 * k, f_fma(value, w[k], f_load(to + 16 * k)));
        }
    }
}

// sum [count, kSumColumns] += the neurons of a granule by integer products, for `columns` columns from `column` on, in
// the rows that have more than kFewNeurons of them.
void add_codes(const FfnOp& op, int g, const Values& from, int column, int columns, const std::vector<int>& few,
               float* sum) {
    const int count = static_cast<int>(few.size());
    const Matrix& down = op.shape.down;
    const std::uint8_t* const granule = op.weights.data + std::size_t(g) * op.weights.stride;
    int seen[kGranuleRows] = {};  // of each neuron, how many of its rows came before
    for (int row = 0; row < count; row += kPair) {
        Some some;
        for (int i = 0; i < op.shape.up.rows; ++i) {
            float value[kPair] = {};
            const int before = seen[i];
            for (int k = 0; k < kPair; ++k) {
                const std::ptrdiff_t at = std::ptrdiff_t(i) * from.rows + seen[i];
                if (seen[i] >= from.count[i] || from.row[at] != row + k) continue;
                value[k] = few[std::size_t(row + k)] != 0 ? 0.0F : from.value[at], ++seen[i];
            }
            if (seen[i] > before) some.add(row_at(down, granule, i), value[0], value[1]);
        }
        const bool two = row + 1 < count;
        if (few[std::size_t(row)] != 0 && (!two || few[std::size_t(row) + 1] != 0)) continue;
        float* const to = sum + std::ptrdiff_t(row) * kSumColumns;
        float* const sums[kPair] = {to, two ? to + kSumColumns : to};
        two ? add_some<2>(down, some, column, column + columns, sums, false)
            : add_some<1>(down, some, column, column + columns, sums, false);
    }
}

// Adds up the fours of granules [fours.begin, fours.end), for kSumColumns columns from `column` on and `count` rows
// from row0 on. `values`: those of these granules. `own` [count, kSumColumns]: room for this thread's sums.
void sum_values(const FfnOp& op, const Fours& fours, const std::vector<Values>& values, int column, int row0, int count,
                float* own) {
    const int d = op.shape.width(), columns = std::min(kSumColumns, d - column);
    const FfnSum& sum = op.sum;
    // Calls run(place in a sum [T, D], place in `own`, how many numbers of 16 are wanted). For whole vectors it is
    // compiled apart, without the branches that partial vectors need.
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
    std::vector<int> few(std::size_t(count), 0);
    const auto any = [&](int is) { return std::find(few.begin(), few.end(), is) != few.end(); };
    for (int i = 0; i < fours.count; ++i) {
        const Four four = fours.at(i);
        const bool starts = fours.starts(i);
        if (four.continues) {
            each([&](std::ptrdiff_t at, float* to, int some) { f_store(to, load_some(sum.pending + at, some)); });
        } else {
            std::fill_n(own, std::ptrdiff_t(count) * kSumColumns, 0.0F);
        }
        for (int g = four.lo; g < four.hi; ++g) {
            const Values& from = values[std::size_t(g - fours.begin)];
            if (op.shape.down.kind == Kind::kInt4 && !op.exact) {
                find_few(op.shape, from, few);
                if (any(0)) add_codes(op, g, from, column, columns, few, own);
                for (int c = 0; any(1) && c < columns; c += kHeldColumns)
                    add_columns<Kind::kInt4>(op, g, from, column + c, own + c, few.data());
                continue;
            }
            by_kind(op.shape.down.kind, [&]<Kind kind>() {
                for (int c = 0; c < columns; c += kHeldColumns) add_columns<kind>(op, g, from, column + c, own + c);
            });
        }
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
                const Fours fours(op.sum, op.shape, begin, end, weights.count);
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
