// Attention for one instruction set. Included after kernels-inl.h.
//
// A head's positions are walked in blocks of 256 from position 0 on, with a running maximum (log-sum-exp). So a row's
// result depends on its position and the cache alone, not on its chunk or its neighbours. Keys and values are converted
// in registers, each once for up to four queries. For one row of a model with grouped heads memory is the limit: at 2
// bytes a number and 8 k context a core reads 24 GB/s.
#pragma once

#include "cache-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// The running softmax of one query: the largest score so far, the sum of weights, and the factor of earlier sums. A
// sink is a score that was seen before all others, with a value of 0.
struct Running {
    float best, weight, shrink;
};

// Turns the 256 scores of a block into weights. Returns the factor by which earlier sums shrink. Hidden scores are
// -inf.
inline float soften(float* scores, Running& run) {
    I most_bits = i_zero();
    F peaks = f_load(scores);
    for (int i = 0; i < kBlockTokens; i += 16) {
        const F s = f_load(scores + i);
        most_bits = i_max(most_bits, i_magnitude(s));
        peaks = f_max(peaks, s);
    }
    if (i_max_of(most_bits) > 0x7f800000) {  // f_max ignores NaN, but a row that met one must stay NaN
        run.weight = scores[0] = NAN;
        return NAN;
    }
    const float peak = std::max(run.best, f_max_of(peaks));
    if (std::isinf(peak) && peak < 0) {  // nothing seen yet
        std::fill_n(scores, kBlockTokens, 0.0F);
        return 1.0F;
    }
    const float shrink = std::isinf(run.best) ? 0.0F : exp_of(run.best - peak);
    F total = f_zero();
    for (int i = 0; i < kBlockTokens; i += 16) {
        const F weight = f_exp(f_add(f_load(scores + i), f_set(-peak)));
        f_store(scores + i, weight);
        total = f_add(total, weight);
    }
    run.weight = run.weight * shrink + f_sum(total);
    run.best = peak;
    return shrink;
}

// scores[i][token] = scale · query i · key of token, for n queries of `width` columns and `count` tokens of a part, 16
// products at a time. Meanwhile as many bytes are fetched from `ahead`.
template <Kind kind, int n>
void score(const float* queries, int width, const Cached& keys, const std::uint8_t* ahead, int count, float scale,
           float* scores) {
    constexpr int kTokens = 16 / n, kWide = kVectors<kind>;
    for (int token = 0; token < count; token += kTokens) {
        F sums[16];
        for (F& sum : sums) sum = f_zero();
        const std::size_t from = std::size_t(token) * keys.row_bytes;
        if (ahead != nullptr) {
            const std::size_t bytes = std::size_t(kTokens) * keys.row_bytes;
            for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(ahead + from + at);
        }
        const std::uint8_t* rows = keys.data + from;
        const float *scales = keys.scales + token, *minimums = keys.minimums + token;
        for (int c = 0; c < width; scales += kPartTokens, minimums += kPartTokens) {
            for (const int until = std::min(c + keys.group, width); c < until; c += 16 * kWide) {
                F q[n][kWide];
                for (int i = 0; i < n; ++i) {
                    for (int v = 0; v < kWide; ++v) q[i][v] = f_load(queries + i * width + c + 16 * v);
                }
                for (int k = 0; k < kTokens; ++k) {
                    F key[kWide];
                    read<kind>(rows + std::size_t(k) * keys.row_bytes + std::size_t(c) / 16 * kVectorBytes<kind>,
                               scales + k, minimums + k, key);
                    for (int i = 0; i < n; ++i) {
                        F& sum = sums[i * kTokens + k];
                        for (int v = 0; v < kWide; ++v) sum = f_fma(q[i][v], key[v], sum);
                    }
                }
            }
        }
        alignas(64) float products[16];
        f_store(products, f_mul(f_sums(sums), f_set(scale)));
        for (int i = 0; i < n; ++i) std::memcpy(scores + i * kBlockTokens + token, products + i * kTokens, kTokens * 4);
    }
}

// sums[i] = sums[i] · shrink[i] + Σ tokens: weights[i][token] · value, for n queries and 16 · `wide` of `width`
// columns, from `first` on. Meanwhile as many bytes are fetched from `ahead`.
template <Kind kind, int n, int wide>
void blend(const float* weights, const float* shrink, const Cached& values, const std::uint8_t* ahead, int count,
           int width, int first, float* sums) {
    constexpr int kWide = kVectors<kind>;
    constexpr std::size_t kStep = kWide * kVectorBytes<kind>;
    const std::size_t skip = std::size_t(first) / 16 * kVectorBytes<kind>;
    F acc[n][wide];
    for (int i = 0; i < n; ++i) {
        for (int c = 0; c < wide; ++c) acc[i][c] = f_mul(f_load(sums + i * width + first + 16 * c), f_set(shrink[i]));
    }
    std::ptrdiff_t factors[wide / kWide];
    for (int s = 0; s < wide / kWide; ++s) factors[s] = (first + 16 * kWide * s) / values.group * kPartTokens;
    const std::uint8_t* row = values.data + skip;
    if (ahead != nullptr) ahead += skip;
    int token = 0;
    do {  // tells the compiler that there is a token at least: else it moves the sums to memory and back
        if (ahead != nullptr) {
            for (std::size_t at = 0; at < wide * kVectorBytes<kind>; at += 64) __builtin_prefetch(ahead + at);
            ahead += values.row_bytes;
        }
        F value[wide];
        for (int s = 0; s < wide / kWide; ++s) {
            read<kind>(row + std::size_t(s) * kStep, values.scales + factors[s] + token,
                       values.minimums + factors[s] + token, value + s * kWide);
        }
        for (int i = 0; i < n; ++i) {
            const F weight = f_set(weights[i * kBlockTokens + token]);
            for (int c = 0; c < wide; ++c) acc[i][c] = f_fma(weight, value[c], acc[i][c]);
        }
        row += values.row_bytes;
    } while (++token < count);
    for (int i = 0; i < n; ++i) {
        for (int c = 0; c < wide; ++c) f_store(sums + i * width + first + 16 * c, acc[i][c]);
    }
}

// Attention of one KV head for `rows` consecutive rows from position `start`, with G query heads each.
class HeadAttention {
  public:
    // `pages`: of the sequence, in the order of its positions. `memory`: attend_floats() floats.
    // `sinks`: of all heads, or null.
    HeadAttention(const AttentionShape& a, const float* sinks, const KvCache& cache, const std::int32_t* pages,
                  int head, int start, int rows, float* memory)
        : a_(a),
          sinks_(sinks),
          cache_(cache),
          pages_(pages),
          head_(head),
          start_(start),
          rows_(rows),
          width_(attend_width(cache.head_dim, cache.kind)),
          group_(a.heads / a.kv_heads),
          queries_(group_ * rows),
          row_bytes_(cache.row_bytes()) {
        query_ = memory;
        sums_ = query_ + std::ptrdiff_t(queries_) * width_;
        wide_ = sums_ + std::ptrdiff_t(queries_) * width_;
        scores_ = wide_ + kPartTokens * width_;
        run_ = reinterpret_cast<Running*>(scores_ + std::ptrdiff_t(queries_) * kBlockTokens);
    }

    void operator()(const float* q, float* out) {
        const int e = a_.head_dim, end = start_ + rows_;
        const std::ptrdiff_t stride = std::ptrdiff_t(a_.heads) * e, first = std::ptrdiff_t(head_) * group_ * e;
        const int begin = a_.window > 0 ? std::max(0, start_ - a_.window + 1) / kBlockTokens * kBlockTokens : 0;
        const std::size_t first_bytes = std::min<std::size_t>(kPartTokens, std::size_t(end - begin)) * row_bytes_;
        const Place first_place = place_of(begin);
        prefetch_run(rows_at(cache_.keys, first_place), first_bytes);  // arrives while the queries are laid out
        prefetch_run(rows_at(cache_.values, first_place), first_bytes);
        for (int i = 0; i < queries_; ++i) {
            const float* from = q + (i / group_) * stride + first + std::ptrdiff_t(i % group_) * e;
            for (int c = 0; c < width_; ++c) query_[i * width_ + c] = c < e ? from[c] : 0.0F;
            std::fill_n(sums_ + i * width_, width_, 0.0F);
            run_[i] = sinks_ != nullptr ? Running{sinks_[head_ * group_ + i % group_], 1.0F, 1.0F}
                                        : Running{-INFINITY, 0.0F, 1.0F};
        }
        for (int block = begin; block < end; block += kBlockTokens) {
            const int until = std::min(block + kBlockTokens, end);
            switch (cache_.kind) {
                case Kind::kFloat16:
                    walk<Kind::kFloat16>(block, until);
                    break;
                case Kind::kBfloat16:
                    walk<Kind::kBfloat16>(block, until);
                    break;
                case Kind::kInt8:
                    walk<Kind::kInt8>(block, until);
                    break;
                case Kind::kInt4:
                    walk<Kind::kInt4>(block, until);
                    break;
                default:
                    walk<Kind::kFloat32>(block, until);
            }
        }
        for (int i = 0; i < queries_; ++i) {
            float* to = out + (i / group_) * stride + first + std::ptrdiff_t(i % group_) * e;
            const float share = 1.0F / run_[i].weight;
            for (int c = 0; c < e; ++c) to[c] = sums_[i * width_ + c] * share;
        }
    }

  private:
    // Where a part lies in both pools: the byte offset of the block of its page and head, and its first slot there.
    // Parts of 32 tokens never cross pages, since page_tokens is a multiple of 64.
    struct Place {
        std::size_t block;
        int slot;
    };
    Place place_of(int position) const {
        const int page = position / cache_.page_tokens;
        return {cache_.block_at(pages_[page], head_), position - page * cache_.page_tokens};
    }
    const std::uint8_t* rows_at(const std::uint8_t* pool, const Place& place) const {
        return pool + place.block + std::size_t(place.slot) * row_bytes_;
    }

    // Walks a block: scores of all its parts, then weights, then values of all its parts. The bytes of the next part
    // are fetched meanwhile, so that memory never waits for arithmetic. Fetched further ahead they would not stay in
    // the L1 cache.
    template <Kind kind>
    void walk(int start, int end) {
        // Parts that no row's window reaches back to are left out.
        const int oldest = a_.window > 0 ? start_ - a_.window + 1 : 0;
        const int lo = std::max(0, oldest - start) / kPartTokens, hi = (end - start + kPartTokens - 1) / kPartTokens;
        const bool in_place = quantised(kind) || a_.head_dim == width_;
        constexpr int kParts = kBlockTokens / kPartTokens;
        Place places[kParts + 1];  // of the block's parts, and of the first part of the next block
        for (int part = lo; part < hi; ++part) places[part] = place_of(start + part * kPartTokens);
        const bool goes_on = start + kBlockTokens < start_ + rows_;
        if (goes_on) places[kParts] = place_of(start + kBlockTokens);
        const auto fetched = [&](int step) -> const std::uint8_t* {  // steps: keys of [lo, hi), values of [lo, hi), …
            const int parts = hi - lo, ahead = step + 1;
            if (!in_place) return nullptr;
            if (ahead < parts) return next<kind>(cache_.keys, places[lo + ahead]);
            if (ahead < 2 * parts) return next<kind>(cache_.values, places[lo + ahead - parts]);
            return goes_on ? next<kind>(cache_.keys, places[kParts]) : nullptr;
        };
        const auto each_part = [&](const std::uint8_t* pool, int step, const auto& work) {
            for (int part = lo; part < hi; ++part, ++step) {
                const int count = std::min(kPartTokens, end - start - part * kPartTokens);
                const std::uint8_t* from = rows_at(pool, places[part]);
                Cached rows{from, row_bytes_, width_, wide_, wide_};
                if constexpr (quantised(kind)) {
                    widen_factors(cache_, pool + places[part].block, places[part].slot, wide_);
                    rows.group = cache_.group;
                    rows.scales = wide_, rows.minimums = wide_ + cache_.groups() * kPartTokens;
                } else if (!in_place) {
                    // Rows end inside a vector, and the bytes that follow may be anything, NaN too.
                    for (int i = 0; i < count; ++i) {
                        widen_row<kind>(from + std::size_t(i) * row_bytes_, a_.head_dim, wide_ + i * width_);
                    }
                    rows.data = reinterpret_cast<std::uint8_t*>(wide_), rows.row_bytes = std::size_t(width_) * 4;
                    work.template operator()<Kind::kFloat32>(rows, part * kPartTokens, count, nullptr);
                    continue;
                }
                work.template operator()<kind>(rows, part * kPartTokens, count, fetched(step));
            }
        };
        each_part(cache_.keys, 0, [&]<Kind as>(const Cached& keys, int at, int count, const std::uint8_t* ahead) {
            each_query([&]<int n>(int i) {
                score<as, n>(query_ + i * width_, width_, keys, i == 0 ? ahead : nullptr, count, a_.scale,
                             scores_ + std::ptrdiff_t(i) * kBlockTokens + at);
            });
        });
        for (int i = 0; i < queries_; ++i) weigh(i, start, end, lo * kPartTokens);
        each_part(cache_.values, hi - lo,
                  [&]<Kind as>(const Cached& values, int at, int count, const std::uint8_t* ahead) {
                      each_query([&]<int n>(int i) {
                          add_values<as, n>(i, at, values, count, at == lo * kPartTokens, i == 0 ? ahead : nullptr);
                      });
                  });
    }

    // The rows of a part. Fetches its scales and minimums now: two cache lines for each group.
    template <Kind kind>
    const std::uint8_t* next(const std::uint8_t* pool, const Place& place) const {
        if constexpr (quantised(kind)) {
            for (int g = 0; g < 2 * cache_.groups(); ++g) {
                __builtin_prefetch(pool + place.block + cache_.scale_at(g, place.slot));
            }
        }
        return rows_at(pool, place);
    }

    // Calls work<n>(i) for n queries from i on, until all queries are done.
    template <class Work>
    void each_query(const Work& work) const {
        int i = 0;
        const auto by_count = [&]<int n>() {
            for (; i + n <= queries_; i += n) work.template operator()<n>(i);
        };
        by_count.template operator()<4>();
        by_count.template operator()<2>();
        by_count.template operator()<1>();
    }

    // Turns query i's scores of a block into weights. Scores before `lo` were not computed.
    void weigh(int i, int start, int end, int lo) {
        float* const s = scores_ + std::ptrdiff_t(i) * kBlockTokens;
        if (a_.softcap > 0) {
            for (int t = lo; t < end - start; t += 16) {
                const F capped = f_tanh(f_mul(f_load(s + t), f_set(1.0F / a_.softcap)));
                f_store(s + t, f_mul(capped, f_set(a_.softcap)));
            }
        }
        const int position = start_ + i / group_;
        const int oldest = a_.window > 0 ? std::max(lo, position - a_.window + 1 - start) : lo;
        const int seen = std::max(0, std::min(end, position + 1) - start);
        std::fill(s + seen, s + kBlockTokens, -INFINITY);
        std::fill(s, s + std::min(oldest, kBlockTokens), -INFINITY);
        run_[i].shrink = soften(s, run_[i]);
    }

    template <Kind kind, int n>
    void add_values(int first, int offset, const Cached& values, int count, bool starts, const std::uint8_t* ahead) {
        const float* weights = scores_ + std::ptrdiff_t(first) * kBlockTokens + offset;
        float shrink[n];
        for (int i = 0; i < n; ++i) shrink[i] = starts ? run_[first + i].shrink : 1.0F;
        int c = 0;
        const auto by_width = [&]<int wide>() {
            for (; c + 16 * wide <= width_; c += 16 * wide) {
                blend<kind, n, wide>(weights, shrink, values, ahead, count, width_, c, sums_ + first * width_);
            }
        };
        by_width.template operator()<n == 4 ? 4 : 8>();
        by_width.template operator()<kVectors<kind>>();
    }

    const AttentionShape& a_;
    const float* sinks_;
    const KvCache& cache_;
    const std::int32_t* pages_;
    int head_, start_, rows_, width_, group_, queries_;
    std::size_t row_bytes_;
    float *query_, *sums_, *wide_, *scores_;
    Running* run_;
};

bool attend(Pool& pool, const AttendOp& op) {
    const AttentionShape& a = op.attention;
    const Sequence* const sequences = op.sequences;
    const int sequence_count = op.sequence_count;
    const KvCache& cache = op.cache;
    Scratch scratch = op.scratch;
    const int width = attend_width(cache.head_dim, cache.kind), group = a.heads / a.kv_heads;
    int longest = 1, items = 0;
    for (int s = 0; s < sequence_count; ++s) longest = std::max(longest, sequences[s].rows);
    const int rows_at_once = std::min(longest, kQueryRows), queries = group * rows_at_once;
    const std::size_t share = scratch_aligned(attend_floats(queries, width) * sizeof(float)) / sizeof(float);
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
            int s = 0, before = 0, left = item;
            for (;; ++s) {
                const int here = (sequences[s].rows + rows_at_once - 1) / rows_at_once * heads;
                if (left < here) break;
                left -= here;
                before += sequences[s].rows;
            }
            const int head = a.lo + left % heads, row = left / heads * rows_at_once;
            const int rows = std::min(rows_at_once, sequences[s].rows - row);
            const std::ptrdiff_t at = std::ptrdiff_t(before + row) * a.heads * a.head_dim;
            const std::int32_t* pages = op.pages + sequences[s].first_page;
            HeadAttention{a, op.sinks, cache, pages, head, sequences[s].start + row, rows, mine}(op.q + at, op.a + at);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
