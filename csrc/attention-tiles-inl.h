// The products of attention for one instruction set: scores of queries with keys, and sums of values. Each works on a
// tile whose sums stay in registers. Which tile it is changes no bit: a score is 16 sums over every 16th column, each
// in the columns' order, which are then added in pairs; and a value's weights are added in the order of the positions.
#pragma once

#include "cache-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Sums of a tile of n queries, with as many keys, or registers of a value's columns, as leave room for what they are
// multiplied with.
constexpr int tile_of(int n) {
    if (kRegisters == 32) return n == 1 ? 8 : n == 3 || n == 6 ? 4 : 16 / n;
    return n == 1 ? 8 : n == 3 || n == 6 ? 2 : 8 / n;
}
// Up to so many queries share keys and values that are converted in registers. For more of them rows are widened first.
constexpr int kMostFused = kRegisters == 32 ? 8 : 4;
// Queries of a tile where there are more. Four by four scores need no memory on their way to be added, where a register
// has 16 lanes.
constexpr int kManyQueries = kRegisters == 32 ? 4 : 6;

// scores[i][token] = scale · query i · key of token, for n queries of `width` columns and `count` tokens. Meanwhile as
// many rows further on are fetched.
template <Kind kind, int n>
void score(const float* queries, int width, const Cached& keys, int count, float scale, float* scores) {
    constexpr int kKeys = tile_of(n), kWide = kVectors<kind>;
    constexpr bool kDirect = n * kKeys == 16 && kSteps == 1;
    alignas(64) float sums[n][16][16];
    for (int token = 0; token < count; token += 16) {
        for (int first = 0; first < 16; first += kKeys) {
            if (const std::uint8_t* const ahead = keys.fetched(token + first, count)) {
                for (std::size_t at = 0; at < kKeys * keys.row_bytes; at += 64) fetch<quantised(kind)>(ahead + at);
            }
            for (int half = 0; half < kSteps; ++half) {
                H acc[n][kKeys];
#pragma GCC unroll 8
                for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
                    for (int k = 0; k < kKeys; ++k) acc[i][k] = h_zero();
                }
                const std::uint8_t* rows =
                    keys.data + std::size_t(token + first) * keys.row_bytes + byte_of<kind>(half);
                const float *scales = keys.scales + token + first, *minimums = keys.minimums + token + first;
                const float* q = queries + half * kLanes;
                for (int c = 0; c < width; scales += keys.stride, minimums += keys.stride) {
                    for (const int until = std::min(c + keys.group, width); c < until; c += 16 * kWide) {
                        const auto key_of = [&](int k) __attribute__((always_inline)) {
                            return read<kind>(rows + std::size_t(k) * keys.row_bytes, scales + k, minimums + k);
                        };
                        if constexpr (n >= kKeys) {
                            Numbers<kind> key[kKeys];
#pragma GCC unroll 8
                            for (int k = 0; k < kKeys; ++k) key[k] = key_of(k);
#pragma GCC unroll 8
                            for (int i = 0; i < n; ++i) {
#pragma GCC unroll 2
                                for (int v = 0; v < kWide; ++v) {
                                    const H x = h_keep(h_load(q + i * width + 16 * v));
#pragma GCC unroll 8
                                    for (int k = 0; k < kKeys; ++k) acc[i][k] = h_fma(x, key[k].v[v], acc[i][k]);
                                }
                            }
                        } else {
                            H x[n][kWide];
#pragma GCC unroll 8
                            for (int i = 0; i < n; ++i) {
#pragma GCC unroll 2
                                for (int v = 0; v < kWide; ++v) x[i][v] = h_load(q + i * width + 16 * v);
                            }
#pragma GCC unroll 8
                            for (int k = 0; k < kKeys; ++k) {
                                const Numbers<kind> key = key_of(k);
#pragma GCC unroll 2
                                for (int v = 0; v < kWide; ++v) {
#pragma GCC unroll 8
                                    for (int i = 0; i < n; ++i) acc[i][k] = h_fma(x[i][v], key.v[v], acc[i][k]);
                                }
                            }
                        }
                        rows += kVectorBytes<kind> * kWide;
                        q += 16 * kWide;
                    }
                }
                if constexpr (kDirect) {
                    F all[16];
#pragma GCC unroll 16
                    for (int i = 0; i < 16; ++i) all[i] = acc[i / kKeys][i % kKeys];
                    alignas(64) float products[16];
                    f_store(products, f_mul(f_sums(all), f_set(scale)));
#pragma GCC unroll 8
                    for (int i = 0; i < n; ++i) {
                        std::memcpy(scores + i * kBlockTokens + token + first, products + i * kKeys, kKeys * 4);
                    }
                } else {
#pragma GCC unroll 8
                    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
                        for (int k = 0; k < kKeys; ++k) h_store(sums[i][first + k] + half * kLanes, acc[i][k]);
                    }
                }
            }
        }
        for (int i = 0; i < n && !kDirect; ++i) {
            F products[16];
            for (int k = 0; k < 16; ++k) products[k] = f_load(sums[i][k]);
            f_store(scores + i * kBlockTokens + token, f_mul(f_sums(products), f_set(scale)));
        }
    }
}

// Rows of a run that registers of columns take turns over: they stay in the L1 cache meanwhile.
constexpr int kTurnTokens = kPartTokens;

// sums[i] += Σ tokens of [begin, end): weights[i][token] · value, for n queries and the columns of `steps` steps from
// `first` on. `count`: tokens of the run. Meanwhile as many bytes further on are fetched.
template <Kind kind, int n, int steps>
void blend(const float* weights, const Cached& values, int begin, int end, int count, int width, int first,
           float* sums) {
    constexpr int kWide = kVectors<kind>;
    constexpr std::size_t kBytes = byte_of<kind>(kSteps) / kSteps * steps;
    H acc[n][steps][kWide];
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
        for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 2
            for (int v = 0; v < kWide; ++v) {
                acc[i][s][v] = h_load(sums + i * width + column_of<kind>(first + s) + 16 * v);
            }
        }
    }
    std::size_t at[steps];  // bytes of each step from the first's on
    std::ptrdiff_t factors[steps];
    for (int s = 0; s < steps; ++s) {
        at[s] = byte_of<kind>(first + s) - byte_of<kind>(first);
        factors[s] = column_of<kind>(first + s) / values.group * values.stride;
    }
    const std::uint8_t* row = values.data + std::size_t(begin) * values.row_bytes + byte_of<kind>(first);
    // Steps that share a line with those before them fetch nothing.
    const bool fetches = values.ahead != nullptr && byte_of<kind>(first) % 64 == 0;
    int token = begin;
    do {  // tells the compiler that there is a token at least: else it moves the sums to memory and back
        if (fetches) {
            const std::uint8_t* const ahead = values.fetched(token, count) + byte_of<kind>(first);
            for (std::size_t b = 0; b < kBytes; b += 64) fetch<quantised(kind)>(ahead + b);
        }
        Numbers<kind> value[steps];
#pragma GCC unroll 8
        for (int s = 0; s < steps; ++s) {
            value[s] =
                read<kind>(row + at[s], values.scales + factors[s] + token, values.minimums + factors[s] + token);
        }
#pragma GCC unroll 8
        for (int i = 0; i < n; ++i) {
            const H weight = h_set(weights[i * kBlockTokens + token]);
#pragma GCC unroll 8
            for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 2
                for (int v = 0; v < kWide; ++v) acc[i][s][v] = h_fma(weight, value[s].v[v], acc[i][s][v]);
            }
        }
        row += values.row_bytes;
    } while (++token < end);
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
        for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 2
            for (int v = 0; v < kWide; ++v) {
                h_store(sums + i * width + column_of<kind>(first + s) + 16 * v, acc[i][s][v]);
            }
        }
    }
}

// As `blend`, for all of `width` columns and all `count` tokens of a run.
template <Kind kind, int n>
void blend_all(const float* weights, const Cached& values, int count, int width, float* sums) {
    constexpr int kMost = std::max(1, tile_of(n) / kVectors<kind>);
    const int steps = width / (kLanes * kVectors<kind>);
    for (int begin = 0; begin < count; begin += kTurnTokens) {
        const int end = std::min(begin + kTurnTokens, count);
        int step = 0;
        const auto by_steps = [&]<int some>() {
            if constexpr (some <= kMost) {
                for (; step + some <= steps; step += some) {
                    blend<kind, n, some>(weights, values, begin, end, count, width, step, sums);
                }
            }
        };
        by_steps.template operator()<8>();
        by_steps.template operator()<4>();
        by_steps.template operator()<2>();
        by_steps.template operator()<1>();
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
