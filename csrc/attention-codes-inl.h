// Attention over a KV cache of integers with rounded factors, for one instruction set: codes are multiplied as they
// lie, without being widened to floats. Queries and scores are here, values in attention-spans-inl.h.
//
// The rule, of which no bit depends on the instruction set's shapes. A query's numbers are rounded for each piece of
// 256 columns of a group: q = step · n + rest, where |n| is at most 32,767 and the largest is that. Beside keys in int4
// it is 127: these lose some twenty times more by their own rounding, and a product of bytes does twice the work of one
// of words. What a code of a value is multiplied with, a position's weight times its scale, has 16 bits in both
// formats, for each group and each span of 64 positions: a softmax over thousands of positions has small weights. Sums
// of codes times such n are exact in 32 bits. What rounding left over is counted with the middle of the codes, so that
// it costs only codes' differences from there: on average it shifts nothing.
#pragma once

#include "cache-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr float kMostWord = 32767.0F;
template <Kind kind>
constexpr float kMostOfQuery = kind == Kind::kInt4 ? 127.0F : kMostWord;
constexpr int kPieceColumns = 256;  // 255 · 32,767 · 256 is below 2^31

// 16 bytes of a row have kUnitColumns columns, and 32 bits of it kUnitWords words of two columns each. Word w of 32
// bits at 4 j has the columns word_column(w) + 4 j and that + 2. Values are multiplied word by word, and so are keys in
// int8. Keys in int4 are multiplied by fours: half h of the 32 bits has the columns 16 h + 4 j … + 3. So a unit of keys
// has kUnitSteps steps of products in both formats.
template <Kind kind>
constexpr int kUnitColumns = kind == Kind::kInt4 ? 32 : 16;
template <Kind kind>
constexpr int kUnitWords = kind == Kind::kInt4 ? 4 : 2;
template <Kind kind>
constexpr float kMiddle = kind == Kind::kInt4 ? 7.5F : 127.5F;  // of the codes
constexpr int word_column(int w) { return w / 2 * 16 + w % 2; }
constexpr int kHalfSteps = 2, kUnitSteps = 4 * kHalfSteps;  // of 32 bits, and of a unit
// Rows of `width` columns that a register of kWideBytes has. Two where they are half as long: int4 with 64 columns took
// as long as with 128 when each had a register of its own. No bit depends on it, since sums are exact.
template <Kind kind>
constexpr int packed_rows(int width) {
    return kWideLines > 1 && 2 * width == kWideLines * kUnitColumns<kind> ? 2 : 1;
}

template <Kind kind, int w>
[[gnu::always_inline]] inline Line word_of(Line x) {
    if constexpr (kind == Kind::kInt8) return l_words<8 * w, 255>(x);
    return l_words<w % 2 * 8 + w / 2 * 4, 15>(x);
}

// The codes that a step of products of keys takes from 32 bits.
template <Kind kind, int part>
[[gnu::always_inline]] inline Line codes_of(Line x) {
    if constexpr (kind == Kind::kInt8) return word_of<kind, part>(x);
    return part == 0 ? low_nibbles(x) : high_nibbles(x);
}

// Four numbers of 8 bits, and two of 16, of columns of which one is left out.
inline std::int32_t four_of(const std::int32_t* n) {
    const auto byte = [n](int i) { return (static_cast<std::uint32_t>(n[i]) & 255U) << 8 * i; };
    return static_cast<std::int32_t>(byte(0) | byte(1) | byte(2) | byte(3));
}
inline std::int32_t two_of(const std::int32_t* n) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(n[2]) << 16 |
                                     (static_cast<std::uint32_t>(n[0]) & 0xffffU));
}

// Queries of a KV head, rounded. Arrays are one for all: of `count` queries side by side.
struct RoundedQueries {
    int count, width, group, pieces_per_group, pieces;
    std::int32_t* words;          // [steps][count]: two numbers each, or four, in the order of products
    float *steps, *rests, *sums;  // [pieces][count]: of n; of what is left, times the middle; of the query itself

    RoundedQueries(int queries, int columns, int of_group, float* memory)
        : count(queries),
          width(columns),
          group(std::min(of_group, columns)),
          pieces_per_group((group + kPieceColumns - 1) / kPieceColumns),
          pieces((width + group - 1) / group * pieces_per_group) {
        words = reinterpret_cast<std::int32_t*>(memory);
        steps = memory + std::ptrdiff_t(width / 2) * count;
        rests = steps + std::ptrdiff_t(pieces) * count, sums = rests + std::ptrdiff_t(pieces) * count;
    }
    // The columns of a piece. A group's last one may have none.
    int first(int piece) const {
        return std::min(piece / pieces_per_group * group + piece % pieces_per_group * kPieceColumns, width);
    }
    int end(int piece) const {
        const int of_group = std::min((piece / pieces_per_group + 1) * group, width);
        return std::max(first(piece), std::min(first(piece) + kPieceColumns, of_group));
    }

    // Rounds query i. q [width] is followed by as many floats that may be written.
    template <Kind kind>
    void round(int i, float* q) const {
        auto* const numbers = reinterpret_cast<std::int32_t*>(q + width);
        for (int piece = 0; piece < pieces; ++piece) {
            const int from = first(piece), to = end(piece);
            I peak = i_zero();
            for (int c = from; c < to; c += 16) peak = i_max(peak, i_magnitude(f_load(q + c)));
            const std::int32_t bits = i_max_of(peak);
            float most;
            std::memcpy(&most, &bits, 4);
            // A NaN or an infinity makes all scores NaN.
            const float step = bits >= 0x7f800000 ? NAN : most < 1e-30F ? 0.0F : most / kMostOfQuery<kind>;
            const F inverse = f_set(step > 0 ? kMostOfQuery<kind> / most : 0.0F), back = f_set(-step);
            F all = f_zero(), rest = f_zero();
            for (int c = from; c < to; c += 16) {
                const F x = f_load(q + c);
                const I n = i_round(f_mul(x, inverse));
                i_store(numbers + c, n);
                all = f_add(all, x), rest = f_add(rest, f_fma(back, f_from(n), x));
            }
            const std::ptrdiff_t at = std::ptrdiff_t(piece) * count + i;
            steps[at] = step, rests[at] = kMiddle<kind> * f_sum(rest), sums[at] = f_sum(all);
        }
        std::int32_t* to = words + i;
        for (int unit = 0; unit < width; unit += kUnitColumns<kind>) {
            for (int j = 0; j < 4; ++j) {
                for (int part = 0; part < kHalfSteps; ++part, to += count) {
                    const std::int32_t* const n = numbers + unit + 4 * j;
                    *to = kind == Kind::kInt4 ? four_of(n + 16 * part) : two_of(n + word_column(part));
                }
            }
        }
    }
};

// Keys or values of a run. `scales` and `minimums`: the float16 of the run's first position in group 0. Of the next
// group they lie `stride` positions further.
struct Codes {
    const std::uint8_t* rows;
    std::size_t row_bytes;
    const std::uint8_t *scales, *minimums;
    int stride, count;
    const std::uint8_t* ahead;  // the rows that are read next, or null

    F scale(int group, int at) const { return f_half(scales + 2 * (std::ptrdiff_t(group) * stride + at)); }
    F minimum(int group, int at) const { return f_half(minimums + 2 * (std::ptrdiff_t(group) * stride + at)); }
    // What is fetched while the rows from `at` on are multiplied, kFetchBytes further on, or null.
    const std::uint8_t* further(int at) const {
        if (ahead == nullptr) return nullptr;
        const int row = at + std::min(static_cast<int>(kFetchBytes / row_bytes), count);
        return row < count ? rows + std::size_t(row) * row_bytes : ahead + std::size_t(row - count) * row_bytes;
    }
};

// Fetches a few lines: more at once than a core has under way would wait for each other. So each step of products
// fetches as many bytes as it reads. One query over int8 in RAM: 17.7 ns a position, and 21.6 with all lines fetched in
// the first half of the steps. Always inline, as `fetch`.
[[gnu::always_inline]] inline void fetch_codes(const std::uint8_t* from, std::size_t nbytes) {
    if (from == nullptr) return;
    for (std::size_t b = 0; b < nbytes; b += 64) fetch<false>(from + b);
}

// The words of n queries from `first` on, each as often as a register of keys wants it: [steps][n][kPairLanes], for
// whole kWideBytes bytes. For each of several keys in a register they are the same.
template <Kind kind>
void spread_words(const RoundedQueries& q, int first, int n, std::int32_t* to) {
    constexpr int kColumns = kWideLines * kUnitColumns<kind>;
    constexpr int kCopies = kPairLanes / kWideLines;
    const int of_row = kWideLines / packed_rows<kind>(q.width);
    for (int column = 0; column < q.width; column += kColumns) {
        for (int step = 0; step < kUnitSteps; ++step) {
            for (int i = first; i < first + n; ++i) {
                for (int unit = 0; unit < kWideLines; ++unit, to += kCopies) {
                    const int at = column / kUnitColumns<kind> + unit % of_row;
                    const bool inside = at * kUnitColumns<kind> < q.width;
                    std::fill_n(to, kCopies, inside ? q.words[(at * kUnitSteps + step) * q.count + i] : 0);
                }
            }
        }
    }
}

// The spread words of the last tiles of queries, which the next run of keys mostly wants again.
class SpreadWords {
  public:
    // Those of n queries from `first` on. `other`: where they go if they are too many to be kept, 32 floats a column.
    template <Kind kind, int n>
    const std::int32_t* words(const RoundedQueries& q, int first, float* other) {
        constexpr int kColumns = kWideLines * kUnitColumns<kind>;
        const int wanted = (q.width + kColumns - 1) / kColumns * kUnitSteps * n * kPairLanes;
        if (wanted > kMost) {
            spread_words<kind>(q, first, n, reinterpret_cast<std::int32_t*>(other));
            return reinterpret_cast<std::int32_t*>(other);
        }
        Tile& tile = tiles_[first / kCodeQueries % 2];
        if (tile.first != first || tile.n != n) spread_words<kind>(q, first, n, tile.words);
        tile.first = first, tile.n = n;
        return tile.words;
    }

  private:
    static constexpr int kMost = 2048;  // of four queries with 256 columns of int8
    struct Tile {
        alignas(64) std::int32_t words[kMost];
        int first = -1, n = 0;
    };
    Tile tiles_[2];
};

// Sums of products of 16 keys' kWideBytes bytes, of which unit k has those of its columns: sums[i][k], for n queries.
template <Kind kind, int n>
[[gnu::noinline]] void dot_keys(const std::uint8_t* row, std::size_t row_bytes, const std::int32_t* words,
                                const std::uint8_t* ahead, I (&sums)[n][kWideLines]) {
#pragma GCC unroll 8
    for (int part = 0; part < kWideLines; part += kKeyLines) {
        I acc[n][kKeyLines];
#pragma GCC unroll 8
        for (int i = 0; i < n; ++i) {
#pragma GCC unroll 4
            for (int b = 0; b < kKeyLines; ++b) acc[i][b] = i_zero();
        }
        Line lines[kKeyLines][4];
#pragma GCC unroll 4
        for (int b = 0; b < kKeyLines; ++b) {
            key_lines(row + std::size_t(part + b) * (16 / kWideLines) * row_bytes, row_bytes, lines[b]);
        }
        const auto step = [&]<int j, int part>() __attribute__((always_inline)) {
            Line codes[kKeyLines];
#pragma GCC unroll 4
            for (int b = 0; b < kKeyLines; ++b) codes[b] = codes_of<kind, part>(lines[b][j]);
#pragma GCC unroll 8
            for (int i = 0; i < n; ++i) {
                const std::int32_t* const at = words + ((j * kHalfSteps + part) * n + i) * kPairLanes;
                if constexpr (kind == Kind::kInt4) {
                    const FourBytes four = four_bytes_at(at);
#pragma GCC unroll 4
                    for (int b = 0; b < kKeyLines; ++b) acc[i][b] = i_dot_nibbles(acc[i][b], codes[b], four);
                } else {
                    const Pair pair = pair_at(at);
#pragma GCC unroll 4
                    for (int b = 0; b < kKeyLines; ++b) acc[i][b] = i_dot_words(acc[i][b], codes[b], pair);
                }
            }
        };
        const auto line = [&]<int j>() __attribute__((always_inline)) {
            if (ahead != nullptr) {
                constexpr std::size_t kBytes = 16 * kWideBytes / (4 * (kWideLines / kKeyLines));
                fetch_codes(ahead, kBytes);
                ahead += kBytes;
            }
            step.template operator()<j, 0>(), step.template operator()<j, 1>();
        };
        line.template operator()<0>(), line.template operator()<1>();
        line.template operator()<2>(), line.template operator()<3>();
#pragma GCC unroll 8
        for (int i = 0; i < n; ++i) {
#pragma GCC unroll 4
            for (int b = 0; b < kKeyLines; ++b) {
                sums[i][part + b] = kind == Kind::kInt4 ? i_of_nibbles(acc[i][b]) : acc[i][b];
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) wide_columns(sums[i]);
}

// scores[i][position] = scale · query · key, for n queries from `first` on, whose words are spread. Scores lie
// kBlockTokens apart. `packed`: packed_rows().
template <Kind kind, int n, int packed>
void score_codes(const RoundedQueries& q, int first, const std::int32_t* words, const Codes& keys, float scale,
                 float* scores) {
    constexpr int kStepWords = kUnitSteps * n * kPairLanes, kUnits = kWideLines / packed;
    for (int token = 0; token < keys.count; token += 16 * packed) {
        const std::uint8_t* ahead = keys.further(token);
        const std::uint8_t* row = keys.rows + std::size_t(token) * keys.row_bytes;
        const std::int32_t* step = words;
        F total[packed][n];
        I open[packed][n];  // of the piece so far
        for (int i = 0; i < packed * n; ++i) total[i / n][i % n] = f_zero(), open[i / n][i % n] = i_zero();
        int group = 0, piece = 0, group_end = std::min(q.group, q.width), end = std::min(kPieceColumns, group_end);
        for (int column = 0; column < q.width; row += kWideBytes, step += kStepWords) {
            I sums[n][kWideLines];
            dot_keys<kind, n>(row, packed * keys.row_bytes, step, ahead, sums);
            if (ahead != nullptr) ahead += 16 * kWideBytes;
            if constexpr (packed == 2) {
                for (int k = 0; k < n * kUnits; ++k)
                    i_zip(sums[k / kUnits][k % kUnits], sums[k / kUnits][k % kUnits + kUnits]);
            }
#pragma GCC unroll 4
            for (int unit = 0; unit < kUnits; ++unit) {
                if (column >= q.width) break;
                column += kUnitColumns<kind>;
#pragma GCC unroll 2
                for (int part = 0; part < packed; ++part) {
#pragma GCC unroll 8
                    for (int i = 0; i < n; ++i) open[part][i] = i_add(open[part][i], sums[i][unit + part * kUnits]);
                }
                if (column < end) continue;
                const std::ptrdiff_t at = std::ptrdiff_t(piece) * q.count + first;
#pragma GCC unroll 2
                for (int part = 0; part < packed; ++part) {
                    const int from = token + 16 * part;
                    const F of_group = keys.scale(group, from), minimum = keys.minimum(group, from);
#pragma GCC unroll 8
                    for (int i = 0; i < n; ++i) {
                        F& sum = total[part][i];
                        const F product = f_fma(f_from(open[part][i]), f_set(q.steps[at + i]), f_set(q.rests[at + i]));
                        sum = f_fma(minimum, f_set(q.sums[at + i]), f_fma(of_group, product, sum));
                        open[part][i] = i_zero();
                    }
                }
                ++piece;
                if (column >= group_end) {
                    piece = ++group * q.pieces_per_group, group_end = std::min(group_end + q.group, q.width);
                }
                end = std::min(column + kPieceColumns, group_end);
            }
        }
        for (int part = 0; part < packed; ++part) {
            for (int i = 0; i < n; ++i) {
                f_store(scores + i * kBlockTokens + token + 16 * part, f_mul(total[part][i], f_set(scale)));
            }
        }
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
