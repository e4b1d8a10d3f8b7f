// Sums of the neurons of a granule whose rows lie in int4: `to` += Σ value · row, by integer products. Included after
// neuron-rows-inl.h.
//
// A row has a scale and a minimum for each group of columns, so its number q stands for q · scale + minimum. What
// multiplies q, value · scale, is rounded to int8 as activations of dense products are: of each group of columns and
// each row of activations, the largest magnitude among the granule's neurons becomes 127. Sums over neurons are
// integers then, which neither the neurons left out (they would add 0) nor the order of the others change. The sum of
// value · minimum is float32, neuron by neuron. The codes of four neurons are brought together, so that a product adds
// four. kTogether neurons are read side by side over their whole length: so many runs of bytes the processor's own
// prefetcher follows. A line of each of a granule's neurons at a time, with sums in registers, took 1.3 times as long.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

// Whether a call adds its neurons up by what is here.
inline bool adds_codes(const FfnOp& op) { return op.shape.down.kind == Kind::kInt4 && !op.exact; }

constexpr int kPair = 2;                                 // rows of activations that codes are unpacked for at a time
constexpr int kQuadColumns = kQuadLines * kLineColumns;  // columns of codes that are unpacked at a time
constexpr int kGroupLanes = 16;                          // groups whose factors are made at a time
constexpr int kHeldBytes = 16384;  // of integer sums, which a thread's first cache keeps beside the rows

// The neurons of a granule that some of up to kPair rows of activations want, in the order in which they lie.
struct Some {
    int count = 0;
    const std::uint8_t* row[kGranuleRows + 3];  // beginnings of their rows
    float value[kPair][kGranuleRows + 3];

    void add(const std::uint8_t* at, float first, float second) {
        row[count] = at, value[0][count] = first, value[1][count++] = second;
    }
    // Completes the last four by a neuron that counts for nothing.
    void complete() {
        while (count % 4 != 0) add(row[count - 1], 0.0F, 0.0F);
    }
};

// What the codes of `Some` are multiplied with, for up to `columns` columns of groups of 32 or more.
template <int columns>
struct Factors {
    static constexpr int kGroups =
        columns / kLineColumns + kGroupLanes + kQuadLines;     // those read or written beyond, too
    alignas(64) std::int32_t four[kGranuleRows / 4][kGroups];  // int8 of the four neurons, in each group
    alignas(64) float scale[kGroups], minimum[kGroups];        // sum = scale · Σ code · int8 + minimum

    // For kGroupLanes groups from `to` on. `at`: where the scales of the first of `groups` groups are in a row.
    void set(const Some& some, const float* value, int to, std::size_t at, std::size_t to_minimums, int groups) {
        const auto halves = [&](const std::uint8_t* from) {
            if (groups >= kGroupLanes) return f_half(from);
            std::uint16_t padded[kGroupLanes] = {};
            std::memcpy(padded, from, 2 * std::size_t(groups));
            return f_half(padded);
        };
        alignas(64) float factor[kGranuleRows + 3][kGroupLanes];
        I most = i_zero();
        F sum = f_zero();
        for (int i = 0; i < some.count; ++i) {
            const std::uint8_t* const from = some.row[i] + at;
            const F times = f_set(value[i]), product = f_mul(times, halves(from));
            f_store(factor[i], product);
            most = i_max(most, i_magnitude(product));
            sum = f_fma(times, halves(from + to_minimums), sum);
        }
        float up[kGroupLanes];
        static_assert(sizeof most == sizeof up);
        std::memcpy(up, &most, sizeof up);
        for (int g = 0; g < kGroupLanes; ++g) {
            // NaN and infinite values stay visible in the scale, so that damaged weights do not pass for zeros.
            scale[to + g] = up[g] / 127.0F;
            up[g] = up[g] > 0 && up[g] < INFINITY ? 127.0F / up[g] : 0.0F;
        }
        f_store(minimum + to, sum);
        const F times_up = f_load(up);
        for (int i = 0; i < some.count; i += 4) {
            const auto rounded = [&](int j) { return i_round(f_mul(f_load(factor[i + j]), times_up)); };
            i_store_fours(four[i / 4] + to, rounded(0), rounded(1), rounded(2), rounded(3));
        }
    }
};

// The rows that are read after those at hand, of which as much is fetched meanwhile.
struct Ahead {
    const std::uint8_t* const* row = nullptr;
    int count = 0;
};

// to[i] [at least hi - lo] += Σ some neurons, for the columns [lo, hi) of m and `rows` rows of activations. `lo`: a
// multiple of 32.
template <int rows>
void add_some(const Matrix& m, Some& some, int lo, int hi, float* const* to, const Ahead& ahead) {
    if (some.count == 0) return;
    some.complete();
    constexpr int kHeld = kHeldBytes / 4 / rows;  // columns
    const int lines = m.group / kLineColumns, groups = m.groups();
    const std::size_t codes_bytes = m.codes_bytes();
    Factors<kHeld> factors[rows];
    QuadSums sums[rows][kHeld / kQuadColumns];
    const bool aligned = lo % kQuadColumns == 0 && (kQuadLines % lines == 0 || lines % kQuadLines == 0);
    const auto order_at = [&](int c) {
        int group[kQuadLines];
        for (int j = 0; j < kQuadLines; ++j) group[j] = (c / kLineColumns + j) / lines - c / m.group;
        return quad_order(group);
    };
    QuadOrder order = order_at(lo);
    // Scales and minimums of the rows ahead are fetched evenly, since all of a granule's are read before its codes.
    const int tail_lines = int(row_bytes(m) - codes_bytes + 63) / 64, tails = ahead.count * tail_lines;
    const int steps = (some.count + kTogether - 1) / kTogether * ((hi - lo + kQuadColumns - 1) / kQuadColumns);
    const int tails_a_step = tails / steps + 1;
    int tail_row = 0, tail_line = 0;
    for (int begin = lo, end; begin < hi; begin = end) {
        end = std::min(hi, begin + kHeld);
        const int g0 = begin / m.group;
        for (int g = g0; g * m.group < end; g += kGroupLanes) {
            for (int i = 0; i < rows; ++i) {
                factors[i].set(some, some.value[i], g - g0, codes_bytes + 2 * std::size_t(g), 2 * std::size_t(groups),
                               std::min(kGroupLanes, groups - g));
            }
        }
        const std::size_t end_byte = std::size_t(up_to(end, kLineColumns)) / 2,
                          bytes = end_byte - std::size_t(begin) / 2;
        const std::size_t near = std::min(kFetchedBytes / kTogether, bytes);
        for (int i = 0; i < some.count; i += kTogether) {
            const int quads = std::min(kTogether, some.count - i) / 4;
            // Where codes are fetched, once those of the rows at hand have been: of the next rows, or columns.
            const std::uint8_t* next[kTogether];
            for (int j = 0; j < 4 * quads; ++j) {
                const int later = i + kTogether + j;
                next[j] = later < some.count                 ? some.row[later]
                          : end < hi                         ? some.row[j] + bytes
                          : later - some.count < ahead.count ? ahead.row[later - some.count]
                                                             : some.row[i + j];
            }
            for (int c = begin; c < end; c += kQuadColumns) {
                const std::size_t byte = std::size_t(c) / 2;
                for (int j = 0; ahead.row != nullptr && byte % 64 == 0 && j < 4 * quads; ++j) {
                    __builtin_prefetch(byte + near < end_byte ? some.row[i + j] + byte + near
                                                              : next[j] + (byte + near - bytes));
                }
                for (int j = 0; j < tails_a_step && tail_row < ahead.count; ++j) {
                    __builtin_prefetch(ahead.row[tail_row] + codes_bytes + 64 * tail_line);
                    if (++tail_line == tail_lines) tail_line = 0, ++tail_row;
                }
                if (!aligned) order = order_at(c);
                const bool whole = byte + kQuadColumns / 2 <= codes_bytes;
                const int group = c / m.group - g0, at = (c - begin) / kQuadColumns;
                QuadSums sum[rows];
                for (int row = 0; row < rows; ++row) sum[row] = i == 0 ? QuadSums{} : sums[row][at];
                for (int k = 0; k < quads; ++k) {
                    std::uint8_t padded[4][kQuadColumns / 2];
                    const std::uint8_t* codes[4];
                    for (int j = 0; j < 4; ++j) {
                        codes[j] = some.row[i + 4 * k + j] + byte;
                        if (!whole) std::memcpy(padded[j], codes[j], codes_bytes - byte), codes[j] = padded[j];
                    }
                    const Quads four = quads_of(codes);
                    for (int row = 0; row < rows; ++row) {
                        quad_add(sum[row], four, &factors[row].four[i / 4 + k][group], order);
                    }
                }
                for (int row = 0; row < rows; ++row) sums[row][at] = sum[row];
            }
        }
        for (int c = begin; c < end; c += kQuadColumns) {
            for (int row = 0; row < rows; ++row) {
                I columns[2 * kQuadLines];
                quad_columns(sums[row][(c - begin) / kQuadColumns], columns);
                for (int k = 0; k < 2 * kQuadLines; ++k) {
                    const int column = c + k * kTileRows, count = end - column;
                    if (count <= 0) break;
                    const int group = column / m.group - g0;
                    const F scale = f_set(factors[row].scale[group]), minimum = f_set(factors[row].minimum[group]);
                    float* const sum = to[row] + (column - lo);
                    store_some(sum, f_add(load_some(sum, count), f_fma(scale, f_from(columns[k]), minimum)), count);
                }
            }
        }
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
