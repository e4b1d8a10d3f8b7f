// Products of packed weights with rows, for one instruction set: one result per granule (`project`), logits (`head`),
// and sums over granules (`out`).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "activation-inl.h"
#include "input-inl.h"
#include "kernels.h"
#include "short-inl.h"
#include "tile-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Multiplies x [T, cols] with the block of each granule. Calls out(team, row, column, 16 products, how many of them are
// wanted).
template <class Out>
bool multiply(Pool& pool, const Granules& weights, const Matrix& m, const float* x, std::ptrdiff_t x_stride, int t,
              int out_cols, bool exact, Scratch& scratch, const Out& out) {
    Input input;
    if (!input.plan(m, x, x_stride, 1, t, exact, scratch)) return false;
    Pieces pieces(pool.threads());
    pool.run(cost_of(weights, bytes_of(m), t), [&](const Team& team) {
        const Cuts cuts(m, input.chunk());
        const int all = weights.count * cuts.per_granule;
        // It arrives while activations are laid out.
        prefetch_run(cuts.tiles_of(weights, m, team.share(all).first).series.first);
        for (int row0 = 0, phase = 0; row0 < t; row0 += input.chunk()) {
            const Rows rows = input.chunk_at(team, row0);
            pieces.share(team, phase++, all, [&](int cut, int next) {
                const auto sink = [&](int row, int tile, F y) {
                    const int inside = (cuts.tile(cut) + tile) * kTileRows,
                              column = cuts.granule(cut) * m.rows + inside;
                    const int count = std::min({kTileRows, m.rows - inside, out_cols - column});
                    if (count > 0) out(team, row0 + row, column, y, count);
                };
                Tiles tiles = cuts.tiles_of(weights, m, cut);
                if (next >= 0) tiles.then = cuts.tiles_of(weights, m, next).series.first;
                tile_rows(m, tiles, rows, 0, rows.count, nothing, sink);
            });
        }
    });
    return true;
}

bool project(Pool& pool, const ProjectOp& op) {
    Scratch scratch = op.scratch;
    return multiply(pool, op.weights, op.matrix, op.x, op.x_stride, op.t, op.out_cols, op.exact, scratch,
                    [&](const Team&, int row, int column, F y, int count) {
                        store_some(op.out + row * op.out_stride + column, y, count);
                    });
}

bool predict(Pool& pool, const PredictOp& op) {
    const Granules weights{op.weights, 1, 0};
    const Matrix &first = op.hidden, &second = op.neurons;
    const auto bias = [&](std::size_t at, int column, int count) {
        return load_some(reinterpret_cast<const float*>(op.weights + at) + column, count);
    };
    Scratch scratch = op.scratch;
    auto* const hidden = take<float>(scratch, std::size_t(op.t) * std::size_t(first.rows));
    if (hidden == nullptr) return false;
    Scratch once = scratch;
    const bool done = multiply(pool, weights, first, op.h, first.cols, op.t, first.rows, op.exact, once,
                               [&](const Team&, int row, int column, F y, int count) {
                                   y = f_max(f_zero(), f_add(y, bias(op.hidden_bias, column, count)));
                                   store_some(hidden + std::ptrdiff_t(row) * first.rows + column, y, count);
                               });
    if (!done) return false;
    return multiply(pool, weights, second, hidden, first.rows, op.t, second.rows, op.exact, scratch,
                    [&](const Team&, int row, int column, F y, int count) {
                        float scores[kTileRows];
                        f_store(scores, f_add(y, bias(op.neurons_bias, column, count)));
                        std::uint8_t* const to = op.active + std::ptrdiff_t(row) * second.rows + column;
                        for (int i = 0; i < count; ++i) to[i] = scores[i] > 0.0F;
                    });
}

// Updates `best` with `count` logits, of the tokens from `first` on.
inline void follow(Best& best, F logits, int count, int first) {
    float lanes[kTileRows];
    if (count < kTileRows) {
        f_store(lanes, logits);
        std::fill(lanes + count, lanes + kTileRows, -INFINITY);
        logits = f_load(lanes);
    }
    if (i_max_of(i_magnitude(logits)) > 0x7f800000) best.logit = NAN;
    const float most = f_max_of(logits);
    if (!(most >= best.logit)) return;
    f_store(lanes, logits);
    for (int i = 0; i < count; ++i) {
        if (lanes[i] > best.logit || (lanes[i] == best.logit && first + i < best.token)) best = {lanes[i], first + i};
    }
}

bool head(Pool& pool, const HeadOp& op) {
    const int t = op.t;
    Best* const best = op.best;
    if (op.starts && best != nullptr) std::fill_n(best, t, Best{-INFINITY, 0});
    std::vector<Best> own;  // [threads][T]: each thread has its own, so that none waits for another
    for (int i = 0; best != nullptr && i < pool.threads(); ++i) own.insert(own.end(), best, best + t);
    Scratch scratch = op.scratch;
    const float softcap = op.softcap;
    const bool done = multiply(pool, op.weights, op.matrix, op.h, op.h_stride, t, op.out_cols, op.exact, scratch,
                               [&](const Team& team, int row, int column, F y, int count) {
                                   if (softcap > 0) y = f_mul(f_tanh(f_mul(y, f_set(1.0F / softcap))), f_set(softcap));
                                   store_some(op.logits + row * op.out_stride + column, y, count);
                                   if (best != nullptr)
                                       follow(own[std::size_t(team.id() * t + row)], y, count, op.first_token + column);
                               });
    for (int i = 0; best != nullptr && i < pool.threads(); ++i) {
        for (int row = 0; row < t; ++row) {
            const Best& candidate = own[std::size_t(i * t + row)];
            Best& winner = best[row];
            if (std::isnan(candidate.logit)) winner.logit = NAN;
            if (candidate.logit > winner.logit || (candidate.logit == winner.logit && candidate.token < winner.token))
                winner = candidate;
        }
    }
    return done;
}

// Computes this thread's tiles of `sum` [count, rows of m], of few rows: granule by granule, so that weights are read
// in the order in which they lie.
void accumulate_few(const Granules& weights, const Matrix& m, const Rows& x, int lo, int hi, float* sum, bool first) {
    // Where a thread's part of a granule is short (KV heads of a small model), the bytes kAhead further on are not its
    // own. Then it fetches its tiles of the next granule, else the first bytes of these when it comes to its last ones.
    const bool is_short = std::size_t(hi - lo) * m.tile_bytes() <= 2 * kAhead;
    for (int g = 0; g < weights.count; ++g) {
        const std::uint8_t* const block = weights.data + std::size_t(g) * weights.stride + m.offset;
        if (!is_short && g + 1 < weights.count) {
            prefetch_run(block + weights.stride + std::size_t(lo) * m.tile_bytes());
        }
        short_tiles(m, block, lo, hi, is_short ? weights.stride : kAhead, x, g, first && g == 0 ? nullptr : sum, sum);
    }
}

// Computes this thread's tiles of `sum` [count, rows of m]. Few rows go granule by granule. With many rows a tile's
// sums stay in registers over all granules. Either way the terms of a sum are added in the same order.
void accumulate_share(const Team& team, Pieces& pieces, int phase, const Granules& weights, const Matrix& m,
                      const Rows& x, float* sum, bool first) {
    const Cuts cuts(m, x.count);
    if (x.count <= kFewRows) {
        const auto [lo, hi] = team.share(cuts.per_granule);
        if (lo == hi) return;
        const int end = std::min(cuts.tile(hi - 1) + cuts.width, m.tiles());
        return accumulate_few(weights, m, x, cuts.tile(lo), end, sum, first);
    }
    pieces.share(team, phase, cuts.per_granule, [&](int cut, int next) {
        Tiles tiles = cuts.tiles_of(weights, m, cut);
        tiles.granule = 0, tiles.series.count = weights.count;
        if (weights.count > 1) tiles.series.ahead = weights.stride;
        if (next >= 0) tiles.then = cuts.tiles_of(weights, m, next).series.first;
        const int column = cuts.tile(cut) * kTileRows;
        const auto place = [&](int row, int tile) {
            return sum + std::ptrdiff_t(row) * m.rows + column + tile * kTileRows;
        };
        const auto count = [&](int tile) { return m.rows - column - tile * kTileRows; };
        tile_rows(
            m, tiles, x, 0, x.count,
            [&](int row, int tile) { return first ? f_zero() : load_some(place(row, tile), count(tile)); },
            [&](int row, int tile, F y) { store_some(place(row, tile), y, count(tile)); });
    });
}

bool out(Pool& pool, const OutOp& op) {
    const Granules& weights = op.weights;
    const Matrix& m = op.matrix;
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(m, op.a, op.a_stride, weights.count, op.t, op.exact, scratch)) return false;
    Pieces pieces(pool.threads());
    pool.run(cost_of(weights, bytes_of(m), op.t), [&](const Team& team) {
        const Cuts cuts(m, input.chunk());
        prefetch_run(cuts.tiles_of(weights, m, team.share(cuts.per_granule).first).series.first);
        for (int row0 = 0, phase = 0; row0 < op.t; row0 += input.chunk()) {
            float* const sum = op.partial + std::ptrdiff_t(row0) * m.rows;
            accumulate_share(team, pieces, phase++, weights, m, input.chunk_at(team, row0), sum, op.starts_sum);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
