// What the ops want of scratch: enough to run as fast as they can on kScratchThreads threads. The same arithmetic for
// every instruction set; penstock/graph/scratch_native.py repeats it, for plans are made where nothing native runs, and
// a test holds the two to each other.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels.h"

namespace penstock {

constexpr std::size_t kScratchAlign = 64;
constexpr int kScratchThreads = 8;  // attention has so many threads' worth
constexpr int kScratchFours = 16;   // of an FFN summed at a time: more than threads, since they wait after them
constexpr int kMostFewRows = 8;     // up to so many rows threads take whole fours, at most
constexpr int kHiddenRows = 48;     // rows whose hidden values of a granule a thread holds at a time: 24 KB
constexpr int kQueryRows = 8;       // rows of a prefill chunk that go through the KV cache together
constexpr int kPartTokens = 32;     // whose keys or values stay in the L1 cache for all queries
constexpr int kBlockTokens = 256;   // of attention between two looks at the running maximum
constexpr std::size_t kChunkBytes = std::size_t{512} << 10;  // of activations laid out: half of an L2 cache

constexpr std::size_t scratch_aligned(std::size_t nbytes) {
    return (nbytes + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
}

// Rows of a call's t that are laid out at a time, granules · m.cols columns each: `item` bytes a number.
inline int chunk_rows(const Matrix& m, int granules, int t, bool exact) {
    const std::size_t item = m.quantised() && !exact ? 1 : 4;
    const int rows = static_cast<int>(kChunkBytes / (std::size_t(m.cols) * std::size_t(granules) * item));
    return std::min(t, std::max(1, rows / kHiddenRows) * kHiddenRows);
}

// Activations of `rows` rows laid out: float32, or int8 with a scale a group; a sum a group beside integer weights.
inline std::size_t prepared_scratch(const Matrix& m, int granules, int rows, bool exact) {
    const std::size_t n = std::size_t(rows) * std::size_t(granules);
    if (!m.quantised()) return scratch_aligned(4 * n * std::size_t(m.cols));
    const std::size_t groups = n * std::size_t(m.groups()), numbers = groups * std::size_t(m.group);
    return exact ? scratch_aligned(4 * numbers) + scratch_aligned(4 * groups)
                 : scratch_aligned(numbers) + 2 * scratch_aligned(4 * groups);
}

// What a call of up to t rows lays out at a time, of activations rounded or exact, whatever is more.
inline std::size_t input_scratch(const Matrix& m, int granules, int t) {
    return std::max(prepared_scratch(m, granules, chunk_rows(m, granules, t, true), true),
                    prepared_scratch(m, granules, chunk_rows(m, granules, t, false), false));
}

inline std::size_t project_scratch(const Matrix& m, int t) { return input_scratch(m, 1, t); }

inline std::size_t out_scratch(const Matrix& m, int granules, int t) { return input_scratch(m, granules, t); }

// Many rows: the hidden values of one granule at least. Few: those of a granule and the sum of a four, for each of some
// fours.
inline std::size_t ffn_scratch(const FfnShape& shape, int granules, int t) {
    const int few = std::min(t, kMostFewRows);
    const int fours = std::min(kScratchFours, (granules + kSumGranules - 1) / kSumGranules);
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

// Scores of all experts for every row, and for one row again.
inline std::size_t route_scratch(const RouterShape& shape, int t) {
    const std::size_t x = std::size_t(shape.scores.rows);
    return scratch_aligned(4 * x * std::size_t(t)) + scratch_aligned(4 * x) + input_scratch(shape.scores, 1, t);
}

// All rows may go to one expert: they are gathered, and its output is kept. Or, of few rows, what each expert's rows
// want of the FFN's, for all of them at once.
inline std::size_t experts_scratch(const FfnShape& shape, int per_expert, int active, int t) {
    const std::size_t d = std::size_t(shape.down.rows), columns = std::size_t(shape.up.cols), n = std::size_t(t);
    std::size_t most =
        scratch_aligned(4 * n * columns) + scratch_aligned(4 * n * d) + ffn_scratch(shape, per_expert, t);
    const int few = std::min(t, kMostFewRows);
    const std::size_t fours = std::size_t((per_expert + kSumGranules - 1) / kSumGranules);
    for (const bool exact : {true, false}) {
        // At most so many experts at once, with a row each, or fewer with more rows.
        const std::size_t pairs = std::size_t(few) * std::size_t(active);
        const std::size_t each =
            prepared_scratch(shape.up, 1, 1, exact) + scratch_aligned(4 * fours * d) + kScratchAlign;
        most = std::max(most, pairs * each + kScratchThreads * prepared_scratch(shape.down, 1, few, exact));
    }
    return most;
}

// Beside the input k and v of the call's heads, before they go into the cache.
inline std::size_t qkv_scratch(const QkvShape& shape, const AttentionShape& a, int t) {
    const std::size_t kv = std::size_t(2) * std::size_t(t) * std::size_t(a.hi - a.lo) * std::size_t(a.head_dim);
    return input_scratch(shape.q, 1, t) + scratch_aligned(4 * kv);
}

// Columns of queries and sums: whole vectors, as the cache is read.
inline int attend_width(int head_dim, Kind kind) { return up_to(head_dim, kind == Kind::kInt4 ? 32 : 16); }

// Floats of one thread, in whole lines: queries and sums [queries, width], K or V (or its scales and minimums)
// [32, width], scores [queries, 256], three numbers a query.
inline std::size_t attend_floats(int queries, int width) {
    return std::size_t(2 * queries + kPartTokens) * std::size_t(width) + std::size_t(queries) * (kBlockTokens + 3);
}

// For sequences of which none has more than t rows.
inline std::size_t attend_scratch(const AttentionShape& a, Kind kind, int t) {
    const int queries = a.heads / a.kv_heads * std::min(t, kQueryRows);
    const std::size_t each = scratch_aligned(4 * attend_floats(queries, attend_width(a.head_dim, kind)));
    return kScratchThreads * each;
}

// The sum of partials, where it is normed before it is added.
inline std::size_t merge_scratch(int t, int d) { return scratch_aligned(4 * std::size_t(t) * std::size_t(d)); }

}  // namespace penstock
