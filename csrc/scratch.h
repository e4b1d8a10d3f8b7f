// How many bytes of scratch each op wants: enough to run as fast as it can on kScratchThreads threads. The arithmetic
// is the same for every instruction set. penstock/graph/scratch_native.py repeats it, since plans are made also where
// nothing native runs. A test holds the two to each other.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels.h"

namespace penstock {

constexpr std::size_t kScratchAlign = 64;
constexpr int kScratchThreads = 8;  // attention gets temporaries for so many threads
constexpr int kScratchFours = 16;   // fours of an FFN summed at a time: more than threads, which wait after them
constexpr int kMostFewRows = 8;     // the most rows for which threads take whole fours
constexpr int kHiddenRows = 48;     // rows whose hidden values of a granule a thread holds at a time: 24 KB
constexpr int kSumColumns = 512;    // columns that a thread adds neurons up for at a time, of many rows
constexpr std::size_t kValueGranules = 16;  // granules whose neurons' values are kept at a time, of many rows
constexpr int kQueryRows = 8;               // rows of a prefill chunk that go through the KV cache together, or more:
constexpr int kQueries = 64;                // as many as have so many queries of a KV head
constexpr int kChoosingQueries = 8;         // the same where positions are chosen, whose scores are all kept
constexpr int kPartTokens = 32;             // tokens whose keys or values stay in the L1 cache for all queries
constexpr int kBlockTokens = 256;           // tokens between two updates of attention's running maximum
constexpr std::size_t kChunkBytes = std::size_t{512} << 10;  // activations laid out at a time: half of an L2 cache

constexpr std::size_t scratch_aligned(std::size_t nbytes) {
    return (nbytes + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
}

// How many of a call's t rows are laid out at a time. A row has granules · m.cols numbers of `item` bytes.
inline int chunk_rows(const Matrix& m, int granules, int t, bool exact) {
    const std::size_t item = m.quantised() && !exact ? 1 : 4;
    const int rows = static_cast<int>(kChunkBytes / (std::size_t(m.cols) * std::size_t(granules) * item));
    return std::min(t, std::max(1, rows / kHiddenRows) * kHiddenRows);
}

// At most so many rows are laid out for `rows` rows of activations: the last panel may have a row of zeros.
constexpr int laid_out_rows(int rows) { return rows == 1 ? 1 : up_to(rows, 2); }

// Bytes of `rows` rows of activations as they are laid out: float32, or int8 with a scale for each group. For integer
// weights there is also a sum for each group, and where that has 32 columns int16 sums of its halves.
inline std::size_t prepared_scratch(const Matrix& m, int granules, int rows, bool exact) {
    const std::size_t n = std::size_t(laid_out_rows(rows)) * std::size_t(granules);
    if (!m.quantised()) return scratch_aligned(4 * n * std::size_t(m.cols));
    const std::size_t groups = n * std::size_t(m.groups()), numbers = groups * std::size_t(m.group);
    if (exact) return scratch_aligned(4 * numbers) + scratch_aligned(4 * groups);
    const std::size_t halves = m.group == kBlockGroup ? scratch_aligned(4 * groups) : 0;
    return scratch_aligned(numbers) + 2 * scratch_aligned(4 * groups) + halves;
}

// Bytes that a call of up to t rows lays out at a time: for rounded or for exact activations, whichever are more.
inline std::size_t input_scratch(const Matrix& m, int granules, int t) {
    return std::max(prepared_scratch(m, granules, chunk_rows(m, granules, t, true), true),
                    prepared_scratch(m, granules, chunk_rows(m, granules, t, false), false));
}

inline std::size_t project_scratch(const Matrix& m, int t) { return input_scratch(m, 1, t); }

inline std::size_t out_scratch(const Matrix& m, int granules, int t) { return input_scratch(m, granules, t); }

// Fours that a unit of so many granules has, if it begins with one.
inline int fours_of(const FfnShape& shape, int granules) {
    const int per_four = sum_granules(shape.up.rows);
    return (granules + per_four - 1) / per_four;
}

// Where neurons lie apart. Many rows: a sum of kSumColumns for each row and thread, and of each granule the values of
// its neurons and which rows they are of.
inline std::size_t neurons_scratch(const FfnShape& shape, int granules, int t) {
    const int few = std::min(t, kMostFewRows);
    const int fours = std::min(kScratchFours, fours_of(shape, granules));
    const std::size_t sums = scratch_aligned(4 * std::size_t(fours) * std::size_t(few) * std::size_t(shape.width()));
    const std::size_t kept = std::min(std::size_t(granules), kValueGranules), neurons = std::size_t(shape.up.rows);
    std::size_t most = 0;
    for (const bool exact : {true, false}) {
        const int chunk = chunk_rows(shape.first(), 1, t, exact);
        const std::size_t rows = std::size_t(chunk), own = std::size_t(kScratchThreads) * rows * kSumColumns;
        const std::size_t values = kept * (2 * scratch_aligned(4 * neurons * rows) + scratch_aligned(4 * neurons));
        most = std::max({most, prepared_scratch(shape.first(), 1, few, exact) + sums,
                         prepared_scratch(shape.first(), 1, chunk, exact) + scratch_aligned(4 * own) + values});
    }
    return most;
}

// Many rows need the hidden values of one granule at least. Few rows need the hidden values of one granule and a sum
// for each of the fours that are summed at a time.
inline std::size_t ffn_scratch(const FfnShape& shape, int granules, int t) {
    if (shape.down.by_row()) return neurons_scratch(shape, granules, t);
    const int few = std::min(t, kMostFewRows);
    const int fours = std::min(kScratchFours, fours_of(shape, granules));
    std::size_t most = 0;
    for (const bool exact : {true, false}) {
        const int rows = chunk_rows(shape.up, 1, t, exact);
        const std::size_t many =
            prepared_scratch(shape.up, 1, rows, exact) + prepared_scratch(shape.down, 1, rows, exact);
        const std::size_t sums =
            scratch_aligned(4 * std::size_t(fours) * std::size_t(few) * std::size_t(shape.down.rows));
        most = std::max(
            {most, many,
             prepared_scratch(shape.up, 1, few, exact) + prepared_scratch(shape.down, fours, few, exact) + sums});
    }
    return most;
}

// The hidden values of a predictor, and the input of either product.
inline std::size_t predict_scratch(const Matrix& hidden, const Matrix& neurons, int t) {
    return scratch_aligned(4 * std::size_t(t) * std::size_t(hidden.rows)) +
           std::max(input_scratch(hidden, 1, t), input_scratch(neurons, 1, t));
}

// Scores of all experts for every row, and for one row again.
inline std::size_t route_scratch(const RouterShape& shape, int t) {
    const std::size_t x = std::size_t(shape.scores.rows);
    return scratch_aligned(4 * x * std::size_t(t)) + scratch_aligned(4 * x) + input_scratch(shape.scores, 1, t);
}

// The larger of two cases. All rows may go to one expert: then they are gathered, and its output is kept. Or there are
// few rows: then all experts at once want room for their rows, the hidden values of all their granules, and two sums.
inline std::size_t experts_scratch(const FfnShape& shape, int per_expert, int active, int t) {
    const std::size_t d = std::size_t(shape.down.rows), columns = std::size_t(shape.up.cols), n = std::size_t(t);
    const std::size_t gathered = scratch_aligned(4 * n * columns) + scratch_aligned(4 * n * d);
    std::size_t most = gathered + ffn_scratch(shape, per_expert, t);
    const int few = std::min(t, kMostFewRows), four = std::min(per_expert, sum_granules(shape.up.rows));
    for (const bool exact : {true, false}) {
        // Many rows of an expert need the hidden values of a four at least: they have no place for a part of its sum.
        const int rows = chunk_rows(shape.up, 1, t, exact);
        most = std::max(most, gathered + prepared_scratch(shape.up, 1, rows, exact) +
                                  prepared_scratch(shape.down, four, rows, exact));
        // At most so many experts at once have a row each; or fewer experts have more rows, of which three are laid out
        // as four.
        const std::size_t pairs = std::size_t(few) * std::size_t(active);
        const std::size_t row_bytes =
            prepared_scratch(shape.up, 1, 1, exact) + prepared_scratch(shape.down, per_expert, 1, exact);
        most = std::max(most, pairs * (scratch_aligned((4 * row_bytes + 2) / 3) + 2 * scratch_aligned(4 * d)));
    }
    return most;
}

// The input, and k and v of the call's heads before they go into the cache.
inline std::size_t qkv_scratch(const QkvShape& shape, const AttentionShape& a, int t) {
    const std::size_t kv = std::size_t(2) * std::size_t(t) * std::size_t(a.hi - a.lo) * std::size_t(a.head_dim);
    return input_scratch(shape.q, 1, t) + scratch_aligned(4 * kv);
}

// Columns of queries and sums, rounded up to the whole vectors in which the cache is read.
inline int attend_width(int head_dim, Kind kind) { return up_to(head_dim, kind == Kind::kInt4 ? 32 : 16); }

// Rows of a sequence that go through the KV cache together. `t`: the most rows that a sequence has. `chooses`: only a
// share of the positions counts.
inline int attend_rows(const AttentionShape& a, int t, bool chooses) {
    const int group = a.heads / a.kv_heads;
    return std::min(t, chooses ? std::max(1, kChoosingQueries / group) : std::max(kQueryRows, kQueries / group));
}

// Floats of one thread: queries and sums [queries, width], K or V [32, width], scales and minimums [2 · groups, 32],
// whose groups have 32 columns at least, two numbers for each query, and scores [queries, 256] for each block of
// `positions`.
inline std::size_t attend_floats(int queries, int width, int positions) {
    return std::size_t(2 * queries + kPartTokens) * std::size_t(width) + 2 * std::size_t(up_to(width, kKvGroup)) +
           std::size_t(queries) * std::size_t(up_to(positions, kBlockTokens) + 2);
}

// `chosen`: the most positions of a sequence, of which only a share counts; 0: all count.
inline std::size_t attend_scratch(const AttentionShape& a, Kind kind, int t, int chosen) {
    const int queries = a.heads / a.kv_heads * attend_rows(a, t, chosen > 0);
    const int width = attend_width(a.head_dim, kind);
    return kScratchThreads * scratch_aligned(4 * attend_floats(queries, width, std::max(chosen, 1)));
}

// Room for the sum of partials, where it is normed before it is added.
inline std::size_t merge_scratch(int t, int d) { return scratch_aligned(4 * std::size_t(t) * std::size_t(d)); }

}  // namespace penstock
