// Products of many rows with weights in the formats of spec/blocks.py, for x86's vectors. Scales and minimums of some
// groups, and codes where that takes long, are unpacked once, and multiplied with panel after panel. Included after
// blocks-inl.h.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int kUnpackedGroups = 8;            // at a time: 4 KiB of factors and 8 of codes, which stay in the L1 cache
constexpr int kUnpackedPanels = 8;            // that take them one after the other: their sums take 6 KiB
constexpr bool kHoldsSums = kRegisters > 16;  // there are registers for sums beside those of a group
using WideSums = F[kWideRows][kWideTiles];

// Whether codes are unpacked too. With two scales a group there are no registers left to do it beside the products: a
// prompt in q6_k took 1.58 times as long as in int4, and takes 1.31. The others lose 4 % by it, since processors store
// a vector a cycle. With 16 registers of half the width all are unpacked but those that are bytes already.
constexpr bool unpacks(Kind kind) {
    return kHoldsSums ? blocks_of(kind).scaled < kBlockGroup : blocks_of(kind).low < 8;
}

// Fewer panels are multiplied with what is unpacked meanwhile. On Zen 4 an FFN's product took so many times as long
// with weights that are unpacked first: with AVX-512 q4_0 1.25, 1.24, 1.11 and 0.99 for one to four panels, and
// q6_k 1.66, 1.58, 1.33 and some 1.2; with AVX2 q4_0 1.05 and 0.78 for one and two.
constexpr int least_unpacked_panels(Kind kind) {
    if (!kHoldsSums) return 2;
    return blocks_of(kind).scaled < kBlockGroup ? 7 : 4;
}

// Groups of two tiles. `lines`: of the first tile; those of the second are `next` bytes further on. Scales and minimums
// are as BlockFactors has them.
struct Unpacked {
    const std::uint8_t* lines[kUnpackedGroups];
    std::size_t next;
    F scale[kUnpackedGroups][2][kWideTiles], minimum[kUnpackedGroups][2][kWideTiles];
    alignas(64) std::uint8_t codes[kUnpackedGroups][8][kWideTiles][64];
};

// Scales of a group of 32 columns; one may be of several groups.
constexpr int parts_of(const Blocks& layout) { return layout.scaled < kBlockGroup ? kBlockGroup / layout.scaled : 1; }

// Unpacks a block of `span` columns of both tiles as groups `first` …, and fetches what lies `ahead` bytes after it.
template <Kind kind>
void unpack_block(const std::uint8_t* p, std::size_t ahead, int span, int first, Unpacked& to) {
    constexpr Blocks kLayout = blocks_of(kind);
    constexpr int kParts = parts_of(kLayout), kGroupBytes = 64 * (kLayout.low + kLayout.high);
    for (int tile = 0; tile < kWideTiles; ++tile, p += to.next) {
        const BlockFactors<kind> factors(p, span);
        for (int byte = 0; byte < kLayout.block_bytes(span); byte += 64) prefetch(p + byte + ahead, true);
        for (int g = 0; g < span / kBlockGroup; ++g) {
            const std::uint8_t* const lines = p + kLayout.header_bytes(span) + g * kGroupBytes;
            if (tile == 0) to.lines[first + g] = lines;
            const int number = kLayout.scale_of(kBlockGroup * g);
            for (int part = 0; part < kParts; ++part) {
                to.scale[first + g][part][tile] = factors.scale[number + part];
                if constexpr (BlockFactors<kind>::kMinimum) {
                    to.minimum[first + g][part][tile] = factors.minimum[number + part];
                }
            }
            if constexpr (unpacks(kind)) {
#pragma GCC unroll 8
                for (int l = 0; l < 8; ++l) l_store(to.codes[first + g][l][tile], four_codes<kind>(lines, l));
            }
        }
    }
}

// sums = Σ (code - offset) · q of a group of each tile, or of one of its two parts.
template <Kind kind, class Sum, int n, int k>
[[gnu::always_inline]] inline void add_codes(const Unpacked& w, int g, int part, const Operand& x, Sum (&whole)[n][k]) {
    constexpr Blocks kLayout = blocks_of(kind);
    constexpr int kParts = parts_of(kLayout), kFours = 8 / kParts;
    for (int r = 0; r < n; ++r) {
        I begin = i_zero();
        if constexpr (kLayout.offset > 0) {
            const int half = x.halves[part * n + r];
            begin = i_set(-kLayout.offset * (kParts == 2 ? half : half + x.halves[n + r]));
        }
        for (int i = 0; i < k; ++i) whole[r][i].total = begin;
    }
#pragma GCC unroll 8
    for (int j = 0; j < kFours; ++j) {
        const int l = part * kFours + j;
        Line codes[k];
        for (int i = 0; i < k; ++i) {
            if constexpr (unpacks(kind)) {
                codes[i] = line(w.codes[g][l][i]);
            } else {
                codes[i] = four_codes<kind>(w.lines[g] + std::size_t(i) * w.next, l);
            }
        }
        for (int r = 0; r < n; ++r) {
            for (int i = 0; i < k; ++i) whole[r][i].add(codes[i], x.q + (l * n + r) * 4);
        }
        if constexpr (Sum::kFull > 0) {
            if ((j + 1) % Sum::kFull != 0 && j + 1 != kFours) continue;
            for (int r = 0; r < n; ++r) {
                for (int i = 0; i < k; ++i) whole[r][i].widen();
            }
        }
    }
}

// to += `count` groups · x, by the very operations of add_group_of.
template <Kind kind>
void add_unpacked(const Unpacked& w, int count, Operand x, WideSums& to) {
    constexpr Blocks kLayout = blocks_of(kind);
    constexpr int n = kWideRows, k = kWideTiles, kParts = parts_of(kLayout);
    constexpr bool kMinimum = BlockFactors<kind>::kMinimum;
    // Codes of 8 bits whose offset is 128. Their tile's codes lie line by line as they are multiplied.
    constexpr bool kCentred = kCentres && kLayout.offset == 128 && k == 1;
    using Sum = CodeSum<most_code(kind)>;
    // With two scales a group sums stay in memory: there are no registers for them beside the sums of a group.
    constexpr bool kHeld = kParts == 1 && kHoldsSums;
    F held[n][k];
    for (int r = 0; kHeld && r < n; ++r) {
        for (int i = 0; i < k; ++i) held[r][i] = to[r][i];
    }
    WideSums& sums = kHeld ? held : to;
    for (int g = 0; g < count; ++g, x = x.at(kBlockGroup, 1, n)) {
        F scaled[n][k];
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            Sum whole[n][k];
            if constexpr (kCentred) {
                for (int i = 0; i < k; ++i) {
                    I totals[n];
                    centred_dots(unpacks(kind) ? w.codes[g][0][i] : w.lines[g] + std::size_t(i) * w.next, x.q, totals);
                    for (int r = 0; r < n; ++r) whole[r][i].total = totals[r];
                }
            } else {
                add_codes<kind>(w, g, part, x, whole);
            }
            for (int i = 0; i < k; ++i) {
                const F scale = w.scale[g][part][i];
                for (int r = 0; r < n; ++r) {
                    const F total = f_from(whole[r][i].total);
                    if constexpr (kParts == 1) {
                        sums[r][i] = f_fma(total, f_mul(scale, f_set(x.scale[r])), sums[r][i]);
                    } else {
                        scaled[r][i] = part == 0 ? f_mul(total, scale) : f_fma(total, scale, scaled[r][i]);
                    }
                }
            }
        }
        for (int i = 0; i < k; ++i) {
            for (int r = 0; r < n; ++r) {
                if constexpr (kParts == 1) {
                    if constexpr (kMinimum) sums[r][i] = f_fma(w.minimum[g][0][i], f_set(x.sum[r]), sums[r][i]);
                } else {
                    if constexpr (kMinimum) {
                        const F first = f_set(static_cast<float>(x.halves[r]));
                        const F second = f_set(static_cast<float>(x.halves[n + r]));
                        scaled[r][i] = f_fma(w.minimum[g][0][i], first, scaled[r][i]);
                        scaled[r][i] = f_fma(w.minimum[g][1][i], second, scaled[r][i]);
                    }
                    to[r][i] = f_fma(scaled[r][i], f_set(x.scale[r]), to[r][i]);
                }
            }
        }
    }
    for (int r = 0; kHeld && r < n; ++r) {
        for (int i = 0; i < k; ++i) to[r][i] = held[r][i];
    }
}

// sums[panel] += two tiles of each granule · the panel's rows, for `panels` panels of x from `row` on. `columns`,
// `groups`: of the activations that the first granule is multiplied with. A template, so that only instruction sets
// that call it compile it.
template <int rows>
void add_wide_panels(const Matrix& m, const Series& series, const Rows& x, std::ptrdiff_t columns,
                     std::ptrdiff_t groups, int row, int panels, WideSums* sums) {
    by_blocks(m.kind, [&]<Kind kind>() {
        if constexpr (!multiplies_codes(kind)) return;  // its activations are never rounded
        constexpr Blocks kLayout = blocks_of(kind);
        Unpacked weights;
        weights.next = m.tile_bytes();
        const int span = kLayout.span(m.cols), per_span = span / kBlockGroup, all = m.groups() * series.count;
        int done = 0, unpacked = 0;
        for (int g = 0; g < series.count; ++g) {
            const std::uint8_t* p = series.first + std::size_t(g) * series.stride;
            for (int c = 0; c < m.cols; c += span, p += kLayout.block_bytes(span)) {
                unpack_block<kind>(p, series.ahead, span, unpacked, weights);
                unpacked += per_span;
                if (unpacked + per_span <= kUnpackedGroups && done + unpacked < all) continue;
                for (int panel = 0; panel < panels; ++panel) {
                    const Operand operand = x.panel(row + panel * rows)
                                                .at(columns + std::ptrdiff_t(done) * kBlockGroup, groups + done, rows);
                    add_unpacked<kind>(weights, unpacked, operand, sums[panel]);
                }
                done += unpacked, unpacked = 0;
            }
        }
    });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
