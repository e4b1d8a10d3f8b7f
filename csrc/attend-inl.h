// The op `attend` for one instruction set: shares heads and rows out to threads. Included after kernels-inl.h.
#pragma once

#include "attention-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

bool attend(Pool& pool, const AttendOp& op) {
    const AttentionShape& a = op.attention;
    const Sequence* const sequences = op.sequences;
    const int sequence_count = op.sequence_count;
    const KvCache& cache = op.cache;
    Scratch scratch = op.scratch;
    const int width = attend_width(cache.head_dim, cache.kind), group = a.heads / a.kv_heads;
    const bool chooses = op.value_share < 1;
    int longest = 1, furthest = 0, items = 0;
    for (int s = 0; s < sequence_count; ++s) {
        longest = std::max(longest, sequences[s].rows);
        furthest = std::max(furthest, sequences[s].start + sequences[s].rows);
    }
    const int rows_at_once = attend_rows(a, longest, chooses), queries = group * rows_at_once;
    const std::size_t share =
        scratch_aligned(attend_floats(queries, width, chooses ? furthest : 1) * sizeof(float)) / sizeof(float);
    // With many heads of many queries scratch may not have room for every thread. Then fewer threads work.
    const int usable = std::min(pool.threads(), static_cast<int>(scratch.nbytes / (share * sizeof(float))));
    if (usable < 1) return false;
    auto* memory = take<float>(scratch, share * std::size_t(usable));
    const int heads = a.hi - a.lo;
    for (int s = 0; s < sequence_count; ++s) items += (sequences[s].rows + rows_at_once - 1) / rows_at_once * heads;
    // Causal rows differ in cost, so a thread that is free takes the next item. Results do not depend on which.
    std::atomic<int> next{0};
    std::size_t cost = 0;
    for (int s = 0; s < sequence_count; ++s) {
        const int seen = sequences[s].start + sequences[s].rows;
        // Counted as if numbers had 16 bits, since fewer bytes are no less work. A byte costs more than a byte of
        // weights: 9 ns a token.
        cost += std::size_t(4 * heads) * std::size_t(seen) * std::size_t(a.head_dim) *
                std::size_t((sequences[s].rows + 3) / 4) * 4;
    }
    pool.run(cost, [&](const Team& team) {
        if (team.id() >= usable) return;
        float* mine = memory + std::ptrdiff_t(share) * team.id();
        for (int item = next.fetch_add(1, std::memory_order_relaxed); item < items;
             item = next.fetch_add(1, std::memory_order_relaxed)) {
            int s = 0, before = 0, left = item, parts = 0;
            for (;; ++s) {
                parts = (sequences[s].rows + rows_at_once - 1) / rows_at_once;
                if (left < parts * heads) break;
                left -= parts * heads;
                before += sequences[s].rows;
            }
            // Where positions are chosen few rows go together, so a head's keys are read again while caches have them.
            const int head = a.lo + (chooses ? left / parts : left % heads);
            const int row = (chooses ? left % parts : left / heads) * rows_at_once;
            const int rows = std::min(rows_at_once, sequences[s].rows - row);
            const std::ptrdiff_t at = std::ptrdiff_t(before + row) * a.heads * a.head_dim;
            const std::int32_t* pages = op.pages + sequences[s].first_page;
            HeadAttention attention{op, pages, head, sequences[s].start + row, rows, mine};
            attention(op.q + at, op.a + at);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
