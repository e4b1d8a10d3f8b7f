// Attention for one instruction set. Included after kernels-inl.h.
//
// A head's positions are walked in blocks of 256 from position 0 on, with a running maximum (log-sum-exp). So a row's
// result depends on its position and the cache alone, not on its chunk or its neighbours. Few queries convert keys and
// values in registers. For more of them they are widened once. A cache of integers is not widened, unless activations
// are to be exact: attention-codes-inl.h.
//
// Where only a share of the positions counts, the scores of all blocks are computed first and kept. Then rows of values
// are read one by one, those that count for any of the queries.
#pragma once

#include "attention-chosen-inl.h"
#include "attention-softmax-inl.h"
#include "attention-spans-inl.h"
#include "attention-tiles-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Attention of one KV head for `rows` consecutive rows from position `start`, with G query heads each.
class HeadAttention {
  public:
    // `pages`: of the sequence, in the order of its positions. `memory`: attend_floats() floats.
    HeadAttention(const AttendOp& op, const std::int32_t* pages, int head, int start, int rows, float* memory)
        : a_(op.attention),
          sinks_(op.sinks),
          share_(op.value_share),
          exact_(op.exact),
          cache_(op.cache),
          pages_(pages),
          head_(head),
          start_(start),
          rows_(rows),
          oldest_(a_.window > 0 ? std::max(0, start - a_.window + 1) : 0),
          width_(attend_width(cache_.head_dim, cache_.kind)),
          group_(a_.heads / a_.kv_heads),
          queries_(group_ * rows),
          row_bytes_(cache_.row_bytes()),
          rounded_(queries_, width_, std::max(1, cache_.group), memory) {
        query_ = memory;
        sums_ = query_ + std::ptrdiff_t(queries_) * width_;
        wide_ = sums_ + std::ptrdiff_t(queries_) * width_;
        factors_ = wide_ + kPartTokens * width_;
        run_ = reinterpret_cast<Running*>(factors_ + 2 * up_to(width_, kKvGroup));
        scores_ = block_ = factors_ + 2 * up_to(width_, kKvGroup) + 2 * queries_;
    }

    void operator()(const float* q, float* out) {
        const int e = a_.head_dim, end = start_ + rows_;
        const std::ptrdiff_t stride = std::ptrdiff_t(a_.heads) * e, first = std::ptrdiff_t(head_) * group_ * e;
        const int begin = oldest_ / kBlockTokens * kBlockTokens;
        const Run run = run_at(begin, end, 0, kPartTokens);
        const std::size_t run_bytes = std::size_t(run.count) * row_bytes_;
        prefetch_run(rows_at(cache_.keys, run), run_bytes);  // arrives while the queries are laid out
        if (!chooses()) prefetch_run(rows_at(cache_.values, run), run_bytes);
        for (int i = 0; i < queries_; ++i) {
            const float* from = q + (i / group_) * stride + first + std::ptrdiff_t(i % group_) * e;
            float* const query = rounds() ? wide_ : query_ + i * width_;
            for (int c = 0; c < width_; ++c) query[c] = c < e ? from[c] : 0.0F;
            if (rounds()) round_query(i);
            std::fill_n(sums_ + i * width_, width_, 0.0F);
            run_[i] = sinks_ != nullptr ? Running{sinks_[head_ * group_ + i % group_], 1.0F} : Running{-INFINITY, 0.0F};
        }
        by_kind(cache_.kind, [&]<Kind kind>() {
            for (int block = begin; block < end; block += kBlockTokens) {
                const int block_end = std::min(block + kBlockTokens, end);
                if constexpr (quantised(kind)) {
                    exact_ ? walk<kind>(block, block_end) : walk_codes<kind>(block, block_end);
                } else {
                    walk<kind>(block, block_end);
                }
                if (chooses()) block_ += std::ptrdiff_t(queries_) * kBlockTokens;
            }
            if (chooses()) blend_chosen<kind>(begin, end);
            if constexpr (quantised(kind)) {
                for (int i = 0; i < queries_ && rounds() && !chooses() && lie_as_products<kind>(width_); ++i) {
                    order_sums<kind>(width_, sums_ + std::ptrdiff_t(i) * width_);
                }
            }
        });
        for (int i = 0; i < queries_; ++i) {
            float* to = out + (i / group_) * stride + first + std::ptrdiff_t(i % group_) * e;
            const float share = 1.0F / run_[i].weight;
            for (int c = 0; c < e; ++c) to[c] = sums_[i * width_ + c] * share;
        }
    }

  private:
    bool chooses() const { return share_ < 1; }
    bool rounds() const { return quantised(cache_.kind) && !exact_; }
    // Query i, which lies in wide_.
    void round_query(int i) const {
        cache_.kind == Kind::kInt8 ? rounded_.round<Kind::kInt8>(i, wide_) : rounded_.round<Kind::kInt4>(i, wide_);
    }

    // Positions of a block that lie in a row in a page: `count` of them from the block's position `at` on. In both
    // pools they begin at a slot of the block of the page and head, at byte `block`.
    struct Run {
        std::size_t block;
        int slot, at, count;
    };
    const std::uint8_t* rows_at(const std::uint8_t* pool, const Run& run) const {
        return pool + run.block + std::size_t(run.slot) * row_bytes_;
    }
    // The run from `at` on, of the block of positions [start, end), `most` positions at most. Parts of 32 never cross
    // pages, since page_tokens is a multiple of 64.
    Run run_at(int start, int end, int at, int most) const {
        const int page = (start + at) / cache_.page_tokens, slot = start + at - page * cache_.page_tokens;
        const int count = std::min({end - start - at, most, cache_.page_tokens - slot});
        return {cache_.block_at(pages_[page], head_), slot, at, count};
    }

    // Walks a block: scores of all its runs, then weights, then values of all its runs; where positions are chosen,
    // scores alone. The bytes that follow are fetched meanwhile, so that memory never waits for arithmetic. Few queries
    // convert keys and values in registers, and go through all that lies in a row in a page. Many queries have them
    // widened first, a part that stays in the L1 cache. Queries that see nothing of a run are left out of it.
    template <Kind kind>
    void walk(int start, int end) {
        const int lo = std::max(0, oldest_ - start) / kPartTokens * kPartTokens;  // parts before it are not seen
        const bool fused = queries_ <= kMostFused && (quantised(kind) || a_.head_dim == width_);
        const int most = fused ? kBlockTokens : kPartTokens;
        Run runs[kBlockTokens / kPartTokens + 1];  // of the block, and the first of the next block
        int n_runs = 0;
        for (int at = lo; at < end - start; at += runs[n_runs++].count) runs[n_runs] = run_at(start, end, at, most);
        const int last = start_ + rows_, after = start + kBlockTokens;
        if (after < last) runs[n_runs] = run_at(after, std::min(after + kBlockTokens, last), 0, most);
        const auto fetched = [&](int step) -> const std::uint8_t* {  // steps: keys of the runs, values of the runs, …
            if (step < n_runs) return next<kind>(cache_.keys, runs[step]);
            if (step < 2 * n_runs && !chooses()) return next<kind>(cache_.values, runs[step - n_runs]);
            return after < last ? next<kind>(cache_.keys, runs[n_runs]) : nullptr;
        };
        const auto each_run = [&](const std::uint8_t* pool, int step, const auto& work) {
            for (int r = 0; r < n_runs; ++r) {
                const Run& run = runs[r];
                const std::uint8_t* const ahead = fetched(step + r + 1);
                Cached rows{rows_at(pool, run), row_bytes_, width_, factors_, factors_, kPartTokens, ahead};
                if constexpr (quantised(kind)) {
                    float* const factors = fused ? wide_ : factors_;
                    rows.stride = fused ? kBlockTokens : kPartTokens;
                    widen_factors(cache_, pool + run.block, run.slot, run.count, rows.stride, factors);
                    rows.group = cache_.group;
                    rows.scales = factors, rows.minimums = factors + cache_.groups() * rows.stride;
                }
                if (fused) {
                    work.template operator()<kind, true>(rows, run);
                    continue;
                }
                for (int i = 0; i < run.count; ++i) {
                    if (ahead != nullptr) prefetch_run(ahead + std::size_t(i) * row_bytes_, row_bytes_);
                    widen_row<kind>(rows, i, a_.head_dim, width_, wide_ + i * width_);
                }
                rows = {reinterpret_cast<const std::uint8_t*>(wide_), std::size_t(width_) * 4, width_};
                work.template operator()<Kind::kFloat32, false>(rows, run);
            }
        };
        each_run(cache_.keys, 0, [&]<Kind as, bool few>(Cached& keys, const Run& run) {
            each_query<few ? kMostFused : kManyQueries>(first_query(start + run.at), [&]<int n>(int i) {
                score<as, n>(query_ + i * width_, width_, keys, run.count, a_.scale,
                             block_ + std::ptrdiff_t(i) * kBlockTokens + run.at);
                keys.ahead = nullptr;
            });
        });
        if (chooses()) {
            for (int i = 0; i < queries_; ++i) hide(i, start, end, lo);
            return;
        }
        for (int i = first_query(start + lo); i < queries_; ++i) {
            hide(i, start, end, lo);
            weigh(i);
        }
        each_run(cache_.values, n_runs, [&]<Kind as, bool few>(Cached& values, const Run& run) {
            each_query<few ? kMostFused : kManyQueries>(first_query(start + run.at), [&]<int n>(int i) {
                blend_all<as, n>(block_ + std::ptrdiff_t(i) * kBlockTokens + run.at, values, run.count, width_,
                                 sums_ + i * width_);
                values.ahead = nullptr;
            });
        });
    }

    // As `walk`, with rounded factors.
    template <Kind kind>
    void walk_codes(int start, int end) {
        const int lo = std::max(0, oldest_ - start) / kSpan * kSpan;  // spans before it are not seen
        Run runs[2 * kBlockTokens / kSpan];                           // of the block, and of the next block
        int n_runs = 0, n_all = 0;
        for (int at = lo; at < end - start; at += runs[n_runs++].count)
            runs[n_runs] = run_at(start, end, at, kBlockTokens);
        const int last = start_ + rows_, after = start + kBlockTokens;
        n_all = n_runs;
        for (int at = 0; at < std::min(kBlockTokens, last - after); at += runs[n_all++].count) {
            runs[n_all] = run_at(after, std::min(after + kBlockTokens, last), at, kBlockTokens);
        }
        // What is read kFetchBytes after a step: keys of the runs, values of the runs, keys of the next block. Runs are
        // short where pages are: 2 to 8 KB.
        const int values_steps = chooses() ? 0 : n_runs;
        const auto ahead_of = [&](int step, const Run& run) -> const std::uint8_t* {
            const int rows = static_cast<int>(kFetchBytes / row_bytes_);
            step += std::min(std::max(1, rows / run.count), n_runs);
            if (step < n_runs) return next<kind>(cache_.keys, runs[step]);
            if (step < n_runs + values_steps) return next<kind>(cache_.values, runs[step - n_runs]);
            step -= values_steps;
            return step < n_all ? next<kind>(cache_.keys, runs[step]) : nullptr;
        };
        const auto codes_of = [&](const std::uint8_t* pool, const Run& run, const std::uint8_t* ahead) -> Codes {
            const std::uint8_t* const block = pool + run.block;
            return {rows_at(pool, run),
                    row_bytes_,
                    block + cache_.scale_at(0, run.slot),
                    block + cache_.minimum_at(0, run.slot),
                    cache_.page_tokens,
                    run.count,
                    ahead};
        };
        for (int r = 0; r < n_runs; ++r) {
            Codes keys = codes_of(cache_.keys, runs[r], ahead_of(r, runs[r]));
            each_query<kCodeQueries>(first_query(start + runs[r].at), [&]<int n>(int i) {
                const std::int32_t* const words = spread_.template words<kind, n>(rounded_, i, wide_);
                float* const scores = block_ + std::ptrdiff_t(i) * kBlockTokens + runs[r].at;
                if (kWideLines > 1 && packed_rows<kind>(width_) > 1) {
                    score_codes<kind, n, std::min(2, kWideLines)>(rounded_, i, words, keys, a_.scale, scores);
                } else {
                    score_codes<kind, n, 1>(rounded_, i, words, keys, a_.scale, scores);
                }
                keys.ahead = nullptr;
            });
        }
        for (int i = chooses() ? 0 : first_query(start + lo); i < queries_; ++i) {
            hide(i, start, end, lo);
            if (!chooses()) weigh(i);
        }
        for (int r = 0; r < n_runs && !chooses(); ++r) {
            const Codes values = codes_of(cache_.values, runs[r], ahead_of(n_runs + r, runs[r]));
            for (int at = 0; at < values.count; at += kSpan) blend_span<kind>(values, at, start, runs[r].at + at);
        }
    }

    // Adds what a span of values makes to the sums of all queries that see it. `at`: in the run; `in_block`: in the
    // block of positions from `start` on.
    template <Kind kind>
    void blend_span(Codes values, int at, int start, int in_block) {
        const int groups = cache_.groups();
        float* const scales = wide_;
        float* const middles = scales + std::ptrdiff_t(groups) * kSpan;
        auto* const words = reinterpret_cast<std::int32_t*>(middles + std::ptrdiff_t(groups) * kSpan);
        float* const steps = reinterpret_cast<float*>(words + std::ptrdiff_t(kCodeQueries) * groups * (kSpan / 2));
        const RoundedWeights rounded{words, steps, steps + kCodeQueries * groups, groups};
        span_factors<kind>(values, at, std::min(kSpan, values.count - at), groups, scales, middles);
        each_query<kCodeQueries>(first_query(start + in_block), [&]<int n>(int i) {
            const float* const weights = block_ + std::ptrdiff_t(i) * kBlockTokens + in_block;
            round_weights<kind, n>(weights, scales, middles, rounded);
            blend_codes<kind, n>(values, at, rounded, cache_.group, width_, sums_ + std::ptrdiff_t(i) * width_);
            values.ahead = nullptr;
        });
    }

    // The rows of a run. Fetches its scales and minimums now.
    template <Kind kind>
    const std::uint8_t* next(const std::uint8_t* pool, const Run& run) const {
        if constexpr (quantised(kind)) {
            for (int g = 0; g < 2 * cache_.groups(); ++g) {
                prefetch_run(pool + run.block + cache_.scale_at(g, run.slot), 2 * std::size_t(run.count));
            }
        }
        return rows_at(pool, run);
    }

    // The first query that sees this position.
    int first_query(int position) const { return std::max(0, position - start_) * group_; }

    // Calls work<n>(i) for n queries from i on, at most `most`, until all queries from `first` on are done.
    template <int most, class Work>
    void each_query(int first, const Work& work) const {
        int i = first;
        const auto by_count = [&]<int n>() {
            if constexpr (n <= most) {
                for (; i + n <= queries_; i += n) work.template operator()<n>(i);
            }
        };
        by_count.template operator()<8>();
        by_count.template operator()<6>();
        by_count.template operator()<4>();
        by_count.template operator()<3>();
        by_count.template operator()<2>();
        by_count.template operator()<1>();
    }

    // Caps query i's scores of a block, and hides those of positions that it does not see. Scores before `lo` were not
    // computed.
    void hide(int i, int start, int end, int lo) {
        const int position = start_ + i / group_;
        const int oldest = a_.window > 0 ? std::max(lo, position - a_.window + 1 - start) : lo;
        const int seen = std::max(0, std::min(end, position + 1) - start);
        float* const scores = block_ + std::ptrdiff_t(i) * kBlockTokens;
        if (a_.softcap > 0) cap(scores + lo, end - start - lo, a_.softcap);
        hide_beyond(scores, oldest, seen);
    }

    // Turns query i's scores of a block into weights, and shrinks its sums.
    void weigh(int i) {
        const float shrink = soften(block_ + std::ptrdiff_t(i) * kBlockTokens, run_[i]);
        if (shrink == 1.0F) return;
        const F factor = f_set(shrink);
        float* const sums = sums_ + std::ptrdiff_t(i) * width_;
        for (int c = 0; c < width_; c += 16) f_store(sums + c, f_mul(f_load(sums + c), factor));
    }

    // Chooses among the scores of all blocks, and adds up the values of positions that count for any query.
    template <Kind kind>
    void blend_chosen(int begin, int end) {
        const std::ptrdiff_t block_floats = std::ptrdiff_t(queries_) * kBlockTokens;
        for (int i = 0; i < queries_; ++i) {
            const int seen = start_ + i / group_ + 1, first = a_.window > 0 ? std::max(0, seen - a_.window) : 0;
            keep_best({scores_ + std::ptrdiff_t(i) * kBlockTokens, block_floats, first - begin, seen - begin}, share_);
        }
        Picked lists[2];  // of this block, and of the next one, whose rows are fetched meanwhile
        int turn = 0;
        block_ = scores_;
        lists[0].find(block_, queries_, std::min(kBlockTokens, end - begin));
        for (int start = begin; start < end; start += kBlockTokens, block_ += block_floats, turn ^= 1) {
            const Picked& picked = lists[turn];
            Picked& next = lists[turn ^ 1];
            const int left = end - start - kBlockTokens;
            next.count = 0;
            if (left > 0) next.find(block_ + block_floats, queries_, std::min(kBlockTokens, left));
            for (int i = 0; i < queries_; ++i) {
                weigh(i);
                float* const weights = block_ + std::ptrdiff_t(i) * kBlockTokens;
                for (int k = 0; k < picked.count; ++k) weights[k] = weights[picked.at[k]];
            }
            for (int k = picked.count; k < next.count; ++k) fetch_value<kind>(start + kBlockTokens + next.at[k]);
            for (int part = 0; part < picked.count; part += kPartTokens) {
                const int count = std::min(kPartTokens, picked.count - part);
                for (int k = 0; k < count; ++k) {
                    if (part + k < next.count) fetch_value<kind>(start + kBlockTokens + next.at[part + k]);
                    widen_value<kind>(start + picked.at[part + k], wide_ + k * width_);
                }
                const Cached rows{reinterpret_cast<const std::uint8_t*>(wide_), std::size_t(width_) * 4, width_};
                each_query<kManyQueries>(0, [&]<int n>(int i) {
                    blend_all<Kind::kFloat32, n>(block_ + std::ptrdiff_t(i) * kBlockTokens + part, rows, count, width_,
                                                 sums_ + i * width_);
                });
            }
        }
    }

    template <Kind kind>
    void fetch_value(int position) const {
        const Run run = run_at(position, position + 1, 0, 1);
        prefetch_run(rows_at(cache_.values, run), row_bytes_);
        if constexpr (quantised(kind)) {
            for (int g = 0; g < 2 * cache_.groups(); ++g) {
                __builtin_prefetch(cache_.values + run.block + cache_.scale_at(g, run.slot));
            }
        }
    }

    // The value of a position as float32 [width].
    template <Kind kind>
    void widen_value(int position, float* to) const {
        const Run run = run_at(position, position + 1, 0, 1);
        Cached row{rows_at(cache_.values, run), row_bytes_, width_, factors_, factors_, 1};
        if constexpr (quantised(kind)) {
            const int n = 2 * cache_.groups();
            for (int g = 0; g < n; g += kTileRows) {  // scales of all groups, then their minimums
                alignas(64) std::uint16_t halves[kTileRows] = {};
                for (int k = 0; k < std::min(n - g, kTileRows); ++k) {
                    std::memcpy(halves + k, cache_.values + run.block + cache_.scale_at(g + k, run.slot), 2);
                }
                f_store(factors_ + g, f_half(halves));
            }
            row.group = cache_.group;
            row.scales = factors_, row.minimums = factors_ + cache_.groups();
        }
        widen_row<kind>(row, 0, a_.head_dim, width_, to);
    }

    const AttentionShape& a_;
    const float* sinks_;
    double share_;
    bool exact_;
    const KvCache& cache_;
    const std::int32_t* pages_;
    int head_, start_, rows_;
    int oldest_;  // the first position that the window of any row reaches back to
    int width_, group_, queries_;
    std::size_t row_bytes_;
    float *query_, *sums_, *wide_, *factors_, *scores_, *block_;  // block_: the scores of a block
    Running* run_;
    RoundedQueries rounded_;  // where query_ is else
    SpreadWords spread_;
};

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
