// Which positions count for a query, where only a share of them does, for one instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "scratch.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// The scores of one query for the positions [first, end). They lie in blocks of kBlockTokens, `stride` floats apart.
// Positions count from the first block's first one on.
struct QueryScores {
    float* blocks;
    std::ptrdiff_t stride;
    int first, end;

    // Calls work(scores, count) for the part of each block, upwards.
    template <class Work>
    void each(const Work& work) const {
        for (int at = first; at < end;) {
            const int inside = at % kBlockTokens, count = std::min(kBlockTokens - inside, end - at);
            work(blocks + at / kBlockTokens * stride + inside, count);
            at += count;
        }
    }
    int at_least(float limit) const {
        int total = 0;
        each([&](const float* scores, int count) {
            for (int i = 0; i < count; ++i) total += scores[i] >= limit;
        });
        return total;
    }
};

// Integers that are ordered as floats are. Both zeros are 0, and the magnitude of a NaN is above all others.
inline std::int32_t rank_of(float x) {
    std::int32_t bits;
    std::memcpy(&bits, &x, 4);
    const std::int32_t magnitude = bits & 0x7fffffff;
    return bits < 0 ? -magnitude : magnitude;
}
inline float of_rank(std::int32_t rank) {
    const std::int32_t magnitude = rank < 0 ? -rank : rank;
    float x;
    std::memcpy(&x, &magnitude, 4);
    return rank < 0 ? -x : x;
}

// Of n positions leaves the ceil(share · n) with the largest scores, one at least, and hides all others (-inf). Of
// equal scores those of earlier positions are left. A query that met a NaN keeps all, and its result is NaN.
inline void keep_best(const QueryScores& query, double share) {
    constexpr std::int32_t kInfinite = 0x7f800000;
    const int n = query.end - query.first, wanted = std::max(1, static_cast<int>(std::ceil(share * n)));
    if (wanted >= n) return;
    std::int32_t least = kInfinite, most = -kInfinite;
    query.each([&](const float* scores, int count) {
        for (int i = 0; i < count; ++i) {
            const std::int32_t rank = rank_of(scores[i]);
            least = std::min(least, rank), most = std::max(most, rank);
        }
    });
    if (least < -kInfinite || most > kInfinite) return;
    // At least `wanted` scores have the rank `least` or a higher one, and fewer of them, `above`, a rank beyond `most`.
    int above = 0;
    bool exact = false;
    while (least < most && !exact) {
        const auto middle = static_cast<std::int32_t>(least + (std::int64_t{most} - least + 1) / 2);
        const int found = query.at_least(of_rank(middle));
        if (found < wanted) {
            most = middle - 1, above = found;
        } else {
            least = middle, exact = found == wanted;
        }
    }
    const float limit = of_rank(least);
    int ties = wanted - above;  // scores that are `limit` and are left
    query.each([&](float* scores, int count) {
        if (exact) {
            for (int i = 0; i < count; ++i) scores[i] = scores[i] >= limit ? scores[i] : -INFINITY;
            return;
        }
        for (int i = 0; i < count; ++i) {
            if (scores[i] > limit || (scores[i] == limit && ties-- > 0)) continue;
            scores[i] = -INFINITY;
        }
    });
}

// Positions of a block, rising.
struct Picked {
    int count = 0;
    std::int16_t at[kBlockTokens];

    // Those of the first `seen` that are not hidden from all of `queries` queries. scores: [queries, kBlockTokens].
    void find(const float* scores, int queries, int seen) {
        std::uint8_t any[kBlockTokens] = {};
        for (int i = 0; i < queries; ++i) {
            const float* const of_query = scores + std::ptrdiff_t(i) * kBlockTokens;
            for (int t = 0; t < seen; ++t) any[t] = any[t] != 0 || of_query[t] != -INFINITY;
        }
        count = 0;
        for (int t = 0; t < seen; ++t) {
            at[count] = static_cast<std::int16_t>(t);
            count += any[t];
        }
    }
};

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
