// Attention for one instruction set; included after kernels-inl.h.
//
// A head's positions are walked in blocks of 64 from position 0 on, with a running maximum (log-sum-exp), so a row's
// result depends on its position and the cache alone: not on the chunk it came in, nor on its neighbours. Keys and
// values are converted in registers, each once for up to four queries: for one row of a model with grouped heads
// memory is the limit, at 2 bytes a number and 8 k context 24 GB/s a core.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int kBlockTokens = 64;
constexpr int kQueryRows = 8;  // rows of a prefill chunk that go through the cache together

inline int up16(int n) { return (n + 15) / 16 * 16; }

// 16 numbers of the cache.
template <Kind kind>
inline F f_cached(const std::uint8_t* p) {
    return kind == Kind::kFloat32 ? f_load(p) : kind == Kind::kFloat16 ? f_half(p) : f_bf16(p);
}

// Elements of the cache to float32, `count` of them, the rest of 16 zero.
template <Kind kind>
inline void widen_row(const std::uint8_t* from, int count, float* to) {
    constexpr std::size_t kItem = kind == Kind::kFloat32 ? 4 : 2;
    int i = 0;
    for (; i + 16 <= count; i += 16) f_store(to + i, f_cached<kind>(from + kItem * std::size_t(i)));
    if (i < count) {
        alignas(64) std::uint8_t tail[64] = {};
        std::memcpy(tail, from + std::size_t(i) * kItem, std::size_t(count - i) * kItem);
        f_store(to + i, f_cached<kind>(tail));
    }
}

// Running softmax of one query row.
struct Running {
    float best, weight;
};

// Turns the 64 scores of a block into weights; returns what earlier sums shrink by. Hidden scores are -inf.
inline float soften(float* scores, Running& run) {
    I most_bits = i_zero();
    F peaks = f_load(scores);
    for (int i = 0; i < kBlockTokens; i += 16) {
        const F s = f_load(scores + i);
        most_bits = i_max(most_bits, i_magnitude(s));
        peaks = f_max(peaks, s);
    }
    if (i_max_of(most_bits) > 0x7f800000) {  // a maximum passes over NaN; a row that met one stays NaN
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

// A block of keys or values: rows of `e16` numbers, `row_bytes` apart.
struct Rows16 {
    const std::uint8_t* data;
    std::size_t row_bytes;
};

// scores[i][token] = scale · query i · key of token, for n queries and `count` tokens of a block, 16 at a time.
// Meanwhile the values of this block are fetched from `ahead`, and while values are blended the keys of the next block,
// so that memory never waits for arithmetic.
template <Kind kind, int n>
void score(const float* queries, int e16, const Rows16& keys, const std::uint8_t* ahead, int count, float scale,
           float* scores) {
    constexpr std::size_t kItem = kind == Kind::kFloat32 ? 4 : 2;
    constexpr int kTokens = 16 / n;
    for (int token = 0; token < count; token += kTokens) {
        F sums[16];
        for (F& sum : sums) sum = f_zero();
        const std::uint8_t* rows = keys.data + std::size_t(token) * keys.row_bytes;
        if (ahead != nullptr) {
            const std::size_t from = std::size_t(token) * keys.row_bytes, bytes = std::size_t(kTokens) * keys.row_bytes;
            for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(ahead + from + at);
        }
        for (int c = 0; c < e16; c += 16) {
            F q[n];
            for (int i = 0; i < n; ++i) q[i] = f_load(queries + i * e16 + c);
            for (int k = 0; k < kTokens; ++k) {
                const F key = f_cached<kind>(rows + std::size_t(k) * keys.row_bytes + std::size_t(c) * kItem);
                for (int i = 0; i < n; ++i) sums[i * kTokens + k] = f_fma(q[i], key, sums[i * kTokens + k]);
            }
        }
        alignas(64) float found[16];
        f_store(found, f_mul(f_sums(sums), f_set(scale)));
        for (int i = 0; i < n; ++i) std::memcpy(scores + i * kBlockTokens + token, found + i * kTokens, kTokens * 4);
    }
}

// sums[i] = sums[i] · shrink[i] + Σ tokens: weights[i][token] · value, for n queries and 16 · `wide` columns.
template <Kind kind, int n, int wide>
void blend(const float* weights, const float* shrink, const Rows16& values, const std::uint8_t* ahead, int count,
           int e16, float* sums) {
    constexpr std::size_t kItem = kind == Kind::kFloat32 ? 4 : 2;
    F acc[n][wide];
    for (int i = 0; i < n; ++i) {
        for (int c = 0; c < wide; ++c) acc[i][c] = f_mul(f_load(sums + i * e16 + 16 * c), f_set(shrink[i]));
    }
    const std::uint8_t* row = values.data;
    for (int token = 0; token < count; ++token, row += values.row_bytes) {
        if (ahead != nullptr) {
            for (std::size_t at = 0; at < 16 * wide * kItem; at += 64) __builtin_prefetch(ahead + at);
            ahead += values.row_bytes;
        }
        F value[wide];
        for (int c = 0; c < wide; ++c) value[c] = f_cached<kind>(row + std::size_t(16 * c) * kItem);
        for (int i = 0; i < n; ++i) {
            const F weight = f_set(weights[i * kBlockTokens + token]);
            for (int c = 0; c < wide; ++c) acc[i][c] = f_fma(weight, value[c], acc[i][c]);
        }
    }
    for (int i = 0; i < n; ++i) {
        for (int c = 0; c < wide; ++c) f_store(sums + i * e16 + 16 * c, acc[i][c]);
    }
}

// Attention of `rows` consecutive rows (from position `start`) of one KV head: its G query heads each.
class HeadAttention {
  public:
    // Floats of memory for that many queries: [queries, E16] twice, K and V [64, E16], scores [queries, 64], Running.
    static std::size_t floats(int queries, int e16) {
        return std::size_t(2 * queries + 2 * kBlockTokens) * std::size_t(e16) +
               std::size_t(queries) * (kBlockTokens + 2);
    }

    HeadAttention(const AttentionShape& a, const KvCache& cache, int first_page, int head, int start, int rows,
                  float* memory)
        : a_(a),
          cache_(cache),
          first_page_(first_page),
          head_(head),
          start_(start),
          rows_(rows),
          e16_(up16(a.head_dim)),
          group_(a.heads / a.kv_heads),
          queries_(group_ * rows) {
        query_ = memory;
        sums_ = query_ + std::ptrdiff_t(queries_) * e16_;
        k_ = sums_ + std::ptrdiff_t(queries_) * e16_;
        v_ = k_ + kBlockTokens * e16_;
        scores_ = v_ + kBlockTokens * e16_;
        run_ = reinterpret_cast<Running*>(scores_ + std::ptrdiff_t(queries_) * kBlockTokens);
    }

    void operator()(const float* q, float* out) {
        const int e = a_.head_dim, end = start_ + rows_;
        const std::ptrdiff_t stride = std::ptrdiff_t(a_.heads) * e, first = std::ptrdiff_t(head_) * group_ * e;
        for (int i = 0; i < queries_; ++i) {
            const float* from = q + (i / group_) * stride + first + std::ptrdiff_t(i % group_) * e;
            for (int c = 0; c < e16_; ++c) query_[i * e16_ + c] = c < e ? from[c] : 0.0F;
            std::fill_n(sums_ + i * e16_, e16_, 0.0F);
            run_[i] = {-INFINITY, 0.0F};
        }
        const int begin = a_.window > 0 ? std::max(0, start_ - a_.window + 1) / kBlockTokens * kBlockTokens : 0;
        for (int block = begin; block < end; block += kBlockTokens) {
            const int count = std::min(kBlockTokens, end - block);
            switch (cache_.kind) {
                case Kind::kFloat16:
                    walk<Kind::kFloat16>(block, count);
                    break;
                case Kind::kBfloat16:
                    walk<Kind::kBfloat16>(block, count);
                    break;
                default:
                    walk<Kind::kFloat32>(block, count);
            }
        }
        for (int i = 0; i < queries_; ++i) {
            float* to = out + (i / group_) * stride + first + std::ptrdiff_t(i % group_) * e;
            const float share = 1.0F / run_[i].weight;
            for (int c = 0; c < e; ++c) to[c] = sums_[i * e16_ + c] * share;
        }
    }

  private:
    // 64 positions from `start` on, `count` of them written; what to fetch meanwhile (null: nothing).
    struct Block {
        int start, count;
        Rows16 keys, values;
        const std::uint8_t *next_keys, *next_values;
    };

    // Blocks never cross pages: page_tokens is a multiple of 64.
    std::size_t place(int position, std::size_t row_bytes) const {
        return cache_.offset(first_page_ + position / cache_.page_tokens, head_) +
               std::size_t(position % cache_.page_tokens) * row_bytes;
    }

    template <Kind kind>
    void walk(int start, int count) {
        constexpr std::size_t kItem = kind == Kind::kFloat32 ? 4 : 2;
        const std::size_t row_bytes = std::size_t(a_.head_dim) * kItem, at = place(start, row_bytes);
        const std::uint8_t *keys = cache_.keys + at, *values = cache_.values + at;
        if (a_.head_dim == e16_) {
            Block block{start, count, {keys, row_bytes}, {values, row_bytes}, nullptr, nullptr};
            // Two blocks ahead: one block ahead memory still made it wait (0.76 of the RAM's speed instead of 0.79).
            if (start + 2 * kBlockTokens < start_ + rows_) {
                const std::size_t next = place(start + 2 * kBlockTokens, row_bytes);
                block.next_keys = cache_.keys + next, block.next_values = cache_.values + next;
            }
            return all_queries<kind>(block);
        }
        // Rows that end inside a vector: what follows may be anything, NaN too.
        for (int i = 0; i < count; ++i) {
            widen_row<kind>(keys + std::size_t(i) * row_bytes, a_.head_dim, k_ + i * e16_);
            widen_row<kind>(values + std::size_t(i) * row_bytes, a_.head_dim, v_ + i * e16_);
        }
        const std::size_t wide_bytes = std::size_t(e16_) * 4;
        all_queries<Kind::kFloat32>({start,
                                     count,
                                     {reinterpret_cast<std::uint8_t*>(k_), wide_bytes},
                                     {reinterpret_cast<std::uint8_t*>(v_), wide_bytes},
                                     nullptr,
                                     nullptr});
    }

    template <Kind kind>
    void all_queries(Block block) {
        int i = 0;
        const auto some = [&]<int n>() {
            for (; i + n <= queries_; i += n) {
                some_queries<kind, n>(block, i);
                block.next_keys = block.next_values = nullptr;  // once is enough
            }
        };
        some.template operator()<4>();
        some.template operator()<2>();
        some.template operator()<1>();
    }

    template <Kind kind, int n>
    void some_queries(const Block& block, int first) {
        float* scores = scores_ + std::ptrdiff_t(first) * kBlockTokens;
        score<kind, n>(query_ + first * e16_, e16_, block.keys, block.next_keys, block.count, a_.scale, scores);
        float shrink[n];
        for (int i = 0; i < n; ++i) {
            float* s = scores + i * kBlockTokens;
            if (a_.softcap > 0) {
                for (int t = 0; t < kBlockTokens; t += 16) {
                    const F capped = f_tanh(f_mul(f_load(s + t), f_set(1.0F / a_.softcap)));
                    f_store(s + t, f_mul(capped, f_set(a_.softcap)));
                }
            }
            const int position = start_ + (first + i) / group_;
            const int oldest = a_.window > 0 ? position - a_.window + 1 - block.start : 0;
            const int seen = std::max(0, std::min(block.count, position + 1 - block.start));
            std::fill(s + seen, s + kBlockTokens, -INFINITY);
            if (oldest > 0) std::fill(s, s + std::min(oldest, kBlockTokens), -INFINITY);
            shrink[i] = soften(s, run_[first + i]);
        }
        float* sums = sums_ + first * e16_;
        int c = 0;
        const auto some = [&]<int wide>() {
            for (; c + 16 * wide <= e16_; c += 16 * wide) {
                const std::size_t skip = std::size_t(c) * (kind == Kind::kFloat32 ? 4 : 2);
                blend<kind, n, wide>(scores, shrink, {block.values.data + skip, block.values.row_bytes},
                                     block.next_values ? block.next_values + skip : nullptr, block.count, e16_,
                                     sums + c);
            }
        };
        some.template operator()<n == 4 ? 4 : 8>();
        some.template operator()<1>();
    }

    const AttentionShape& a_;
    const KvCache& cache_;
    int first_page_, head_, start_, rows_, e16_, group_, queries_;
    float *query_, *sums_, *k_, *v_, *scores_;
    Running* run_;
};

bool attend(Pool& pool, const AttentionShape& a, const Sequence* sequences, int sequence_count, const KvCache& cache,
            const float* q, float* out, Scratch scratch) {
    const int e16 = up16(a.head_dim), group = a.heads / a.kv_heads;
    int longest = 1, items = 0;
    for (int s = 0; s < sequence_count; ++s) longest = std::max(longest, sequences[s].rows);
    const int rows_at_once = std::min(longest, kQueryRows), queries = group * rows_at_once;
    const std::size_t share = (HeadAttention::floats(queries, e16) + 15) / 16 * 16;
    // With many heads of many queries the scratch may not hold a share for every thread: then fewer work.
    const int usable = std::min(pool.threads(), static_cast<int>(scratch.nbytes / (share * sizeof(float))));
    if (usable < 1) return false;
    auto* memory = take<float>(scratch, share * std::size_t(usable));
    const int heads = a.hi - a.lo;
    for (int s = 0; s < sequence_count; ++s) items += (sequences[s].rows + rows_at_once - 1) / rows_at_once * heads;
    std::atomic<int> next{
        0};  // causal rows cost unequally: whoever is free takes the next; results do not depend on it
    std::size_t cost = 0;
    for (int s = 0; s < sequence_count; ++s) {
        const int seen = sequences[s].start + sequences[s].rows;
        cost += std::size_t(2 * heads) * std::size_t(seen) * std::size_t(a.head_dim) * cache.item_bytes() *
                std::size_t((sequences[s].rows + 3) / 4);
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
            HeadAttention{a, cache, sequences[s].first_page, head, sequences[s].start + row, rows, mine}(q + at,
                                                                                                         out + at);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
