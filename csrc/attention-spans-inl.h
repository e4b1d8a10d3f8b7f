// Attention over a KV cache of integers with rounded factors, for one instruction set: sums of values, a span of
// positions after the other. attention-codes-inl.h has the rule.
#pragma once

#include "attention-codes-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int kSpan = kPageTokens;  // positions whose weights are rounded together

// Weights of a span times scales, rounded, of some queries.
struct RoundedWeights {
    std::int32_t* words;     // [queries][groups][2][16]: in lane t of positions t and t + 32; of t + 16 and t + 48
    float *steps, *middles;  // [queries][groups]: of the words; what the codes' middles and the minimums make
    int groups;
};

// Scales and middles of a span's values, [groups][kSpan] each. Those behind `count` are 0: they may be anything.
template <Kind kind>
inline void span_factors(const Codes& values, int at, int count, int groups, float* scales, float* middles) {
    for (int g = 0; g < groups; ++g, scales += kSpan, middles += kSpan) {
        for (int i = 0; i < count; i += 16) {
            const F scale = values.scale(g, at + i);
            f_store(scales + i, scale);
            f_store(middles + i, f_fma(scale, f_set(kMiddle<kind>), values.minimum(g, at + i)));
        }
        std::fill(scales + count, scales + kSpan, 0.0F), std::fill(middles + count, middles + kSpan, 0.0F);
    }
}

// Rounds the weights of n queries, which lie kBlockTokens apart, for all groups. scales, middles [groups][kSpan].
// What one of them waits for, another's work hides: of all the peaks are found first.
template <Kind kind, int n>
void round_weights(const float* weights, const float* scales, const float* middles, const RoundedWeights& to) {
    const int count = n * to.groups;
    for (int i = 0, k = 0; i < n; ++i) {
        const float* const w = weights + std::ptrdiff_t(i) * kBlockTokens;
        for (int g = 0; g < to.groups; ++g, ++k) {
            const float* const s = scales + std::ptrdiff_t(g) * kSpan;
            F peak = f_zero();
            for (int v = 0; v < kSpan; v += 16) peak = f_max(peak, f_mul(f_load(w + v), f_load(s + v)));
            to.steps[k] = f_max_of(peak);
        }
    }
    for (int k = 0; k < count; ++k) {
        const float most = to.steps[k];
        to.steps[k] = most < 1e-30F ? 0.0F : most * (1 / kMostWord);
        to.middles[k] = most < 1e-30F ? 0.0F : kMostWord / most;
    }
    std::int32_t* words = to.words;
    for (int i = 0, k = 0; i < n; ++i) {
        const float* const w = weights + std::ptrdiff_t(i) * kBlockTokens;
        for (int g = 0; g < to.groups; ++g, ++k, words += kSpan / 2) {
            const float *const s = scales + std::ptrdiff_t(g) * kSpan, *const m = middles + std::ptrdiff_t(g) * kSpan;
            const F inverse = f_set(to.middles[k]);
            F total = f_zero();
            I numbers[4];
            for (int v = 0; v < 4; ++v) {
                const F weight = f_load(w + 16 * v);
                numbers[v] = i_round(f_mul(f_mul(weight, f_load(s + 16 * v)), inverse));
                total = f_fma(weight, f_load(m + 16 * v), total);
            }
            const I all = i_add(i_add(numbers[0], numbers[1]), i_add(numbers[2], numbers[3]));
            i_store(words, i_words(numbers[0], numbers[2])), i_store(words + 16, i_words(numbers[1], numbers[3]));
            to.middles[k] = f_sum(f_fma(f_set(-kMiddle<kind> * to.steps[k]), f_from(all), total));
        }
    }
}

// Of kWideBytes bytes' units of 16, how much further than the first one's words those of its group and position lie.
// `packed`: the positions that they are of.
struct Further {
    int words[kWideLines];
    int packed;
};

// Sums of values that lie as products do: of kWideBytes bytes [halves][lines][16], of a query after the other `width`
// apart. Their steps and middles are those of the first unit's group, and lie `groups` apart. Of unit k they lie
// `further[k]` further.
struct Added {
    float* sums;  // null: products are wanted as they are
    const float *steps, *middles;
    int width, groups, further[kWideLines];
};
// Whether sums of values lie so until the last position is added, which saves most of a span's shuffles and stores
// (int4 with 128 columns: 16.0 -> 15.4 ns a position of four queries).
template <Kind kind>
constexpr bool lie_as_products(int width) {
    return width % (kWideLines * kUnitColumns<kind>) == 0;
}
// Columns of sums [width] that lie as products, in order.
template <Kind kind>
void order_sums(int width, float* sums) {
    constexpr int kHalves = kUnitWords<kind> / 2;
    for (float* const end = sums + width; sums < end; sums += kWideLines * kUnitColumns<kind>) {
        I x[kHalves][kWideLines];
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
#pragma GCC unroll 4
            for (int j = 0; j < kWideLines; ++j) {
                x[h][j] = i_load(reinterpret_cast<const std::int32_t*>(sums + (h * kWideLines + j) * 16));
            }
            wide_columns(x[h]);
        }
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
#pragma GCC unroll 4
            for (int k = 0; k < kWideLines; ++k) {
                i_store(reinterpret_cast<std::int32_t*>(sums + k * kUnitColumns<kind> + 16 * h), x[h][k]);
            }
        }
    }
}

// Adds products of lines from `first` on to sums, or stores them.
template <int first, int parts, int n, int lines, int halves>
[[gnu::always_inline]] inline void put_products(const I (&acc)[n][lines][halves], const Added& added,
                                                std::int32_t* products) {
    const bool adds = added.sums != nullptr;
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
        F step = f_zero(), middle = f_zero();
        if (adds) {
            step = f_units<parts>(added.steps + i * added.groups, added.further);
            middle = f_units<parts>(added.middles + i * added.groups, added.further);
        }
#pragma GCC unroll 8
        for (int j = 0; j < lines; ++j) {
#pragma GCC unroll 2
            for (int h = 0; h < halves; ++h) {
                const int at = (h * kWideLines + first + j) * 16;
                if (adds) {
                    float* const to = added.sums + std::ptrdiff_t(i) * added.width + at;
                    f_store(to, f_fma(f_from(acc[i][j][h]), step, f_add(f_load(to), middle)));
                } else {
                    i_store(products + i * halves * kWideLines * 16 + at, acc[i][j][h]);
                }
            }
        }
    }
}

// products [n][halves][lines][16]: of a span's positions, of codes with words; or they are added to sums. `n` queries,
// whose words lie `stride` apart, and `lines` lines from `first` on of kWideBytes bytes, whose columns are in `parts`
// groups.
template <Kind kind, int n, int first, int lines, int parts>
[[gnu::noinline]] void dot_codes(const std::uint8_t* row, std::size_t row_bytes, const std::int32_t* words, int stride,
                                 const Further& further, const std::uint8_t* ahead, const Added& added,
                                 std::int32_t* products) {
    constexpr int kHalves = kUnitWords<kind> / 2;
    I acc[n][lines][kHalves];
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < lines; ++j) {
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) acc[i][j][h] = i_zero();
        }
    }
    const std::size_t step_bytes = std::size_t(further.packed) * row_bytes;
    for (int token = 0; token < 16; token += further.packed) {
        if (ahead != nullptr) {
            constexpr std::size_t kBytes = 4 * kWideBytes * lines / kWideLines;
            fetch_codes(ahead, kBytes);
            ahead += kBytes;
        }
        Line x[lines];
        wide_lines<first, lines>(row, 16 * row_bytes, x);
        const auto words_of = [&]<int parity>() __attribute__((always_inline)) {
            Line codes[kHalves][lines];
#pragma GCC unroll 8
            for (int j = 0; j < lines; ++j) {
                codes[0][j] = word_of<kind, parity>(x[j]);
                if constexpr (kHalves == 2) codes[1][j] = word_of<kind, 2 + parity>(x[j]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < n; ++i) {
                const Pair pair = pairs_of<parts>(words + i * stride + 16 * parity, further.words);
#pragma GCC unroll 2
                for (int h = 0; h < kHalves; ++h) {
#pragma GCC unroll 8
                    for (int j = 0; j < lines; ++j) acc[i][j][h] = i_dot_words(acc[i][j][h], codes[h][j], pair);
                }
            }
        };
        words_of.template operator()<0>(), words_of.template operator()<1>();
        row += step_bytes, words += further.packed;
    }
    put_products<first, parts>(acc, added, products);
}

// As `dot_codes`, for all lines from `first` on.
template <Kind kind, int n, int parts, int first = 0>
void dot_lines(const std::uint8_t* row, std::size_t row_bytes, const std::int32_t* words, int stride,
               const Further& further, const std::uint8_t* ahead, const Added& added, std::int32_t* products) {
    constexpr int kMost = std::max(1, kMostSums / (n * kUnitWords<kind> / 2));
    constexpr int kLines = std::min(kMost, kWideLines - first);
    dot_codes<kind, n, first, kLines, parts>(row, row_bytes, words, stride, further, ahead, added, products);
    if constexpr (first + kLines < kWideLines) {
        if (ahead != nullptr) ahead += 4 * kWideBytes * kLines / kWideLines * (16 / further.packed);
        dot_lines<kind, n, parts, first + kLines>(row, row_bytes, words, stride, further, ahead, added, products);
    }
}

// Adds products of n queries' columns from `column` on to sums [n, width], which lie in order. of_unit: groups.
template <Kind kind>
void add_products(const std::int32_t* products, const RoundedWeights& weights, const int* of_unit, int n, int column,
                  int width, float* sums) {
    constexpr int kHalves = kUnitWords<kind> / 2;
    const int packed = packed_rows<kind>(width), units = kWideLines / packed;
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 16
        for (int h = 0; h < kHalves; ++h) {
            I x[kWideLines];
#pragma GCC unroll 16
            for (int j = 0; j < kWideLines; ++j) {
                x[j] = i_load(products + ((i * kHalves + h) * kWideLines + j) * 16);
            }
            wide_columns(x);
#pragma GCC unroll 16
            for (int k = 0; k < kWideLines / 2 && packed > 1; ++k) x[k] = i_add(x[k], x[k + kWideLines / 2]);
            for (int k = 0; k < units; ++k) {
                const int c = column + k * kUnitColumns<kind> + 16 * h;
                if (c >= width) break;
                const int g = i * weights.groups + of_unit[k];
                float* const to = sums + std::ptrdiff_t(i) * width + c;
                const F sum = f_add(f_load(to), f_set(weights.middles[g]));
                f_store(to, f_fma(f_from(x[k]), f_set(weights.steps[g]), sum));
            }
        }
    }
}

// sums[i] [width] += Σ over the positions of the span from `at` on: weight · value, for n queries.
template <Kind kind, int n>
void blend_codes(const Codes& values, int at, const RoundedWeights& weights, int group, int width, float* sums) {
    constexpr int kHalves = kUnitWords<kind> / 2, kColumns = kWideLines * kUnitColumns<kind>;
    const std::uint8_t* ahead = values.further(at);
    const std::uint8_t* row = values.rows + std::size_t(at) * values.row_bytes;
    const int stride = weights.groups * (kSpan / 2), packed = packed_rows<kind>(width), units = kWideLines / packed;
    const bool direct = lie_as_products<kind>(width);
    for (int column = 0; column < width; column += kColumns, row += kWideBytes) {
        alignas(64) std::int32_t products[n * kHalves * kWideLines * 16];
        Further further;
        further.packed = packed;
        int of_unit[kWideLines];  // the group. What lies behind the width is not used
        for (int k = 0; k < units; ++k) {
            of_unit[k] = std::min((column + k * kUnitColumns<kind>) / group, weights.groups - 1);
        }
        Added added{direct ? sums + column : nullptr,
                    weights.steps + of_unit[0],
                    weights.middles + of_unit[0],
                    width,
                    weights.groups,
                    {}};
        for (int k = 0; k < kWideLines; ++k) {
            added.further[k] = of_unit[k % units] - of_unit[0];
            further.words[k] = (of_unit[k % units] - of_unit[0]) * (kSpan / 2) + k / units;
        }
        const std::int32_t* const words = weights.words + of_unit[0] * (kSpan / 2);
        const auto dot = [&]<int parts>() {
            dot_lines<kind, n, parts>(row, values.row_bytes, words, stride, further, ahead, added, products);
            if (ahead != nullptr) ahead += 4 * kWideBytes * (16 / packed);
        };
        if constexpr (kWideLines == 1) {
            dot.template operator()<1>();
        } else {
            constexpr int kHalf = kWideLines / 2;
            if (further.words[kWideLines - 1] == 0) {
                dot.template operator()<1>();
            } else if (further.words[kHalf - 1] == 0 && further.words[kHalf] == further.words[kWideLines - 1]) {
                dot.template operator()<2>();
            } else if constexpr (kWideLines == 4) {
                dot.template operator()<4>();
            }
        }
        if (!direct) add_products<kind>(products, weights, of_unit, n, column, width, sums);
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
