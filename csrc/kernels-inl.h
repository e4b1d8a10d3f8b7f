// Products of weights with rows, for one instruction set: one by one, as logits, and summed over granules.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "activation-inl.h"
#include "input-inl.h"
#include "kernels.h"
#include "tile-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// out(team, row, column, 16 products, how many of them are wanted) for x [T, cols] · block of each granule.
template <class Out>
bool multiply(Pool& pool, const Granules& weights, const Matrix& m, const float* x, std::ptrdiff_t x_stride, int t,
              int out_cols, bool exact, Scratch& scratch, const Out& out) {
    Input input;
    if (!input.plan(m, x, x_stride, 1, t, exact, scratch)) return false;
    pool.run(cost_of(weights, bytes_of(m), t), [&](const Team& team) {
        const Cuts cuts(m, input.chunk());
        const auto [first, last] = team.share(weights.count * cuts.per_granule);
        prefetch_run(cuts.tiles_of(weights, m, first).series.first);  // while activations are laid out
        for (int row0 = 0; row0 < t; row0 += input.chunk()) {
            const Rows rows = input.chunk_at(team, row0);
            for (int cut = first; cut < last; ++cut) {
                const auto sink = [&](int row, int tile, F y) {
                    const int at = (cuts.tile(cut) + tile) * kTileRows, column = cuts.granule(cut) * m.rows + at;
                    const int count = std::min({kTileRows, m.rows - at, out_cols - column});
                    if (count > 0) out(team, row0 + row, column, y, count);
                };
                tile_rows(m, cuts.tiles_of(weights, m, cut), rows, 0, rows.count, nothing, sink);
            }
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

// Takes `count` logits from token `first` on into account.
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
    std::vector<Best> each;  // [threads][T]; a thread's own, so that none waits for another
    for (int i = 0; best != nullptr && i < pool.threads(); ++i) each.insert(each.end(), best, best + t);
    Scratch scratch = op.scratch;
    const float softcap = op.softcap;
    const bool done =
        multiply(pool, op.weights, op.matrix, op.h, op.h_stride, t, op.out_cols, op.exact, scratch,
                 [&](const Team& team, int row, int column, F y, int count) {
                     if (softcap > 0) y = f_mul(f_tanh(f_mul(y, f_set(1.0F / softcap))), f_set(softcap));
                     store_some(op.logits + row * op.out_stride + column, y, count);
                     if (best != nullptr)
                         follow(each[std::size_t(team.id() * t + row)], y, count, op.first_token + column);
                 });
    for (int i = 0; best != nullptr && i < pool.threads(); ++i) {
        for (int row = 0; row < t; ++row) {
            const Best& other = each[std::size_t(i * t + row)];
            Best& now = best[row];
            if (std::isnan(other.logit)) now.logit = NAN;
            if (other.logit > now.logit || (other.logit == now.logit && other.token < now.token)) now = other;
        }
    }
    return done;
}

// This thread's tiles of `sum`. With few rows granule by granule, for then weights are read in the order in which they
// lie; with many a tile's sums stay in registers over all granules. The terms of a sum come in one order either way.
void accumulate_share(const Team& team, const Granules& weights, const Matrix& m, const Rows& x, float* sum,
                      bool first) {
    const Cuts cuts(m, x.count);
    const auto [lo, hi] = team.share(cuts.per_granule);
    if (lo == hi) return;
    const bool few = x.count <= kFewRows;
    const int together = few ? 1 : weights.count;
    // A thread's run of a granule may be short (KV heads of a small model), and what lies kAhead further on is then not
    // its own: what is fetched meanwhile are the cuts that it takes next, or the same tiles of the next granule.
    const bool short_tiles = cuts.width * m.tile_bytes() <= kAhead;
    const int cuts_ahead = static_cast<int>(kAhead / (std::size_t(cuts.width) * m.tile_bytes())) + 1;
    for (int g = 0; g < weights.count; g += together) {
        for (int cut = lo; cut < hi; ++cut) {
            Tiles tiles = cuts.tiles_of(weights, m, g * cuts.per_granule + cut);
            tiles.granule = g, tiles.series.count = together;
            if (few && short_tiles) {
                tiles.series.ahead = 0;
                const int later = cut + cuts_ahead - lo, next = g + later / (hi - lo);
                if (next < weights.count) {
                    const int at = next * cuts.per_granule + lo + later % (hi - lo);
                    const Tiles wanted = cuts.tiles_of(weights, m, at);
                    prefetch_run(wanted.series.first, std::size_t(wanted.count) * m.tile_bytes());
                }
            } else if (few && cut + 1 == hi && g + 1 < weights.count) {
                prefetch_run(cuts.tiles_of(weights, m, (g + 1) * cuts.per_granule + lo).series.first);
            } else if (!few && weights.count > 1) {
                tiles.series.ahead = weights.stride;
            }
            const int column = cuts.tile(cut) * kTileRows;
            const auto place = [&](int row, int tile) {
                return sum + std::ptrdiff_t(row) * m.rows + column + tile * kTileRows;
            };
            const auto count = [&](int tile) { return m.rows - column - tile * kTileRows; };
            tile_rows(
                m, tiles, x, 0, x.count,
                [&](int row, int tile) {
                    return first && g == 0 ? f_zero() : load_some(place(row, tile), count(tile));
                },
                [&](int row, int tile, F y) { store_some(place(row, tile), y, count(tile)); });
        }
    }
}

// Where this thread's tiles begin.
const std::uint8_t* first_tile(const Team& team, const Granules& weights, const Matrix& m, int rows) {
    const Cuts cuts(m, rows);
    return cuts.tiles_of(weights, m, team.share(cuts.per_granule).first).series.first;
}

bool out(Pool& pool, const OutOp& op) {
    const Granules& weights = op.weights;
    const Matrix& m = op.matrix;
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(m, op.a, op.a_stride, weights.count, op.t, op.exact, scratch)) return false;
    pool.run(cost_of(weights, bytes_of(m), op.t), [&](const Team& team) {
        prefetch_run(first_tile(team, weights, m, input.chunk()));
        for (int row0 = 0; row0 < op.t; row0 += input.chunk()) {
            float* const sum = op.partial + std::ptrdiff_t(row0) * m.rows;
            accumulate_share(team, weights, m, input.chunk_at(team, row0), sum, op.starts_sum);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
