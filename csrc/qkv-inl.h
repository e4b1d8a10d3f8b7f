// q, k and v of a layer's KV heads, for one instruction set: products, biases, norms and rotation. k and v are stored
// in the cache. Included after kernels-inl.h.
#pragma once

#include "cache-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

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

// Adds biases to all heads' q and k of each row, and norms them: one norm for q and one for k. A granule holds all
// heads.
inline void norm_all(const Team& team, const QkvOp& op, float* k_out, float* q) {
    const AttentionShape& a = op.attention;
    const QkvShape& shape = op.shape;
    const auto [first, last] = team.share(op.t);
    const auto finish = [&](float* x, std::size_t bias, const float* norm, int width) {
        if (bias != 0) {
            const auto* b = reinterpret_cast<const float*>(op.weights.data + bias);
            for (int i = 0; i < width; ++i) x[i] += b[i];
        }
        norm_head(x, norm, shape.norm_eps, width);
    };
    for (int row = first; row < last; ++row) {
        finish(q + std::ptrdiff_t(row) * a.heads * a.head_dim, shape.q_bias, op.q_norm, a.heads * a.head_dim);
        finish(k_out + std::ptrdiff_t(row) * a.kv_heads * a.head_dim, shape.k_bias, op.k_norm, a.kv_heads * a.head_dim);
    }
    team.barrier();
}

bool qkv(Pool& pool, const QkvOp& op) {
    const Granules& weights = op.weights;
    const QkvShape& shape = op.shape;
    const AttentionShape& a = op.attention;
    const KvCache& cache = op.cache;
    const int t = op.t, e = a.head_dim, heads = a.hi - a.lo, group = a.heads / a.kv_heads;
    const int together = heads / weights.count;  // KV heads of a granule
    Scratch scratch = op.scratch;
    const std::ptrdiff_t q_stride = std::ptrdiff_t(a.heads) * e;
    Input input;
    if (!input.plan(shape.q, op.h, shape.q.cols, 1, t, op.exact, scratch)) return false;
    auto* kv = take<float>(scratch, std::size_t(2) * std::size_t(t) * std::size_t(heads) * std::size_t(e));
    if (kv == nullptr) return false;
    float* const kv_out[2] = {kv, kv + std::ptrdiff_t(t) * heads * e};
    float* const q_out = op.q + std::ptrdiff_t(a.lo) * group * e;
    const std::size_t bytes = bytes_of(shape.q) + bytes_of(shape.k) + bytes_of(shape.v);
    Pieces pieces(pool.threads());
    pool.run(cost_of(weights, bytes, t), [&](const Team& team) {
        const Matrix* const blocks[3] = {&shape.q, &shape.k, &shape.v};
        const Cuts q_cuts(shape.q, input.chunk()), kv_cuts(shape.k, input.chunk());
        const int per_head = q_cuts.per_granule + 2 * kv_cuts.per_granule;
        const int count = weights.count * per_head;
        // 0: q, 1: k, 2: v.
        const auto part_of = [&](int place) {
            return place < q_cuts.per_granule ? 0 : place < q_cuts.per_granule + kv_cuts.per_granule ? 1 : 2;
        };
        const auto cut_of = [&](int place, int part) {
            return part == 0 ? place : place - q_cuts.per_granule - (part - 1) * kv_cuts.per_granule;
        };
        const auto tiles_of = [&](int i) {
            const int part = part_of(i % per_head), cut = cut_of(i % per_head, part);
            const Cuts& cuts = part == 0 ? q_cuts : kv_cuts;
            return cuts.tiles_of(weights, *blocks[part], i / per_head * cuts.per_granule + cut);
        };
        prefetch_run(tiles_of(team.share(count).first).series.first);
        for (int row0 = 0, phase = 0; row0 < t; row0 += input.chunk()) {
            const Rows rows = input.chunk_at(team, row0);
            pieces.share(team, phase++, count, [&](int i, int next) {
                const int head = i / per_head, part = part_of(i % per_head), cut = cut_of(i % per_head, part);
                const Matrix& m = *blocks[part];
                const Cuts& cuts = part == 0 ? q_cuts : kv_cuts;
                const auto sink = [&](int row, int tile, F y) {
                    row += row0;
                    float* to =
                        part == 0 ? q_out + row * q_stride + std::ptrdiff_t(head) * m.rows
                                  : kv_out[part - 1] + std::ptrdiff_t(row) * heads * e + std::ptrdiff_t(head) * m.rows;
                    const int column = (cuts.tile(cut) + tile) * kTileRows;
                    store_some(to + column, y, m.rows - column);
                };
                Tiles tiles = tiles_of(i);
                if (next >= 0) tiles.then = tiles_of(next).series.first;  // of as many columns
                tile_rows(m, tiles, rows, 0, rows.count, nothing, sink);
            });
        }
        team.barrier();
        if (shape.norms_all_heads) norm_all(team, op, kv_out[0], q_out);
        const auto [begin, end] = team.share(heads * t);
        for (int i = begin; i < end; ++i) {
            const int head = i / t, row = i % t;
            const std::uint8_t* granule = weights.data + std::size_t(head / together) * weights.stride;
            const std::ptrdiff_t nth = head % together;  // number among the heads of its granule
            const auto finish = [&](float* x, std::size_t bias, std::ptrdiff_t bias_at, const float* norm, bool turns) {
                if (bias != 0) {
                    const auto* b = reinterpret_cast<const float*>(granule + bias) + bias_at;
                    for (int k = 0; k < e; ++k) x[k] += b[k];
                }
                if (norm != nullptr) norm_head(x, norm, shape.norm_eps, e);
                const int half = shape.rope_dims / 2;
                if (turns && half > 0) {
                    rotate_head(x, op.cos + std::ptrdiff_t(row) * half, op.sin + std::ptrdiff_t(row) * half, half);
                }
            };
            const bool apart = !shape.norms_all_heads;  // else norm_all has done biases and norms of q and k
            const float* const q_norm = apart ? op.q_norm : nullptr;
            for (int g = 0; g < group; ++g) {
                finish(q_out + row * q_stride + (std::ptrdiff_t(head) * group + g) * e, apart ? shape.q_bias : 0,
                       (nth * group + g) * e, q_norm, true);
            }
            float* const k = kv_out[0] + (std::ptrdiff_t(row) * heads + head) * e;
            float* const v = kv_out[1] + (std::ptrdiff_t(row) * heads + head) * e;
            finish(k, apart ? shape.k_bias : 0, nth * e, apart ? op.k_norm : nullptr, true);
            finish(v, shape.v_bias, nth * e, nullptr, false);
            const Sequence* const sequences = op.sequences;
            int s = 0, before = 0;
            while (s + 1 < op.sequence_count && row >= before + sequences[s].rows) before += sequences[s++].rows;
            const int position = sequences[s].start + row - before;
            const std::size_t block =
                cache.block_at(op.pages[sequences[s].first_page + position / cache.page_tokens], a.lo + head);
            store_row(k, cache, cache.keys + block, position % cache.page_tokens);
            store_row(v, cache, cache.values + block, position % cache.page_tokens);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
