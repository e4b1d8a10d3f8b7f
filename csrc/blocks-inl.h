// Products with weights in the formats of spec/blocks.py, for one instruction set. Codes are multiplied with rounded
// activations as they are, or are widened to floats, one group of 32 columns after the other.
#pragma once

#include "panel-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// What 4-bit codes stand for, plus the layout's offset (spec.blocks.TABLES): 128, and 12 of mxfp4.
constexpr std::uint8_t kIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr std::uint8_t kFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Scales and minimums of a block of `span` columns of one tile, as floats: number i is of columns kLayout.scaled · i ….
// A minimum is what is added.
template <Kind kind>
struct BlockFactors {
    static constexpr Blocks kLayout = blocks_of(kind);
    static constexpr bool kMinimum = kLayout.has_minimum();
    static constexpr int kMost = (kLayout.columns == kBlockGroup ? 64 : kLayout.columns) / kLayout.scaled;
    F scale[kMost], minimum[kMinimum ? kMost : 1];

    BlockFactors(const std::uint8_t* p, int span) {
        if constexpr (kLayout.word > 0) {
            for (int i = 0; i < kLayout.scale_bytes(span) / 4; ++i) {
                const Line word = line(p + 64 * i);
                if constexpr (kMinimum) {  // no product here is rounded: a scale has 15 bits, a zero point 9
                    const F upper = f_byte<1>(l_right(word, 0, 0x100));
                    const F zero = f_fma(upper, f_set(256.0F), f_byte<0>(word));
                    scale[i] = f_bits(l_right(word, 0, ~0x1ff));
                    minimum[i] = f_mul(f_mul(zero, f_set(-1.0F)), scale[i]);
                } else {
                    scale[i] = f_bits(word);
                }
            }
        } else if constexpr (kLayout.columns == kBlockGroup) {
            for (int i = 0; i < span / kBlockGroup; ++i) {
                if constexpr (kind == Kind::kMxfp4) {
                    scale[i] = power_of(p + 16 * i);
                } else {
                    scale[i] = f_half(p + 32 * kLayout.halves * i);
                    if constexpr (kMinimum) minimum[i] = f_half(p + 64 * i + 32);
                }
            }
        } else if (span == kLayout.columns) {
            constexpr int kBytes = kLayout.scale_bytes(kLayout.columns);
            Line scales[4], minimums[4];
            unpack(p, scales, minimums);
            put(p + 16 * kBytes, scales, minimums, kMost, 0);
        } else {
            const int bytes = kLayout.scale_bytes(span), count = span / kLayout.scaled;
            Line words[4];
            for (int i = 0; i < bytes / 4; ++i) words[i] = line(p + 64 * i);
            if constexpr (kind == Kind::kQ2K) {
                Line minimums[4];
                for (int i = 0; i < bytes / 4; ++i) {
                    minimums[i] = high_nibbles(words[i]), words[i] = low_nibbles(words[i]);
                }
                put(p + 16 * bytes, words, minimums, count, 0);
            } else {
                put(p + 16 * bytes, words, words, count, kLayout.integers == 2 ? count : 0);
            }
        }
    }

  private:
    // From bytes of integers: scale i is byte i of `scales`, minimum i is byte `first` + i of `minimums`.
    [[gnu::always_inline]] void put(const std::uint8_t* halves, const Line* scales, const Line* minimums, int count,
                                    int first) {
        if (count > 16) __builtin_unreachable();  // compilers warn of more than the bytes of four words
        const F d = f_half(halves);
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) {
            const Line word = scales[i / 4];
            F integer = kind == Kind::kQ6K ? f_signed_byte_at(word, i % 4) : f_byte_at(word, i % 4);
            if constexpr (kind == Kind::kQ3K || kind == Kind::kIq4Xs) integer = f_add(integer, f_set(-32.0F));
            scale[i] = f_mul(d, integer);
        }
        if constexpr (kMinimum) {
            const F of = f_mul(f_half(halves + 32), f_set(-1.0F));
#pragma GCC unroll 16
            for (int i = 0; i < count; ++i) {
                minimum[i] = f_mul(of, f_byte_at(minimums[(first + i) / 4], (first + i) % 4));
            }
        }
    }

    // The header of 256 columns as bytes of integers.
    static void unpack(const std::uint8_t* p, Line* scales, Line* minimums) {
        constexpr std::int32_t kSix = 0x3f3f3f3f, kLow = 0x0f0f0f0f, kHigh = 0x30303030;
        if constexpr (kind == Kind::kQ4K || kind == Kind::kQ5K) {
            const Line a = line(p), b = line(p + 64), c = line(p + 128);
            scales[0] = l_right(a, 0, kSix), scales[1] = l_or(l_right(c, 0, kLow), l_right(a, 2, kHigh));
            minimums[0] = l_right(b, 0, kSix), minimums[1] = l_or(l_right(c, 4, kLow), l_right(b, 2, kHigh));
        } else if constexpr (kind == Kind::kQ3K) {
            const Line a = line(p), b = line(p + 64), c = line(p + 128);
            scales[0] = l_or(l_right(a, 0, kLow), l_left(c, 4, kHigh));
            scales[1] = l_or(l_right(b, 0, kLow), l_left(c, 2, kHigh));
            scales[2] = l_or(l_right(a, 4, kLow), l_right(c, 0, kHigh));
            scales[3] = l_or(l_right(b, 4, kLow), l_right(c, 2, kHigh));
        } else if constexpr (kind == Kind::kIq4Xs) {
            // A row's byte i has the low bits of scales 2i and 2i + 1. The high bits of 16 rows lie after the words.
            std::uint32_t low[16], both[2][16];
            std::uint16_t high[16];
            __builtin_memcpy(low, p, 64);
            __builtin_memcpy(high, p + 64, 32);
            for (int row = 0; row < 16; ++row) {
                std::uint32_t bytes[2] = {0, 0};
                for (int i = 0; i < 8; ++i) {
                    const std::uint32_t six = (low[row] >> 4 * i & 15U) | (std::uint32_t{high[row]} >> 2 * i & 3U) << 4;
                    bytes[i / 4] |= six << 8 * (i % 4);
                }
                both[0][row] = bytes[0], both[1][row] = bytes[1];
            }
            scales[0] = line(both[0]), scales[1] = line(both[1]);
        } else {
            for (int i = 0; i < 4; ++i) {
                const Line word = line(p + 64 * i);
                scales[i] = kind == Kind::kQ2K ? low_nibbles(word) : word;
                if constexpr (kind == Kind::kQ2K) minimums[i] = high_nibbles(word);
            }
        }
    }

    // 2^(e - 128) of 16 bytes e, as a product of two powers: it may be less than the least normal number.
    static F power_of(const std::uint8_t* exponents) {
        const F e = f_bytes(exponents), low = f_from(i_round(f_mul(e, f_set(0.5F))));
        const F high = f_add(e, f_mul(low, f_set(-1.0F))), shift = f_set(-64.0F);
        return f_mul(f_power(f_add(low, shift)), f_power(f_add(high, shift)));
    }
};

// The codes of columns 4l … 4l + 3 of a group whose lines begin at p: unsigned bytes, of which kLayout.offset is to be
// taken.
template <Kind kind>
[[gnu::always_inline]] inline Line four_codes(const std::uint8_t* p, int l) {
    constexpr Blocks kLayout = blocks_of(kind);
    constexpr int kLow = kLayout.low, kHigh = kLayout.high;
    Line codes;
    if constexpr (kLow == 8) {
        codes = line(p + 64 * l);
    } else if constexpr (kLow == 4) {
        const Line both = line(p + 64 * (l / 2));
        codes = l % 2 == 0 ? low_nibbles(both) : high_nibbles(both);
    } else {
        codes = l_right(line(p + 64 * (l / 4)), 2 * (l % 4), 0x03030303);
    }
    if constexpr (kHigh > 0) {
        constexpr std::int32_t kMask = 0x01010101 * (((1 << kHigh) - 1) << kLow);
        const Line bits = line(p + 64 * (kLow + (kHigh == 2 ? l / 4 : 0)));
        const int at = kHigh == 2 ? 2 * (l % 4) : l;  // where the bits lie in their bytes
        codes = l_or(codes, at < kLow ? l_left(bits, kLow - at, kMask) : l_right(bits, at - kLow, kMask));
    }
    if constexpr (kind == Kind::kIq4Nl || kind == Kind::kIq4Xs) codes = l_lookup(codes, kIq4);
    if constexpr (kind == Kind::kMxfp4) codes = l_lookup(codes, kFp4);
    return codes;
}

// Where a pragma writes out a loop, clang writes out those in it only if it is told to, and else keeps their sums on
// the stack. GCC does so by itself. Told to, it made a third more code of all formats.
#ifdef __clang__
#define PENSTOCK_WRITE_OUT _Pragma("GCC unroll 16")
// Clang also keeps a loop over groups out of line, and its sums in memory, which GCC does not: 1.2 times as long with
// 14 rows.
#define PENSTOCK_IN_LINE __attribute__((always_inline))
#else
#define PENSTOCK_WRITE_OUT
#define PENSTOCK_IN_LINE
#endif

// sums += one group of k tiles, which are `next` bytes apart: Σ (code - offset) · q by integers, times scale · x_scale,
// plus minimum · x_sum. `p`: the group's lines in the first tile. `g`: its number in the block.
template <Kind kind, int n, int k>
[[gnu::always_inline]] inline void add_group_of(const BlockFactors<kind>* factors, int g, const std::uint8_t* p,
                                                std::size_t next, std::size_t ahead, bool reused, const Operand& x,
                                                Sums<n, k>& sums) {
    constexpr Blocks kLayout = blocks_of(kind);
    // Scales of a group; fours of each.
    constexpr int kParts = kLayout.scaled < kBlockGroup ? kBlockGroup / kLayout.scaled : 1, kFours = 8 / kParts;
    constexpr int kChains = kParts == 1 && n * k * (kTileRows / kLanes) < 8 ? 2 : 1;
    using Sum = CodeSum<most_code(kind)>;
    PENSTOCK_WRITE_OUT
    for (int i = 0; i < k; ++i) {
        PENSTOCK_WRITE_OUT
        for (int l = 0; l < kLayout.low + kLayout.high; ++l) {
            prefetch(p + std::size_t(i) * next + std::size_t(64 * l) + ahead, reused);
        }
    }
    F scaled[n][k];
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
        Sum whole[n][k][kChains];
        PENSTOCK_WRITE_OUT
        for (int r = 0; r < n; ++r) {
            I begin = i_zero();
            if constexpr (kLayout.offset > 0) {
                const std::int16_t* const halves = x.halves + r;
                const int sum = kParts == 2 ? halves[part * n] : halves[0] + halves[n];
                begin = i_set(-kLayout.offset * sum);
            }
            PENSTOCK_WRITE_OUT
            for (int i = 0; i < k; ++i) whole[r][i][0].total = begin;
        }
#pragma GCC unroll 8
        for (int j = 0; j < kFours; ++j) {
            const int l = part * kFours + j;
            Line codes[k];
            PENSTOCK_WRITE_OUT
            for (int i = 0; i < k; ++i) codes[i] = four_codes<kind>(p + std::size_t(i) * next, l);
            PENSTOCK_WRITE_OUT
            for (int r = 0; r < n; ++r) {
                const std::int8_t* const four = x.q + (l * n + r) * 4;
                PENSTOCK_WRITE_OUT
                for (int i = 0; i < k; ++i) whole[r][i][j % kChains].add(codes[i], four);
            }
            if constexpr (Sum::kFull > 0) {
                if ((j + 1) % (Sum::kFull * kChains) != 0 && j + 1 != kFours) continue;
                PENSTOCK_WRITE_OUT
                for (int r = 0; r < n; ++r) {
                    PENSTOCK_WRITE_OUT
                    for (int i = 0; i < k; ++i) {
                        for (Sum& sum : whole[r][i]) sum.widen();
                    }
                }
            }
        }
        PENSTOCK_WRITE_OUT
        for (int i = 0; i < k; ++i) {
            const F scale = factors[i].scale[kLayout.scale_of(kBlockGroup * g) + part];
            PENSTOCK_WRITE_OUT
            for (int r = 0; r < n; ++r) {
                I total = whole[r][i][0].total;
                if constexpr (kChains == 2) total = i_add(total, whole[r][i][1].total);
                if constexpr (kParts == 1) {
                    sums.at[r][i] = f_fma(f_from(total), f_mul(scale, f_set(x.scale[r])), sums.at[r][i]);
                } else {
                    scaled[r][i] = part == 0 ? f_mul(f_from(total), scale) : f_fma(f_from(total), scale, scaled[r][i]);
                }
            }
        }
    }
    PENSTOCK_WRITE_OUT
    for (int i = 0; i < k; ++i) {
        if constexpr (BlockFactors<kind>::kMinimum && kParts == 2) {  // a minimum for each half
            const F first = factors[i].minimum[2 * g], second = factors[i].minimum[2 * g + 1];
            PENSTOCK_WRITE_OUT
            for (int r = 0; r < n; ++r) {
                scaled[r][i] = f_fma(first, f_set(static_cast<float>(x.halves[r])), scaled[r][i]);
                scaled[r][i] = f_fma(second, f_set(static_cast<float>(x.halves[n + r])), scaled[r][i]);
            }
        } else if constexpr (BlockFactors<kind>::kMinimum) {
            const F minimum = factors[i].minimum[kLayout.scale_of(kBlockGroup * g)];
            PENSTOCK_WRITE_OUT
            for (int r = 0; r < n; ++r) sums.at[r][i] = f_fma(minimum, f_set(x.sum[r]), sums.at[r][i]);
        }
        if constexpr (kParts == 2) {
            PENSTOCK_WRITE_OUT
            for (int r = 0; r < n; ++r) sums.at[r][i] = f_fma(scaled[r][i], f_set(x.scale[r]), sums.at[r][i]);
        }
    }
}
#undef PENSTOCK_WRITE_OUT

// sums += k tiles, which are `next` bytes apart, of one granule · x.
template <Kind kind, int n, int k>
[[gnu::always_inline]] inline void add_tiles_of(const Matrix& m, const std::uint8_t* p, std::size_t next,
                                                std::size_t ahead, bool reused, Operand x, Sums<n, k>& sums) {
    constexpr Blocks kLayout = blocks_of(kind);
    const int span = kLayout.span(m.cols), header = kLayout.header_bytes(span);
    for (int c = 0; c < m.cols; c += span) {
        const auto factors_of = [&](int i) {
            const std::uint8_t* const at = p + std::size_t(i) * next;
            for (int byte = 0; byte < header; byte += 64) prefetch(at + byte + ahead, reused);
            return BlockFactors<kind>(at, span);
        };
        const auto run = [&](const BlockFactors<kind>* factors) PENSTOCK_IN_LINE {
            p += header;
            for (int g = 0; g < span / kBlockGroup; ++g) {
                add_group_of<kind, n, k>(factors, g, p, next, ahead, reused, x, sums);
                p += 64 * (kLayout.low + kLayout.high);
                x = x.at(kBlockGroup, 1, n);
            }
        };
        if constexpr (k == 1) {
            const BlockFactors<kind> factors[1] = {factors_of(0)};
            run(factors);
        } else {
            static_assert(k == 2);
            const BlockFactors<kind> factors[2] = {factors_of(0), factors_of(1)};
            run(factors);
        }
    }
}

#undef PENSTOCK_IN_LINE

template <Kind kind, int n, int k>
void dot_rounded(const Matrix& m, const Series& series, const Operand& x, Sums<n, k>& out) {
    Sums<n, k> sums = out;  // a copy, so that it stays in registers
    for (int i = 0; i < series.count; ++i) {
        add_tiles_of<kind, n, k>(m, series.first + std::size_t(i) * series.stride, m.tile_bytes(), series.ahead,
                                 series.reused, x.at(std::ptrdiff_t(i) * m.cols, std::ptrdiff_t(i) * m.groups(), n),
                                 sums);
    }
    out = sums;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA

#include "blocks-widened-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// sums += k tiles · x, one tile after the other. Many rows take blocks-many-inl.h where registers suffice.
template <int n, int k>
void dot_in_blocks(const Matrix& m, const Series& weights, const Operand& x, Sums<n, k>& sums) {
    by_blocks(m.kind, [&]<Kind kind>() {
        for (int i = 0; i < k; ++i) {
            Sums<n, 1> one;
            for (int r = 0; r < n; ++r) one.at[r][0] = sums.at[r][i];
            Series series = weights;
            series.first += std::size_t(i) * m.tile_bytes();
            if constexpr (multiplies_codes(kind)) {
                x.q != nullptr ? dot_rounded<kind, n, 1>(m, series, x, one) : dot_widened<kind, n>(m, series, x, one);
            } else {
                dot_widened<kind, n>(m, series, x, one);
            }
            for (int r = 0; r < n; ++r) sums.at[r][i] = one.at[r][0];
        }
    });
}

// As dot_short, for formats in blocks.
template <int n>
void dot_short_in_blocks(const Matrix& m, const std::uint8_t* p, int tiles, std::size_t ahead, const Operand& x,
                         int real, const float* before, float* to, std::ptrdiff_t stride) {
    const std::size_t next = m.tile_bytes();
    by_blocks(m.kind, [&]<Kind kind>() {
        if constexpr (!multiplies_codes(kind)) return;  // its activations are never rounded
        for (int tile = 0; tile < tiles; ++tile, p += next, to += kTileRows) {
            Sums<n, 1> sums;
            for (int r = 0; r < n; ++r) {
                sums.at[r][0] = before != nullptr && r < real ? f_load(before + r * stride) : f_zero();
            }
            if (before != nullptr) before += kTileRows;
            add_tiles_of<kind, n, 1>(m, p, next, ahead, false, x, sums);
            for (int r = 0; r < n; ++r) {
                if (r < real) f_store(to + r * stride, sums.at[r][0]);
            }
        }
    });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
