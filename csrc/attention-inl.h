// q, k, v and attention for one instruction set; included after kernels-inl.h.
//
// A head's positions are walked in blocks of 64 from position 0 on, with a running maximum (log-sum-exp), so a row's
// result depends on its position and the cache alone: not on the chunk it came in, nor on its neighbours.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int kBlockTokens = 64;
constexpr int kQueryRows = 8;  // rows of a prefill chunk that share a converted block of K and V

inline int up16(int n) { return (n + 15) / 16 * 16; }

// Elements of the cache to float32, `count` of them, the rest of 16 zero. `from` has room for whole vectors only
// inside.
inline void widen_row(const std::uint8_t* from, Kind kind, int count, float* to) {
    int i = 0;
    for (; i + 16 <= count; i += 16) {
        f_store(to + i, kind == Kind::kFloat32   ? f_load(from + 4 * std::size_t(i))
                        : kind == Kind::kFloat16 ? f_half(from + 2 * std::size_t(i))
                                                 : f_bf16(from + 2 * std::size_t(i)));
    }
    if (i < count) {
        alignas(64) std::uint8_t tail[64] = {};
        const std::size_t item = kind == Kind::kFloat32 ? 4 : 2;
        std::memcpy(tail, from + std::size_t(i) * item, std::size_t(count - i) * item);
        f_store(to + i, kind == Kind::kFloat32 ? f_load(tail) : kind == Kind::kFloat16 ? f_half(tail) : f_bf16(tail));
    }
}

inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fc0U;  // NaN; rounding up could wrap it to 0
    return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

// float32 to the cache's format; float16 saturates at ±65504 instead of becoming infinite.
inline void narrow_row(const float* from, Kind kind, int count, std::uint8_t* to) {
    if (kind == Kind::kFloat32) {
        std::memcpy(to, from, std::size_t(count) * 4);
    } else if (kind == Kind::kBfloat16) {
        for (int i = 0; i < count; ++i) {
            const std::uint16_t half = to_bf16(from[i]);
            std::memcpy(to + 2 * std::size_t(i), &half, 2);
        }
    } else {
        alignas(64) float lanes[16] = {};
        alignas(64) std::uint8_t halves[32];
        for (int i = 0; i < count; i += 16) {
            const int n = std::min(16, count - i);
            for (int k = 0; k < n; ++k) lanes[k] = std::min(std::max(from[i + k], -65504.0F), 65504.0F);
            f_store_half(halves, f_load(lanes));
            std::memcpy(to + 2 * std::size_t(i), halves, std::size_t(n) * 2);
        }
    }
}

inline void norm_head(float* x, const float* weight, float eps, int count) {
    float total = 0;
    for (int i = 0; i < count; ++i) total += x[i] * x[i];
    const float scale = 1.0F / std::sqrt(total / static_cast<float>(count) + eps);
    for (int i = 0; i < count; ++i) x[i] = x[i] * scale * weight[i];
}

inline void rotate_head(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; ++i) {
        const float lo = x[i], hi = x[half + i];
        x[i] = lo * cos[i] - hi * sin[i];
        x[half + i] = hi * cos[i] + lo * sin[i];
    }
}

bool qkv(Pool& pool, const Granules& weights, const QkvShape& shape, const AttentionShape& a, const float* h, int t,
         const float* q_norm, const float* k_norm, const float* cos, const float* sin, const Sequence* sequences,
         int sequence_count, const KvCache& cache, float* q, bool exact, Scratch scratch) {
    const int e = a.head_dim, heads = weights.count, group = a.heads / a.kv_heads;
    const std::ptrdiff_t q_stride = std::ptrdiff_t(a.heads) * e;
    Prepared input;
    if (!Prepared::plan(shape.q, h, shape.q.cols, 1, t, exact, scratch, input)) return false;
    auto* kv = take<float>(scratch, std::size_t(2) * std::size_t(t) * std::size_t(heads) * std::size_t(e));
    if (kv == nullptr) return false;
    float* const made[2] = {kv, kv + std::ptrdiff_t(t) * heads * e};
    float* const q_out = q + std::ptrdiff_t(a.lo) * group * e;
    const std::size_t bytes = bytes_of(shape.q) + bytes_of(shape.k) + bytes_of(shape.v);
    pool.run(cost_of(weights, bytes, t), [&](const Team& team) {
        input.fill(team, shape.q, h, shape.q.cols, 1, t);
        if (shape.q.quantised()) team.barrier();
        const Matrix* const blocks[3] = {&shape.q, &shape.k, &shape.v};
        const int q_tiles = shape.q.tiles(), kv_tiles = shape.k.tiles(), per_head = q_tiles + 2 * kv_tiles;
        const auto [first, last] = team.share(heads * per_head);
        for (int i = first; i < last; ++i) {
            const int head = i / per_head, at = i % per_head;
            const int which = at < q_tiles ? 0 : at < q_tiles + kv_tiles ? 1 : 2;
            const int tile = which == 0 ? at : at - q_tiles - (which - 1) * kv_tiles;
            const Matrix& m = *blocks[which];
            const int row0 = tile * kTileRows, count = std::min(kTileRows, m.rows - row0);
            const std::uint8_t* p =
                weights.data + std::size_t(head) * weights.stride + m.offset + std::size_t(tile) * m.tile_bytes();
            tile_rows(m, p, input.rows, t, [&](int row, F y) {
                float* to = which == 0 ? q_out + row * q_stride + std::ptrdiff_t(head) * m.rows
                                       : made[which - 1] + (std::ptrdiff_t(row) * heads + head) * e;
                store_some(to + row0, y, count);
            });
        }
        team.barrier();
        const auto [begin, end] = team.share(heads * t);
        for (int i = begin; i < end; ++i) {
            const int head = i / t, row = i % t;
            const std::uint8_t* granule = weights.data + std::size_t(head) * weights.stride;
            const auto finish = [&](float* x, std::size_t bias, std::ptrdiff_t bias_at, const float* norm, bool turns) {
                if (bias != 0) {
                    const auto* b = reinterpret_cast<const float*>(granule + bias) + bias_at;
                    for (int k = 0; k < e; ++k) x[k] += b[k];
                }
                if (norm != nullptr) norm_head(x, norm, shape.norm_eps, e);
                const int half = shape.rope_dims / 2;
                if (turns && half > 0) {
                    rotate_head(x, cos + std::ptrdiff_t(row) * half, sin + std::ptrdiff_t(row) * half, half);
                }
            };
            for (int g = 0; g < group; ++g) {
                finish(q_out + row * q_stride + (std::ptrdiff_t(head) * group + g) * e, shape.q_bias,
                       std::ptrdiff_t(g) * e, q_norm, true);
            }
            float* const k = made[0] + (std::ptrdiff_t(row) * heads + head) * e;
            float* const v = made[1] + (std::ptrdiff_t(row) * heads + head) * e;
            finish(k, shape.k_bias, 0, k_norm, true);
            finish(v, shape.v_bias, 0, nullptr, false);
            int s = 0, before = 0;
            while (s + 1 < sequence_count && row >= before + sequences[s].rows) before += sequences[s++].rows;
            const int position = sequences[s].start + row - before;
            const std::size_t to = cache.offset(sequences[s].first_page + position / cache.page_tokens, a.lo + head) +
                                   std::size_t(position % cache.page_tokens) * std::size_t(e) * cache.item_bytes();
            narrow_row(k, cache.kind, e, cache.keys + to);
            narrow_row(v, cache.kind, e, cache.values + to);
        }
    });
    return true;
}

// Running softmax of one query row.
struct Running {
    float best, weight;
};

// Turns scores of a block into weights; returns what earlier sums shrink by. `hidden` scores are -inf already.
inline float soften(float* scores, int count, Running& run) {
    float peak = run.best;
    bool damaged = false;
    for (int i = 0; i < count; ++i) {
        peak = std::max(peak, scores[i]);
        damaged |= std::isnan(scores[i]);
    }
    if (damaged) {  // max() passes over NaN; a row that met one stays NaN
        run.weight = scores[0] = NAN;
        return NAN;
    }
    if (std::isinf(peak) && peak < 0) {  // nothing seen yet
        for (int i = 0; i < count; ++i) scores[i] = 0.0F;
        return 1.0F;
    }
    const float shrink = std::isinf(run.best) ? 0.0F : exp_of(run.best - peak);
    float total = 0;
    for (int i = 0; i < count; ++i) scores[i] = scores[i] < -1e30F ? 0.0F : exp_of(scores[i] - peak);
    for (int i = 0; i < count; ++i) total += scores[i];
    run.weight = run.weight * shrink + total;
    run.best = peak;
    return shrink;
}

// Attention of `rows` consecutive rows (from position `start`) of one KV head: its G query heads each.
// Buffers: q, sums [G * rows, E16]; k, v [64, E16]; scores [G * rows, 64].
void attend_head(const AttentionShape& a, const KvCache& cache, int first_page, int head, int start, int rows,
                 const float* q, float* out, float* memory) {
    const int e = a.head_dim, e16 = up16(e), group = a.heads / a.kv_heads, queries = group * rows;
    const std::ptrdiff_t stride = std::ptrdiff_t(a.heads) * e;
    float* query = memory;
    float* sums = query + std::ptrdiff_t(queries) * e16;
    float* k = sums + std::ptrdiff_t(queries) * e16;
    float* v = k + kBlockTokens * e16;
    float* scores = v + kBlockTokens * e16;
    auto* run = reinterpret_cast<Running*>(scores + std::ptrdiff_t(queries) * kBlockTokens);
    for (int i = 0; i < queries; ++i) {
        const int row = i / group, g = i % group;
        const float* from = q + row * stride + std::ptrdiff_t(head * group + g) * e;
        for (int c = 0; c < e16; ++c) query[i * e16 + c] = c < e ? from[c] : 0.0F;
        std::fill_n(sums + i * e16, e16, 0.0F);
        run[i] = {-INFINITY, 0.0F};
    }
    const int end = start + rows;
    const int begin = a.window > 0 ? std::max(0, start - a.window + 1) / kBlockTokens * kBlockTokens : 0;
    for (int block = begin; block < end; block += kBlockTokens) {
        const int count = std::min(kBlockTokens, end - block);
        // Blocks never cross pages: page_tokens is a multiple of 64.
        const std::size_t at = cache.offset(first_page + block / cache.page_tokens, head) +
                               std::size_t(block % cache.page_tokens) * std::size_t(e) * cache.item_bytes();
        for (int i = 0; i < count; ++i) {
            const std::size_t row = at + std::size_t(i) * std::size_t(e) * cache.item_bytes();
            widen_row(cache.keys + row, cache.kind, e, k + i * e16);
            widen_row(cache.values + row, cache.kind, e, v + i * e16);
        }
        for (int i = 0; i < queries; ++i) {
            const float* x = query + i * e16;
            float* s = scores + std::ptrdiff_t(i) * kBlockTokens;
            const int position = start + i / group;
            const int oldest = a.window > 0 ? position - a.window + 1 : 0;
            for (int token = 0; token < count; ++token) {
                const int where = block + token;
                if (where > position || where < oldest) {
                    s[token] = -INFINITY;
                    continue;
                }
                F sum = f_mul(f_load(x), f_load(k + token * e16));
                for (int c = 16; c < e16; c += 16) sum = f_fma(f_load(x + c), f_load(k + token * e16 + c), sum);
                float score = f_sum(sum) * a.scale;
                if (a.softcap > 0) score = a.softcap * std::tanh(score / a.softcap);
                s[token] = score;
            }
            const float shrink = soften(s, count, run[i]);
            float* to = sums + i * e16;
            for (int c = 0; c < e16; c += 16) {
                F sum = f_mul(f_load(to + c), f_set(shrink));
                for (int token = 0; token < count; ++token)
                    sum = f_fma(f_set(s[token]), f_load(v + token * e16 + c), sum);
                f_store(to + c, sum);
            }
        }
    }
    for (int i = 0; i < queries; ++i) {
        float* to = out + (i / group) * stride + std::ptrdiff_t(head * group + i % group) * e;
        const float share = 1.0F / run[i].weight;
        for (int c = 0; c < e; ++c) to[c] = sums[i * e16 + c] * share;
    }
}

bool attend(Pool& pool, const AttentionShape& a, const Sequence* sequences, int sequence_count, const KvCache& cache,
            const float* q, float* out, Scratch scratch) {
    const int e16 = up16(a.head_dim), group = a.heads / a.kv_heads;
    int longest = 1, items = 0;
    for (int s = 0; s < sequence_count; ++s) longest = std::max(longest, sequences[s].rows);
    const int rows_at_once = std::min(longest, kQueryRows), queries = group * rows_at_once;
    const std::size_t each =
        std::size_t(2 * queries + 2 * kBlockTokens) * std::size_t(e16) + std::size_t(queries) * (kBlockTokens + 2);
    const std::size_t share = (each + 15) / 16 * 16;
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
            attend_head(a, cache, sequences[s].first_page, head, sequences[s].start + row, rows, q + at, out + at,
                        mine);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
