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

// Rounds one query's weights [kSpan] of a group. scales, middles [kSpan]: of its positions.
template <Kind kind>
inline void round_weights(const float* weights, const float* scales, const float* middles, std::int32_t* words,
                          float& step, float& middle) {
    F products[4], peak = f_zero(), total = f_zero();
    for (int v = 0; v < 4; ++v) {
        const F weight = f_load(weights + 16 * v);
        products[v] = f_mul(weight, f_load(scales + 16 * v));
        peak = f_max(peak, products[v]);
        total = f_fma(weight, f_load(middles + 16 * v), total);
    }
    const float most = f_max_of(peak);
    step = most < 1e-30F ? 0.0F : most * (1 / kMostWord);
    const F inverse = f_set(step > 0 ? kMostWord / most : 0.0F);
    I n[4];
    for (int v = 0; v < 4; ++v) n[v] = i_round(f_mul(products[v], inverse));
    const I all = i_add(i_add(n[0], n[1]), i_add(n[2], n[3]));
    i_store(words, i_words(n[0], n[2])), i_store(words + 16, i_words(n[1], n[3]));
    middle = f_sum(f_fma(f_set(-kMiddle<kind> * step), f_from(all), total));
}

// Of kWideBytes bytes' units of 16, how much further than the first one's words those of its group and position lie.
// `packed`: the positions that they are of.
struct Further {
    int words[kWideLines];
    int packed;
};

// sums [n][halves][lines][16]: of a span's positions, the products of codes with words. `n` queries, whose words lie
// `stride` apart, and `lines` lines from `first` on of kWideBytes bytes, whose columns are in `parts` groups.
template <Kind kind, int n, int first, int lines, int parts>
[[gnu::noinline]] void dot_codes(const std::uint8_t* row, std::size_t row_bytes, const std::int32_t* words, int stride,
                                 const Further& further, const std::uint8_t* ahead, std::int32_t* sums) {
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
            fetch_codes(ahead, 4 * step_bytes);
            ahead += 4 * step_bytes;
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
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < lines; ++j) {
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) {
                i_store(sums + ((i * kHalves + h) * kWideLines + first + j) * 16, acc[i][j][h]);
            }
        }
    }
}

// As `dot_codes`, for all lines from `first` on.
template <Kind kind, int n, int parts, int first = 0>
void dot_lines(const std::uint8_t* row, std::size_t row_bytes, const std::int32_t* words, int stride,
               const Further& further, const std::uint8_t* ahead, std::int32_t* sums) {
    constexpr int kMost = std::max(1, kMostSums / (n * kUnitWords<kind> / 2));
    constexpr int kLines = std::min(kMost, kWideLines - first);
    dot_codes<kind, n, first, kLines, parts>(row, row_bytes, words, stride, further, ahead, sums);
    if constexpr (first + kLines < kWideLines) {
        dot_lines<kind, n, parts, first + kLines>(row, row_bytes, words, stride, further, nullptr, sums);
    }
}

// sums[i] [width] += Σ over the positions of the span from `at` on: weight · value, for n queries.
template <Kind kind, int n>
void blend_codes(const Codes& values, int at, const RoundedWeights& weights, int group, int width, float* sums) {
    constexpr int kHalves = kUnitWords<kind> / 2, kColumns = kWideLines * kUnitColumns<kind>;
    const std::uint8_t* ahead = values.further(at);
    const std::uint8_t* row = values.rows + std::size_t(at) * values.row_bytes;
    const int stride = weights.groups * (kSpan / 2), packed = packed_rows<kind>(width), units = kWideLines / packed;
    for (int column = 0; column < width; column += kColumns, row += kWideBytes) {
        alignas(64) std::int32_t products[n * kHalves * kWideLines * 16];
        Further further;
        further.packed = packed;
        int of_unit[kWideLines];  // the group. What lies behind the width is not used
        for (int k = 0; k < units; ++k) {
            of_unit[k] = std::min((column + k * kUnitColumns<kind>) / group, weights.groups - 1);
        }
        for (int k = 0; k < kWideLines; ++k) {
            further.words[k] = (of_unit[k % units] - of_unit[0]) * (kSpan / 2) + k / units;
        }
        const std::int32_t* const words = weights.words + of_unit[0] * (kSpan / 2);
        const auto dot = [&]<int parts>() {
            dot_lines<kind, n, parts>(row, values.row_bytes, words, stride, further, ahead, products);
            ahead = nullptr;
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
        for (int i = 0; i < n; ++i) {
            for (int h = 0; h < kHalves; ++h) {
                I x[kWideLines];
                for (int j = 0; j < kWideLines; ++j) {
                    x[j] = i_load(products + ((i * kHalves + h) * kWideLines + j) * 16);
                }
                wide_columns(x);
                if (packed > 1) {
                    for (int k = 0; k < kWideLines / 2; ++k) x[k] = i_add(x[k], x[k + kWideLines / 2]);
                }
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
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
