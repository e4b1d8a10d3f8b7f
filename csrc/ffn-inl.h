// The FFN for one instruction set: hidden values of a granule, and sums over granules by fours (kernels.h, FfnSum).
// Included after neurons-many-inl.h.
#pragma once

#include <atomic>

namespace penstock::PENSTOCK_ISA {
namespace {

// Hidden values of one granule: act(gate h) * up h, laid out for `down` as granule `nth` of `to`. `next`: the bytes
// that are read after the granule. Returns whether they were laid out. If zeros are skipped, which is done for few rows
// alone, and all values are 0, nothing is laid out.
bool hidden_of(const FfnShape& shape, const std::uint8_t* granule, const std::uint8_t* next, const Rows& h,
               const Rows& to, int nth, const Zeros& zeros = {}) {
    alignas(64) float values[kHiddenRows * kWidestRows], gates[kHiddenRows * kWidestRows];
    const int apart = spaced(shape.up);
    const bool gated = shape.gate.rows > 0;
    const int groups = std::max(1, shape.down.groups());
    for (int row0 = 0; row0 < h.count; row0 += kHiddenRows) {
        const int end = std::min(row0 + kHiddenRows, h.count);
        const std::uint8_t* const then = gated ? granule + shape.up.offset : next;
        const bool any = fire(shape, granule, then, h, row0, end, zeros, gated ? gates : values);
        if (!any && zeros.skips) return false;
        if (gated) {
            granule_rows(shape.up, shape.up_bias, granule, next, h, row0, end, values);
            prefetch_run(next);
        }
        for (int row = row0; row < end; ++row) {
            float *const x = values + (row - row0) * apart, *const gate = gates + (row - row0) * apart;
            for (int i = 0; gated && i < shape.up.rows; i += kTileRows) {
                f_store(x + i, times_gate(shape.activation, f_load(gate + i), f_load(x + i)));
            }
            for (int j = 0; j < groups; ++j) Prepared::put(to, shape.down, row, nth, j, x);
        }
    }
    return true;
}

// ---- few rows: a thread takes whole fours, so that its bytes come in one run ----------------------------------------

// to [T, D] = the sum over the granules of a four. Hidden values are laid out in granule `nth` of `hidden`, which only
// this thread uses.
void sum_four(const Granules& weights, const FfnShape& shape, const Rows& x, const Rows& hidden, int nth,
              const Four& four, const float* pending, float* to, const Zeros& zeros = {}) {
    const Matrix& down = shape.down;
    const float* before = four.continues ? pending : nullptr;
    for (int g = four.lo; g < four.hi; ++g) {
        const std::uint8_t* granule = weights.data + std::size_t(g) * weights.stride;
        if (!hidden_of(shape, granule, granule + down.offset, x, hidden, nth, zeros.at(0, g))) continue;
        short_tiles(down, granule + down.offset, 0, down.tiles(), kAhead, hidden, nth, before, to);
        before = to;
    }
    if (before != to) begin_sum(before, std::size_t(x.count) * std::size_t(down.rows), to);
}

bool ffn_few(Pool& pool, const FfnOp& op, std::size_t cost) {
    const FfnShape& shape = op.shape;
    const Granules& weights = op.weights;
    const Fours fours(op.sum, shape, 0, weights.count, weights.count);
    const Zeros zeros = zeros_of(op);
    const int t = op.t, d = shape.width();
    const std::size_t sum_bytes = std::size_t(t) * std::size_t(d) * sizeof(float);
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(shape.first(), op.h, d, 1, t, op.exact, scratch)) return false;
    // As many threads and fours at a time as there is scratch for.
    Prepared prepared;
    int busy = std::min(pool.threads(), fours.count), wave = 0;
    float* sums = nullptr;
    for (; busy > 0 && sums == nullptr; busy = sums == nullptr ? busy / 2 : busy) {
        Scratch left = scratch;
        if (!Prepared::plan(shape.down, busy, t, op.exact, left, prepared)) continue;
        wave = static_cast<int>(std::min(std::size_t(fours.count), left.nbytes / 64 * 64 / sum_bytes));
        if (wave >= busy) sums = take<float>(left, std::size_t(wave) * sum_bytes / sizeof(float));
    }
    if (sums == nullptr) return false;
    std::atomic<int> next{0};  // threads take fours as they come, so that others do more while one is held up
    pool.run(cost, [&](const Team& team) {
        const auto take_next = [&] {
            const int four = team.id() < busy ? next.fetch_add(1, std::memory_order_relaxed) : fours.count;
            if (four < fours.count) prefetch_run(weights.data + std::size_t(fours.at(four).lo) * weights.stride);
            return four;
        };
        int mine = take_next();
        const Rows x = input.chunk_at(team, 0);
        for (int begin = 0; begin < fours.count; begin += wave) {
            const int end = std::min(begin + wave, fours.count);
            for (; mine < end; mine = take_next()) {
                float* const to = sums + std::ptrdiff_t(mine - begin) * t * d;
                sum_four(weights, shape, x, prepared.rows, team.id(), fours.at(mine), op.sum.pending, to, zeros);
            }
            team.barrier();
            fold_fours(team, fours, begin, end - begin, sums, t, d);
            if (end < fours.count) team.barrier();
        }
    });
    return true;
}

// ---- many rows: threads share the hidden values of some granules, then the columns of their sum ---------------------

constexpr int kSomeRows = 32;  // the most rows for which `neurons_some` takes records a few rows at a time

constexpr int kKeptRows = 2 * kHiddenRows;  // rows whose sums of two tiles a thread keeps over all fours: 12 KB

// Adds up granules [fours.begin, fours.end), whose hidden values are `hidden`, for this thread's tiles. A tile's sums
// stay in registers over a four. Over all fours they are kept side by side in `kept`. Rejected: to add each four to
// `partial`. Its rows lie many KB apart, in few sets of the caches, and it took a tenth of an FFN's time.
void sum_columns(const Team& team, Pieces& pieces, int phase, const Granules& weights, const Matrix& down,
                 const Rows& hidden, const Fours& fours, std::ptrdiff_t row0) {
    const FfnSum& sum = fours.sum;
    const Cuts cuts(down, std::max(hidden.count, kFewRows + 1));  // `kept` has room for cuts of many rows alone
    const auto tiles_of = [&](int four, int cut) {
        return cuts.tiles_of(weights, down, fours.at(four).lo * cuts.per_granule + cut);
    };
    alignas(64) float kept[kKeptRows][kWideTiles][kTileRows];
    pieces.share(team, phase, cuts.per_granule, [&](int cut, int next) {
        const int column = cuts.tile(cut) * kTileRows, width = tiles_of(0, cut).count;
        const auto place = [&](int row, int tile) {
            return (row0 + row) * down.rows + column + std::ptrdiff_t(tile) * kTileRows;
        };
        const auto count = [&](int tile) { return down.rows - column - tile * kTileRows; };
        for (int begin = 0; begin < hidden.count; begin += kKeptRows) {
            const int end = std::min(begin + kKeptRows, hidden.count);
            const auto each = [&](const auto& visit) {
                for (int row = begin; row < end; ++row) {
                    for (int tile = 0; tile < width; ++tile)
                        visit(kept[row - begin][tile], place(row, tile), count(tile));
                }
            };
            each([&](float* to, std::ptrdiff_t at, int some) {
                f_store(to, fours.starts(0) ? f_zero() : load_some(sum.partial + at, some));
            });
            for (int i = 0; i < fours.count; ++i) {
                const Four four = fours.at(i);
                Tiles tiles = tiles_of(i, cut);
                tiles.granule = four.lo - fours.begin;
                tiles.series.count = four.hi - four.lo;
                tiles.series.ahead = weights.stride;
                if (i + 1 < fours.count || next >= 0) {
                    tiles.then = (i + 1 < fours.count ? tiles_of(i + 1, cut) : tiles_of(0, next)).series.first;
                }
                tile_rows(
                    down, tiles, hidden, begin, end,
                    [&](int row, int tile) {
                        return four.continues ? load_some(sum.pending + place(row, tile), count(tile)) : f_zero();
                    },
                    [&](int row, int tile, F y) {
                        float* const to = kept[row - begin][tile];
                        if (four.keeps) {
                            store_some(sum.pending + place(row, tile), y, count(tile));
                        } else {
                            f_store(to, f_add(f_load(to), y));
                        }
                    });
            }
            each([&](const float* from, std::ptrdiff_t at, int some) {
                store_some(sum.partial + at, f_load(from), some);
            });
        }
    });
}

bool ffn_many(Pool& pool, const FfnOp& op, std::size_t cost) {
    const Matrix& down = op.shape.down;
    const Granules& weights = op.weights;
    Zeros zeros = zeros_of(op);
    zeros.skips = false;  // with many rows, some row fires each granule
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(op.shape.first(), op.h, op.shape.width(), 1, op.t, op.exact, scratch)) return false;
    // Granules at a time: as many as scratch has room for hidden values of, but no more than stay in the L2 cache.
    constexpr int kMostHidden = 4096 * kHiddenRows;  // with fewer rows more neurons, so that threads meet less often
    const int neurons = kMostHidden / std::min(input.chunk(), kHiddenRows);
    // A block that ends within a four leaves that sum in `pending`, which an expert's call has not.
    const int per_four = sum_granules(op.shape.up.rows);
    const auto whole = [&](int granules) {
        if (granules >= weights.count) return weights.count;
        return granules > per_four ? granules / per_four * per_four : granules;
    };
    int block = whole(std::max(1, neurons / op.shape.up.rows));
    Prepared prepared;
    for (; block > 0; block = block > 1 ? whole(block / 2) : 0) {
        Scratch left = scratch;
        if (Prepared::plan(down, block, input.chunk(), op.exact, left, prepared)) break;
    }
    if (block == 0) return false;
    if (op.sum.pending == nullptr && block < weights.count && block % per_four != 0) return false;
    Pieces pieces(pool.threads());
    pool.run(cost, [&](const Team& team) {
        prefetch_run(weights.data + std::size_t(team.share(std::min(block, weights.count)).first) * weights.stride);
        for (int row0 = 0, phase = 0; row0 < op.t; row0 += input.chunk()) {
            const Rows x = input.chunk_at(team, row0);
            Rows hidden = prepared.rows;
            hidden.count = x.count;
            for (int begin = 0; begin < weights.count; begin += block) {
                const int end = std::min(begin + block, weights.count);
                if (begin > 0) team.barrier();  // all threads have used the hidden values of the block before
                pieces.share(team, phase++, end - begin, [&](int i, int next) {
                    const auto granule = [&](int nth) {
                        return weights.data + std::size_t(begin + nth) * weights.stride;
                    };
                    hidden_of(op.shape, granule(i), granule(std::max(i, next)), x, hidden, i,
                              zeros.at(row0, begin + i));
                });
                team.barrier();
                sum_columns(team, pieces, phase++, weights, down, hidden,
                            Fours(op.sum, op.shape, begin, end, weights.count), row0);
            }
        }
    });
    return true;
}

// The records of a decode batch are computed a few rows at a time, by `neurons_few`. It fetches the next active records
// while it multiplies others, and the next few rows find most of them in the caches.
bool neurons_some(Pool& pool, const FfnOp& op, std::size_t cost) {
    if (!op.shape.by_records() || op.active == nullptr || op.t > kSomeRows) return neurons_many(pool, op, cost);
    for (int row = 0; row < op.t; row += kFewRows) {
        FfnOp some = op;
        const std::ptrdiff_t before = std::ptrdiff_t(row) * op.shape.width();
        some.h += before, some.sum.partial += before, some.active += row * op.active_stride;
        if (some.sum.pending != nullptr) some.sum.pending += before;
        if (some.fired != nullptr) some.fired += row * op.fired_stride;
        some.t = std::min(kFewRows, op.t - row);
        if (!neurons_few(pool, some, cost)) return false;
    }
    return true;
}

bool ffn(Pool& pool, const FfnOp& op) {
    const FfnShape& shape = op.shape;
    const FfnSum& sum = op.sum;
    const bool in_two_steps = op.values != nullptr || op.biases != 0;
    if (shape.up.rows > (shape.down.by_row() ? kGranuleRows : kWidestRows)) return false;
    if (in_two_steps && (op.t > kFewRows || !shape.down.by_row())) return false;
    if (op.biases != 0 && !shape.by_records()) return false;
    const std::size_t down_bytes = shape.down.by_row() ? neuron_bytes(shape) : bytes_of(shape.down);
    const std::size_t in_tiles =
        shape.by_records() ? 0 : bytes_of(shape.first()) * (shape.gate.rows > 0 && !shape.up.by_row() ? 2 : 1);
    const std::size_t bytes = in_tiles + down_bytes;
    const std::size_t cost = cost_of(op.weights, bytes, op.t);
    const auto few = shape.down.by_row() ? neurons_few : ffn_few;
    const auto many = shape.down.by_row() ? neurons_some : ffn_many;
    if (!(op.t <= kFewRows ? few : many)(pool, op, cost)) return false;
    // If the only four of this call is left to the next call, this call adds nothing to partial, which starts as zeros.
    const Fours fours(sum, shape, 0, op.weights.count, op.weights.count);
    if (sum.starts_sum && fours.count == 1 && sum.keeps) {
        std::fill_n(sum.partial, std::size_t(op.t) * std::size_t(shape.width()), 0.0F);
    }
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
