// FFNs with experts, for one instruction set: the experts of each row, and the sum of their outputs. Included after
// ffn-inl.h and route-inl.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

namespace penstock::PENSTOCK_ISA {
namespace {

// Experts are shared out by fours where each thread gets so many: less would leave threads waiting for the last one.
constexpr int kFoursPerThread = 6;

// An expert of a call, and the rows that go to it.
struct Taken {
    const std::uint8_t* weights;
    std::vector<int> rows;     // in rising order
    std::vector<int> ranks;    // its rank among the experts of each of these rows
    std::vector<float> scale;  // the factor of each row's output
};

// The experts of a call that any row goes to, in the call's order. Reads T·A ids.
inline std::vector<Taken> taken(const ExpertsOp& op) {
    int most = 0;
    for (const int id : op.ids) most = std::max(most, id + 1);
    std::vector<int> place(static_cast<std::size_t>(most), -1);  // id → index in `chosen`
    std::vector<Taken> chosen;
    const int pairs = op.t * op.active;
    const std::int32_t* const ids = op.routes.ids();
    const float* const weights = op.routes.weights(op.t, op.active);
    for (int i = 0; i < pairs; ++i) {
        if (ids[i] >= 0 && ids[i] < most) place[std::size_t(ids[i])] = most;  // marks an expert that some row goes to
    }
    for (std::size_t i = 0; i < op.ids.size(); ++i) {
        int& at = place[std::size_t(op.ids[i])];
        if (at < 0) continue;
        at = static_cast<int>(chosen.size());
        chosen.push_back({op.weights[i], {}, {}, {}});
    }
    for (int i = 0; i < pairs; ++i) {
        if (ids[i] < 0 || ids[i] >= most) continue;
        const int at = place[std::size_t(ids[i])];
        if (at < 0 || at >= static_cast<int>(chosen.size())) continue;  // an expert of another call
        Taken& of = chosen[std::size_t(at)];
        of.rows.push_back(i / op.active);
        of.ranks.push_back(i % op.active);
        of.scale.push_back(weights[i]);
    }
    return chosen;
}

inline Granules granules_of(const ExpertsOp& op, const Taken& of) { return {of.weights, op.per_expert, op.stride}; }

// Takes 16 columns, from `column` on, of an expert's output for its nth row. They are added to partial, or stored for
// `combine`. Product and sum are rounded apart, never fused, so that both ways give the same number.
inline void deliver(const ExpertsOp& op, const Taken& of, int nth, int column, F y) {
    const int d = op.shape.down.rows, count = d - column;
    const auto row = std::ptrdiff_t(of.rows[std::size_t(nth)]);
    if (op.outputs != nullptr) {
        store_some(op.outputs + (row * op.active + of.ranks[std::size_t(nth)]) * d + column, y, count);
        return;
    }
    float* const partial = op.partial + row * d + column;
    store_some(partial, f_add(load_some(partial, count), f_mul(y, f_set(of.scale[std::size_t(nth)]))), count);
}

// total [n, D] = the sum over an expert's granules, for tiles [lo, hi) of its output: four by four, counted from its
// own first granule. `four` [n, D]: room. `hidden`: of all its granules. `next`: the bytes that are read after these,
// or null.
inline void sum_expert(const Granules& weights, const Matrix& down, int lo, int hi, const Rows& hidden, float* four,
                       float* total, const std::uint8_t* next) {
    const auto columns = [&](const auto& take) {
        for (int row = 0; row < hidden.count; ++row) {
            for (int tile = lo; tile < hi; ++tile) {
                const std::ptrdiff_t at = std::ptrdiff_t(row) * down.rows + tile * kTileRows;
                take(at, down.rows - tile * kTileRows);
            }
        }
    };
    const int per_four = sum_granules(down.cols);
    for (int g = 0; g < weights.count; ++g) {
        const bool begins = g % per_four == 0, ends = (g + 1) % per_four == 0 || g + 1 == weights.count;
        // Meanwhile the same tiles of the next granule arrive: what follows these tiles is another thread's.
        const std::size_t ahead = g + 1 < weights.count ? weights.stride : 0;
        if (ahead == 0 && next != nullptr) prefetch_run(next, std::size_t(hi - lo) * down.tile_bytes());
        short_tiles(down, weights.data + std::size_t(g) * weights.stride + down.offset, lo, hi, ahead, hidden, g,
                    begins ? nullptr : four, four);
        if (!ends) continue;
        columns([&](std::ptrdiff_t at, int count) {
            const F before = g < per_four ? f_zero() : load_some(total + at, count);
            store_some(total + at, f_add(before, load_some(four + at, count)), count);
        });
    }
}

// This thread's share of laying out an expert's rows.
inline void lay_out(const Team& team, const ExpertsOp& op, const Taken& of, const Rows& rows) {
    const int per_row = std::max(1, op.shape.up.groups());
    const auto [lo, hi] = team.share(rows.count * per_row);
    for (int k = lo; k < hi; ++k) {
        const float* from = op.h + std::ptrdiff_t(of.rows[std::size_t(k / per_row)]) * op.shape.up.cols;
        Prepared::put(rows, op.shape.up, k / per_row, 0, k % per_row, from);
    }
}

// The cost of so many experts, each with at most `rows` rows, as `Pool::run` wants it.
inline std::size_t experts_cost(const ExpertsOp& op, int experts, int rows) {
    const std::size_t bytes = bytes_of(op.shape.up) * (op.shape.gate.rows > 0 ? 2 : 1) + bytes_of(op.shape.down);
    return std::size_t(experts * op.per_expert) * bytes * std::size_t((rows + 3) / 4);
}

// Computes experts [begin, end) of `all`, each with at most kFewRows rows, in one run of the pool. First threads take
// granules of any of these experts as they come, for hidden values. Then they take parts of the output's columns, and
// add up all experts there. So the threads share the work of a single expert too. Returns false if scratch is too
// small.
bool experts_few(Pool& pool, const ExpertsOp& op, const std::vector<Taken>& all, int begin, int end, Scratch scratch) {
    struct Work {
        Prepared input, hidden;  // activations of the expert's rows, and hidden values of all its granules
        float *four, *total;     // [n, D] each
    };
    const Matrix& down = op.shape.down;
    const int count = end - begin;
    const bool same = op.t == 1;  // all experts have the same row, which is laid out once
    std::vector<Work> works(static_cast<std::size_t>(count));
    int most = 0;
    for (int i = 0; i < count; ++i) {
        Work& work = works[std::size_t(i)];
        const int n = static_cast<int>(all[std::size_t(begin + i)].rows.size());
        most = std::max(most, n);
        if (same && i > 0) {
            work.input = works[0].input;
        } else if (!Prepared::plan(op.shape.up, 1, n, op.exact, scratch, work.input)) {
            return false;
        }
        if (!Prepared::plan(down, op.per_expert, n, op.exact, scratch, work.hidden)) return false;
        work.four = take<float>(scratch, std::size_t(n) * std::size_t(down.rows));
        work.total = take<float>(scratch, std::size_t(n) * std::size_t(down.rows));
        if (work.four == nullptr || work.total == nullptr) return false;
    }
    // More parts of the columns than threads, so that others do more while one is held up; but no short ones.
    const int parts = std::clamp(2 * pool.threads(), 1, std::max(1, down.tiles() / 4));
    const int granules = count * op.per_expert;
    std::atomic<int> next_granule{0}, next_part{0};
    pool.run(experts_cost(op, count, most), [&](const Team& team) {
        const auto expert = [&](int i) { return granules_of(op, all[std::size_t(begin + i)]); };
        const auto granule_at = [&](int nth) {
            return expert(nth / op.per_expert).data + std::size_t(nth % op.per_expert) * op.stride;
        };
        const auto tile_of = [&](int part) { return static_cast<int>(std::int64_t(down.tiles()) * part / parts); };
        const auto down_at = [&](int i, int tile) {
            return expert(i).data + down.offset + std::size_t(tile) * down.tile_bytes();
        };
        int mine = next_granule.fetch_add(1, std::memory_order_relaxed);
        if (mine < granules) prefetch_run(granule_at(mine));
        for (int i = 0; i < (same ? 1 : count); ++i) {
            lay_out(team, op, all[std::size_t(begin + i)], works[std::size_t(i)].input.rows);
        }
        team.barrier();
        while (mine < granules) {
            const int after = next_granule.fetch_add(1, std::memory_order_relaxed);
            const Work& work = works[std::size_t(mine / op.per_expert)];
            const std::uint8_t* const granule = granule_at(mine);
            hidden_of(op.shape, granule, after < granules ? granule_at(after) : granule, work.input.rows,
                      work.hidden.rows, mine % op.per_expert);
            mine = after;
        }
        const auto take_part = [&] {
            const int part = next_part.fetch_add(1, std::memory_order_relaxed);
            if (part < parts) prefetch_run(down_at(0, tile_of(part)));
            return part;
        };
        mine = take_part();
        team.barrier();
        for (; mine < parts; mine = take_part()) {
            const int lo = tile_of(mine), hi = tile_of(mine + 1);
            for (int i = 0; i < count; ++i) {
                const Work& work = works[std::size_t(i)];
                sum_expert(expert(i), down, lo, hi, work.hidden.rows, work.four, work.total,
                           i + 1 < count ? down_at(i + 1, lo) : nullptr);
                for (int row = 0; row < work.hidden.rows.count; ++row) {
                    for (int tile = lo; tile < hi; ++tile) {
                        const int column = tile * kTileRows;
                        const float* from = work.total + std::ptrdiff_t(row) * down.rows + column;
                        deliver(op, all[std::size_t(begin + i)], row, column, load_some(from, down.rows - column));
                    }
                }
            }
        }
    });
    return true;
}

// Computes experts [begin, end) of `all`, each with at most kFewRows rows, in one run of the pool. Threads take fours
// of granules as they come, as in ffn_few: a thread reads a four in one run of bytes (one row on Ice Lake: 0.90 of the
// RAM's speed, against 0.85 by experts_few). Returns false if scratch is too small, or if there are too few fours to be
// shared evenly.
bool experts_by_fours(Pool& pool, const ExpertsOp& op, const std::vector<Taken>& all, int begin, int end,
                      Scratch scratch) {
    struct Work {
        Prepared input;  // activations of the expert's rows
        float* sums;     // [fours, n, D]
        int n;
    };
    const int count = end - begin, per_four = sum_granules(op.shape.up.rows);
    const int fours = (op.per_expert + per_four - 1) / per_four, units = count * fours;
    if (units < kFoursPerThread * pool.threads()) return false;
    const Matrix& down = op.shape.down;
    const bool same = op.t == 1;  // all experts have the same row, which is laid out once
    std::vector<Work> works(static_cast<std::size_t>(count));
    int most = 0;
    for (int i = 0; i < count; ++i) {
        Work& work = works[std::size_t(i)];
        work.n = static_cast<int>(all[std::size_t(begin + i)].rows.size());
        most = std::max(most, work.n);
        if (same && i > 0) {
            work.input = works[0].input;
        } else if (!Prepared::plan(op.shape.up, 1, work.n, op.exact, scratch, work.input)) {
            return false;
        }
        work.sums = take<float>(scratch, std::size_t(fours * work.n) * std::size_t(down.rows));
        if (work.sums == nullptr) return false;
    }
    // Hidden values of a granule, for each thread. Not one for all: experts have different numbers of rows.
    std::vector<Prepared> hidden(static_cast<std::size_t>(pool.threads()));
    for (Prepared& one : hidden) {
        if (!Prepared::plan(down, 1, most, op.exact, scratch, one)) return false;
    }
    std::atomic<int> next{0};
    pool.run(experts_cost(op, count, most), [&](const Team& team) {
        const auto expert = [&](int i) { return granules_of(op, all[std::size_t(begin + i)]); };
        const auto take_next = [&] {
            const int unit = next.fetch_add(1, std::memory_order_relaxed);
            if (unit < units) {
                prefetch_run(expert(unit / fours).data + std::size_t(unit % fours) * std::size_t(per_four) * op.stride);
            }
            return unit;
        };
        int mine = take_next();
        for (int i = 0; i < (same ? 1 : count); ++i) {
            lay_out(team, op, all[std::size_t(begin + i)], works[std::size_t(i)].input.rows);
        }
        team.barrier();
        for (; mine < units; mine = take_next()) {
            const Work& work = works[std::size_t(mine / fours)];
            const int four = mine % fours, lo = four * per_four;
            Rows rows = hidden[std::size_t(team.id())].rows;
            rows.count = work.n;
            sum_four(expert(mine / fours), op.shape, work.input.rows, rows, 0,
                     {lo, std::min(lo + per_four, op.per_expert), false, false}, nullptr,
                     work.sums + std::ptrdiff_t(four * work.n) * down.rows);
        }
        team.barrier();
        const auto [lo, hi] = team.share(down.tiles());
        for (int i = 0; i < count; ++i) {
            const Work& work = works[std::size_t(i)];
            for (int row = 0; row < work.n; ++row) {
                for (int tile = lo; tile < hi; ++tile) {
                    const int column = tile * kTileRows;
                    F total = f_zero();
                    for (int four = 0; four < fours; ++four) {
                        const float* from = work.sums + std::ptrdiff_t(four * work.n + row) * down.rows + column;
                        total = f_add(total, load_some(from, down.rows - column));
                    }
                    deliver(op, all[std::size_t(begin + i)], row, column, total);
                }
            }
        }
    });
    return true;
}

// Computes one expert with any number of rows: gathers its rows, runs the FFN on them, and adds its output.
bool expert_alone(Pool& pool, const ExpertsOp& op, const Taken& of, Scratch scratch) {
    const int n = static_cast<int>(of.rows.size()), d = op.shape.down.rows, columns = op.shape.up.cols;
    auto* x = take<float>(scratch, std::size_t(n) * std::size_t(columns));
    auto* y = take<float>(scratch, std::size_t(n) * std::size_t(d));
    if (x == nullptr || y == nullptr) return false;
    for (int row = 0; row < n; ++row) {
        std::copy_n(op.h + std::ptrdiff_t(of.rows[std::size_t(row)]) * columns, columns,
                    x + std::ptrdiff_t(row) * columns);
    }
    const FfnSum sum{y, nullptr, 0, true, false, false};
    if (!ffn(pool, {granules_of(op, of), op.shape, x, n, sum, op.exact, scratch})) return false;
    for (int row = 0; row < n; ++row) {
        for (int column = 0; column < d; column += kTileRows) {
            deliver(op, of, row, column, load_some(y + std::ptrdiff_t(row) * d + column, d - column));
        }
    }
    return true;
}

bool combine(Pool&, const CombineOp& op) {
    const float* const weights = op.routes.weights(op.t, op.active);
    for (int row = 0; row < op.t; ++row) {
        float* const partial = op.partial + std::ptrdiff_t(row) * op.d;
        for (int column = 0; column < op.d; column += kTileRows) {
            const int count = op.d - column;
            F y = op.starts_sum ? f_zero() : load_some(partial + column, count);
            for (int i = 0; i < op.active; ++i) {
                const std::ptrdiff_t pair = std::ptrdiff_t(row) * op.active + i;
                y = f_add(y, f_mul(load_some(op.outputs + pair * op.d + column, count), f_set(weights[pair])));
            }
            store_some(partial + column, y, count);
        }
    }
    return true;
}

bool gate(Pool&, const GateOp& op) {
    const float* const shared = op.routes.shared(op.t, op.active);
    for (int row = 0; row < op.t; ++row) {
        float* const partial = op.partial + std::ptrdiff_t(row) * op.d;
        for (int i = 0; i < op.d; ++i) partial[i] *= shared[row];
    }
    return true;
}

bool experts(Pool& pool, const ExpertsOp& op) {
    const int d = op.shape.down.rows, t = op.t;
    if (op.shape.up.rows > kWidestRows) return false;
    const std::vector<Taken> all = taken(op);
    if (op.starts_sum && op.outputs == nullptr) std::fill_n(op.partial, std::size_t(t) * std::size_t(d), 0.0F);
    const int count = static_cast<int>(all.size());
    const auto few = [&](int i) { return all[std::size_t(i)].rows.size() <= std::size_t(kFewRows); };
    for (int begin = 0; begin < count;) {
        // As many neighbouring experts with few rows as there is scratch for; else one expert by itself.
        int end = begin;
        while (end < count && few(end)) ++end;
        const auto done = [&] {
            return experts_by_fours(pool, op, all, begin, end, op.scratch) ||
                   experts_few(pool, op, all, begin, end, op.scratch);
        };
        while (end > begin && !done()) end = begin + (end - begin) / 2;
        if (end == begin && !expert_alone(pool, op, all[std::size_t(end++)], op.scratch)) return false;
        begin = end;
    }
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
