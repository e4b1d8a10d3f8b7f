// The ops for one instruction set: included once per translation unit, after its simd header.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "activation-inl.h"
#include "kernels.h"
#include "tile-inl.h"

namespace penstock::PENSTOCK_ISA {
namespace {

template <class T>
T* take(Scratch& scratch, std::size_t count) {
    const std::size_t nbytes = (count * sizeof(T) + 63) / 64 * 64;
    if (nbytes > scratch.nbytes) return nullptr;
    auto* found = reinterpret_cast<T*>(scratch.data);
    scratch.data += nbytes;
    scratch.nbytes -= nbytes;
    return found;
}

void store_some(float* to, F x, int count) {
    if (count >= kTileRows) {
        f_store(to, x);
        return;
    }
    float lanes[kTileRows];
    f_store(lanes, x);
    for (int i = 0; i < count; ++i) to[i] = lanes[i];
}

// The first `count` of 16, the others 0.
F load_some(const float* from, int count) {
    if (count >= kTileRows) return f_load(from);
    float lanes[kTileRows] = {};
    for (int i = 0; i < count; ++i) lanes[i] = from[i];
    return f_load(lanes);
}

// ---- activations of a call -----------------------------------------------------------------------------------------

constexpr int kMostGroup = 1024;  // make_matrix refuses more
constexpr int kGranuleRows = 64;  // neurons of a granule, at most
constexpr int kHiddenRows = 48;   // rows whose hidden values of a granule a thread holds at a time: 24 KB
static_assert(kHiddenRows % kWideRows == 0, "whole panels");

// One group of a row as int8 with scale = max / 127, and the sum of what that stands for.
void round_group(const float* from, int count, int group, std::int8_t* q, float* scale, float* sum) {
    I most_bits = i_zero();
    for (int i = 0; i < count; i += 16) most_bits = i_max(most_bits, i_magnitude(load_some(from + i, count - i)));
    const std::int32_t bits = i_max_of(most_bits);
    float most;
    std::memcpy(&most, &bits, 4);
    const F up = f_set(most > 0 && bits < 0x7f800000 ? 127.0F / most : 0.0F);
    I total = i_zero();
    for (int i = 0; i < group; i += 16) {
        const I codes = i < count ? i_round(f_mul(load_some(from + i, count - i), up)) : i_zero();
        i_store_bytes(q + i, codes);
        total = i_add(total, codes);
    }
    // NaN and infinite activations stay visible in the scale: damaged weights must not pass for zeros.
    *scale = most / 127.0F;
    *sum = *scale * static_cast<float>(i_sum(total));
}

// Memory for the activations that weights of one or more granules are multiplied with.
struct Prepared {
    Rows rows;

    // Room for `count` rows, `granules` granules of m.cols columns each. False: scratch is too small.
    static bool plan(const Matrix& m, int granules, int count, bool exact, Scratch& scratch, Prepared& to) {
        const std::size_t groups = std::size_t(m.groups()) * std::size_t(granules), n = std::size_t(count);
        const std::size_t width = m.quantised() ? groups * std::size_t(m.group) : std::size_t(m.cols * granules);
        Rows& rows = to.rows;
        rows = Rows{.width = std::ptrdiff_t(width), .groups = std::ptrdiff_t(groups), .count = count};
        if (m.quantised() && !exact) {
            rows.q = take<std::int8_t>(scratch, n * width);
            rows.scale = take<float>(scratch, n * groups);
        } else {
            rows.f = take<float>(scratch, n * width);
        }
        if (m.quantised()) rows.sum = take<float>(scratch, n * groups);
        return (rows.f != nullptr || (rows.q != nullptr && rows.scale != nullptr)) &&
               (rows.sum != nullptr || !m.quantised());
    }

    // Lays out group j of a granule's columns `from` of one row; of float weights, which know no groups, all columns.
    static void put(const Rows& rows, const Matrix& m, int row, int granule, int j, const float* from) {
        const Panel panel = panel_of(row, rows.count);
        const int n = panel.n, r = row - panel.row;
        if (!m.quantised()) {
            float* to = rows.f + panel.row * rows.width + std::ptrdiff_t(granule) * m.cols * n + r;
            for (int i = 0; i < m.cols; ++i) to[std::ptrdiff_t(i) * n] = from[i];
            return;
        }
        const int at = granule * m.groups() + j, count = std::min(m.group, m.cols - j * m.group);
        const std::ptrdiff_t first = panel.row * rows.width + std::ptrdiff_t(at) * m.group * n;
        const std::ptrdiff_t place = panel.row * rows.groups + std::ptrdiff_t(at) * n + r;
        from += j * m.group;
        if (rows.f != nullptr) {
            float total = 0;
            float* to = rows.f + first + r;
            for (int i = 0; i < m.group; ++i) to[std::ptrdiff_t(i) * n] = i < count ? from[i] : 0.0F;
            for (int i = 0; i < count; ++i) total += from[i];
            rows.sum[place] = total;
            return;
        }
        alignas(64) std::int8_t codes[kMostGroup + 16];
        round_group(from, count, m.group, codes, rows.scale + place, rows.sum + place);
        std::int8_t* to = rows.q + first + r * 4;
        for (int i = 0; i < m.group; i += 4) std::memcpy(to + std::ptrdiff_t(i) * n, codes + i, 4);
    }
};

// What a call multiplies, some rows at a time: those whose activations stay in a core's L2 cache while the weights go
// by.
class Input {
  public:
    bool plan(const Matrix& m, const float* x, std::ptrdiff_t x_stride, int granules, int t, bool exact,
              Scratch& scratch) {
        m_ = m, x_ = x, x_stride_ = x_stride, granules_ = granules, t_ = t;
        const std::size_t item = m.quantised() && !exact ? 1 : 4;
        chunk_ = static_cast<int>(kChunkBytes / (std::size_t(m.cols) * std::size_t(granules) * item));
        chunk_ = std::min(t, std::max(1, chunk_ / kHiddenRows) * kHiddenRows);
        return Prepared::plan(m, granules, chunk_, exact, scratch, prepared_);
    }

    int chunk() const { return chunk_; }

    // The rows from `row` on, at most a chunk, laid out. All threads share the work and wait for each other.
    Rows chunk_at(const Team& team, int row) const {
        if (row > 0) team.barrier();  // the rows before are used up
        Rows rows = prepared_.rows;
        rows.count = std::min(chunk_, t_ - row);
        const int per_granule = std::max(1, m_.groups()), per_row = per_granule * granules_;
        const auto [first, last] = team.share(rows.count * per_row);
        for (int i = first; i < last; ++i) {
            const int r = i / per_row, at = i % per_row, granule = at / per_granule;
            const float* from = x_ + (row + r) * x_stride_ + std::ptrdiff_t(granule) * m_.cols;
            Prepared::put(rows, m_, r, granule, at % per_granule, from);
        }
        team.barrier();
        return rows;
    }

    static constexpr std::size_t kChunkBytes = std::size_t{512} << 10;  // half of an L2 cache

  private:
    Matrix m_;
    const float* x_ = nullptr;
    std::ptrdiff_t x_stride_ = 0;
    int granules_ = 0, t_ = 0, chunk_ = 0;
    Prepared prepared_;
};

// What a call walks through, in bytes; arithmetic counts from four rows on.
std::size_t cost_of(const Granules& weights, std::size_t bytes_per_granule, int t) {
    return std::size_t(weights.count) * bytes_per_granule * std::size_t((t + 3) / 4);
}
std::size_t bytes_of(const Matrix& m) { return std::size_t(m.tiles()) * m.tile_bytes(); }

// How a matrix is cut into tiles that are multiplied together. Many rows share a broadcast between kWideTiles. For few
// rows what counts is that bytes come in the order in which they lie: one tile after the other, unless tiles are so
// short that starting and ending them is most of the work.
struct Cuts {
    int tiles, width, per_granule;
    Cuts(const Matrix& m, int rows)
        : tiles(m.tiles()),
          width(rows > kFewRows         ? kWideTiles
                : m.tile_bytes() > 2048 ? 1
                                        : kMostTiles),
          per_granule((tiles + width - 1) / width) {}
    int granule(int cut) const { return cut / per_granule; }
    int tile(int cut) const { return cut % per_granule * width; }
    Tiles tiles_of(const Granules& weights, const Matrix& m, int cut) const {
        return {std::min(width, tiles - tile(cut)),
                {weights.data + std::size_t(granule(cut)) * weights.stride + m.offset +
                     std::size_t(tile(cut)) * m.tile_bytes(),
                 1, weights.stride}};
    }
};

constexpr auto nothing = [](int, int) { return f_zero(); };  // where a sum starts

// ---- ops -----------------------------------------------------------------------------------------------------------

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

bool project(Pool& pool, const Granules& weights, const Matrix& m, const float* x, std::ptrdiff_t x_stride, int t,
             float* out, std::ptrdiff_t out_stride, int out_cols, bool exact, Scratch scratch) {
    return multiply(pool, weights, m, x, x_stride, t, out_cols, exact, scratch,
                    [&](const Team&, int row, int column, F y, int count) {
                        store_some(out + row * out_stride + column, y, count);
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

bool head(Pool& pool, const Granules& weights, const Matrix& m, const float* h, std::ptrdiff_t h_stride, int t,
          float* logits, std::ptrdiff_t stride, int out_cols, float softcap, int first_token, Best* best, bool exact,
          Scratch scratch) {
    std::vector<Best> each;  // [threads][T]; a thread's own, so that none waits for another
    for (int i = 0; best != nullptr && i < pool.threads(); ++i) each.insert(each.end(), best, best + t);
    const bool done = multiply(pool, weights, m, h, h_stride, t, out_cols, exact, scratch,
                               [&](const Team& team, int row, int column, F y, int count) {
                                   if (softcap > 0) y = f_mul(f_tanh(f_mul(y, f_set(1.0F / softcap))), f_set(softcap));
                                   store_some(logits + row * stride + column, y, count);
                                   if (best != nullptr)
                                       follow(each[std::size_t(team.id() * t + row)], y, count, first_token + column);
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
    // A thread's run of a granule is short (18 KB of 8B's, two threads), so what lies kAhead further on is often not
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

bool accumulate(Pool& pool, const Granules& weights, const Matrix& m, const float* x, std::ptrdiff_t x_stride, int t,
                float* sum, bool first, bool exact, Scratch scratch) {
    Input input;
    if (!input.plan(m, x, x_stride, weights.count, t, exact, scratch)) return false;
    pool.run(cost_of(weights, bytes_of(m), t), [&](const Team& team) {
        prefetch_run(first_tile(team, weights, m, input.chunk()));
        for (int row0 = 0; row0 < t; row0 += input.chunk()) {
            accumulate_share(team, weights, m, input.chunk_at(team, row0), sum + std::ptrdiff_t(row0) * m.rows, first);
        }
    });
    return true;
}

// Hidden values of one granule: act(gate h) * up h, laid out for `down` as granule `nth` of `to`.
void hidden_of(const FfnShape& shape, const std::uint8_t* granule, const std::uint8_t* next, const Rows& h,
               const Rows& to, int nth) {
    alignas(64) float values[kHiddenRows * kGranuleRows], gates[kHiddenRows * kGranuleRows];
    const bool gated = shape.gate.rows > 0;
    const int groups = std::max(1, shape.down.groups());
    for (int row0 = 0; row0 < h.count; row0 += kHiddenRows) {
        const int end = std::min(row0 + kHiddenRows, h.count);
        const auto fill = [&](const Matrix& m, std::size_t bias, float* out) {
            const Cuts cuts(m, h.count);
            for (int cut = 0; cut < cuts.per_granule; ++cut) {
                const auto sink = [&](int row, int tile, F y) {
                    const int at = (cuts.tile(cut) + tile) * kTileRows;
                    if (bias != 0) {
                        y = f_add(y, load_some(reinterpret_cast<const float*>(granule + bias) + at, m.rows - at));
                    }
                    f_store(out + (row - row0) * kGranuleRows + at, y);
                };
                tile_rows(m, cuts.tiles_of({granule, 1, 0}, m, cut), h, row0, end, nothing, sink);
            }
        };
        if (gated) fill(shape.gate, shape.gate_bias, gates);
        fill(shape.up, shape.up_bias, values);
        prefetch_run(next);  // comes in during the arithmetic below, which reads nothing
        for (int row = row0; row < end; ++row) {
            float* x = values + (row - row0) * kGranuleRows;
            const float* gate = gated ? gates + (row - row0) * kGranuleRows : x;
            activate(shape.activation, gate, gated ? x : nullptr, x, shape.up.rows);
            for (int j = 0; j < groups; ++j) Prepared::put(to, shape.down, row, nth, j, x);
        }
    }
}

bool ffn(Pool& pool, const Granules& weights, const FfnShape& shape, const float* h, int t, float* partial, bool first,
         bool exact, Scratch scratch) {
    const Matrix &up = shape.up, &down = shape.down;
    if (up.rows > kGranuleRows) return false;
    Input input;
    if (!input.plan(up, h, up.cols, 1, t, exact, scratch)) return false;
    // As many granules at a time as the scratch holds hidden values of; with many rows no more than the L2 cache does.
    const int most = 64;
    int block = std::min(weights.count, most);
    Prepared prepared;
    for (; block > 0; block = block > 1 ? block / 2 : 0) {
        Scratch left = scratch;
        if (Prepared::plan(down, block, input.chunk(), exact, left, prepared)) break;
    }
    if (block == 0) return false;
    pool.run(cost_of(weights, bytes_of(up) * (shape.gate.rows > 0 ? 2 : 1) + bytes_of(down), t), [&](const Team& team) {
        prefetch_run(weights.data + std::size_t(team.share(std::min(block, weights.count)).first) * weights.stride);
        for (int row0 = 0; row0 < t; row0 += input.chunk()) {
            const Rows x = input.chunk_at(team, row0);
            Rows hidden = prepared.rows;
            hidden.count = x.count;
            for (int begin = 0; begin < weights.count; begin += block) {
                const int granules = std::min(block, weights.count - begin);
                const std::uint8_t* base = weights.data + std::size_t(begin) * weights.stride;
                if (begin > 0) team.barrier();  // hidden values of the block before are used up
                const auto [lo, hi] = team.share(granules);
                for (int i = lo; i < hi; ++i) {
                    const std::uint8_t* granule = base + std::size_t(i) * weights.stride;
                    hidden_of(shape, granule, granule + (i + 1 < hi ? weights.stride : 0), x, hidden, i);
                }
                prefetch_run(first_tile(team, {base, granules, weights.stride}, down, hidden.count));
                team.barrier();
                accumulate_share(team, {base, granules, weights.stride}, down, hidden,
                                 partial + std::ptrdiff_t(row0) * down.rows, first && begin == 0);
            }
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
