// Sums of the neurons of a granule whose rows lie in int4: `to` += Σ value · row, by integer products. Included after
// neuron-rows-inl.h.
//
// A row has a scale and a minimum for each group of columns, so its number q stands for q · scale + minimum. What
// multiplies q, value · scale, is rounded to int8 as activations of dense products are: of each group of columns and
// each row of activations, the largest magnitude among the granule's neurons becomes 127. Sums over neurons are
// integers then, which neither the neurons left out (they would add 0) nor the order of the others change. The sum of
// value · minimum is float32, neuron by neuron. The codes of four neurons are brought together, so that a product adds
// four (4.6 times as many weights a second as numbers looked up and added as floats).
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int kPair = 2;                                 // rows of activations that codes are unpacked for at a time
constexpr int kQuadColumns = kQuadLines * kLineColumns;  // columns of codes that are unpacked at a time
constexpr int kGroupLanes = 16;                          // groups whose factors are made at a time

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

// What the codes of `Some` are multiplied with, for kGroupLanes groups from one on.
struct Factors {
    alignas(64) std::int32_t four[kGranuleRows / 4][kGroupLanes];  // int8 of the four neurons, in each group
    alignas(64) float scale[kGroupLanes], minimum[kGroupLanes];    // sum = scale · Σ code · int8 + minimum

    // `at`: where the scales of the first of `groups` groups are in a row.
    void set(const Some& some, const float* value, std::size_t at, std::size_t to_minimums, int groups) {
        const auto halves = [&](const std::uint8_t* from) {
            if (groups >= kGroupLanes) return f_half(from);
            std::uint16_t padded[kGroupLanes] = {};
            std::memcpy(padded, from, 2 * std::size_t(groups));
            return f_half(padded);
        };
        I most = i_zero();
        F sum = f_zero();
        for (int i = 0; i < some.count; ++i) {
            const std::uint8_t* const from = some.row[i] + at;
            const F times = f_set(value[i]);
            most = i_max(most, i_magnitude(f_mul(times, halves(from))));
            sum = f_fma(times, halves(from + to_minimums), sum);
        }
        float up[kGroupLanes];
        static_assert(sizeof most == sizeof up);
        std::memcpy(up, &most, sizeof up);
        for (int g = 0; g < kGroupLanes; ++g) {
            // NaN and infinite values stay visible in the scale, so that damaged weights do not pass for zeros.
            scale[g] = up[g] / 127.0F;
            up[g] = up[g] > 0 && up[g] < INFINITY ? 127.0F / up[g] : 0.0F;
        }
        f_store(minimum, sum);
        const F times_up = f_load(up);
        for (int i = 0; i < some.count; i += 4) {
            const auto rounded = [&](int j) {
                const F factor = f_mul(f_set(value[i + j]), halves(some.row[i + j] + at));
                return i_round(f_mul(factor, times_up));
            };
            i_store_fours(four[i / 4], rounded(0), rounded(1), rounded(2), rounded(3));
        }
    }
};

// to[i] [at least hi - lo] += Σ some neurons, for the columns [lo, hi) of m and `rows` rows of activations. `lo`: a
// multiple of 32. `ahead` (null: nothing): the rows that are read afterwards, of which as many columns are fetched.
template <int rows>
void add_some(const Matrix& m, Some& some, int lo, int hi, float* const* to, const std::uint8_t* const* ahead,
              int ahead_count) {
    if (some.count == 0) return;
    some.complete();
    const int lines = m.group / kLineColumns, groups = m.groups();
    Factors factors[rows];
    for (int g0 = lo / m.group; g0 * m.group < hi; g0 += kGroupLanes) {
        const int left = std::min(kGroupLanes, groups - g0);
        for (int i = 0; i < rows; ++i) {
            factors[i].set(some, some.value[i], m.codes_bytes() + 2 * std::size_t(g0), 2 * std::size_t(groups), left);
        }
        const int from = std::max(lo, g0 * m.group), end = std::min(hi, (g0 + kGroupLanes) * m.group);
        for (int c = from; c < end; c += kQuadColumns) {
            const std::size_t byte = std::size_t(c) / 2;
            if (byte % 64 == 0) {
                for (int i = 0; i < ahead_count; ++i) __builtin_prefetch(ahead[i] + byte);
            }
            // The line's group, counted from g0. A last line may be missing.
            int group[kQuadLines];
            for (int j = 0; j < kQuadLines; ++j) group[j] = std::min((c / kLineColumns + j) / lines - g0, left - 1);
            const bool whole = byte + kQuadColumns / 2 <= m.codes_bytes();
            I sum[rows][2 * kQuadLines];
            for (int i = 0; i < rows; ++i) {
                for (I& each : sum[i]) each = i_zero();
            }
            for (int i = 0; i < some.count; i += 4) {
                std::uint8_t padded[4][kQuadColumns / 2];
                const std::uint8_t* codes[4];
                for (int k = 0; k < 4; ++k) {
                    codes[k] = some.row[i + k] + byte;
                    if (!whole) std::memcpy(padded[k], codes[k], m.codes_bytes() - byte), codes[k] = padded[k];
                }
                const Quads quads = quads_of(codes);
                for (int row = 0; row < rows; ++row) {
                    for (int j = 0; j < kQuadLines; ++j) {
                        const auto* four = reinterpret_cast<const std::int8_t*>(&factors[row].four[i / 4][group[j]]);
                        sum[row][2 * j] = i_dot<true>(sum[row][2 * j], quads.low[j], four);
                        sum[row][2 * j + 1] = i_dot<true>(sum[row][2 * j + 1], quads.high[j], four);
                    }
                }
            }
            for (int row = 0; row < rows; ++row) {
                for (int k = 0; k < 2 * kQuadLines; ++k) {
                    const int column = c + k * kTileRows, count = end - column;
                    if (count <= 0) break;
                    const F scale = f_set(factors[row].scale[group[k / 2]]),
                            minimum = f_set(factors[row].minimum[group[k / 2]]);
                    float* const at = to[row] + (column - lo);
                    store_some(at, f_add(load_some(at, count), f_fma(scale, f_from(sum[row][k]), minimum)), count);
                }
            }
        }
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
