// Products of neurons' rows with activations, and what is fetched meanwhile. Included after neuron-rows-inl.h.
//
// Rows lie apart, and the processor's own prefetcher finds none of them. A core keeps some 24 misses in flight. When a
// row of 36 lines was fetched at once, the core stood still at the 25th line, and then memory stood still while the
// core multiplied. So rows that are wanted later are listed, and with each line that is multiplied a few lines are
// fetched.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

// Runs of bytes that are read later, in the order in which they are wanted.
class Fetches {
  public:
    // If the list is full, the run is not fetched: it is read when it is wanted.
    void add(const std::uint8_t* from, std::size_t nbytes) {
        const auto at = reinterpret_cast<std::uintptr_t>(from);
        const int lines = static_cast<int>((at + nbytes + kLine - 1) / kLine - at / kLine);
        if (end_ - begin_ == kRuns || lines == 0) return;
        runs_[end_++ % kRuns] = {from - at % kLine, lines};
        left_ += lines;
    }
    // A neuron's row, its factors first: they are wanted before the codes, and lie behind them.
    void add_row(const Matrix& m, const std::uint8_t* row) {
        add(row + m.codes_bytes(), row_bytes(m) - m.codes_bytes());
        add(row, m.codes_bytes());
    }
    // From now on each step fetches as many lines as it takes to have all fetched after `steps` steps.
    void pace(int steps) { per_step_ = (left_ + steps - 1) / steps; }
    // The run at hand and what is left stay in registers meanwhile. Stored with each line, they made a chain of loads
    // and stores, on which a fifth of the samples of a product lay.
    [[gnu::always_inline]] void step() {
        int lines = std::min(per_step_, left_);
        left_ -= lines;
        while (lines > 0) {
            Run& run = runs_[begin_ % kRuns];
            const int some = std::min(lines, run.lines);
            const std::uint8_t* at = run.at;
            // Into the second cache: the first has little room beside activations.
            for (const std::uint8_t* const end = at + std::size_t(some) * kLine; at != end; at += kLine) {
                __builtin_prefetch(at, 0, 2);
            }
            lines -= some;
            if (some == run.lines) {
                ++begin_;
            } else {
                run.at = at, run.lines -= some;
            }
        }
    }
    void rest() {
        pace(1);
        step();
    }

  private:
    static constexpr unsigned kRuns = 256;
    static constexpr std::size_t kLine = 64;
    struct Run {
        const std::uint8_t* at;
        int lines;
    };
    Run runs_[kRuns];
    unsigned begin_ = 0, end_ = 0;
    int left_ = 0, per_step_ = 0;
};

// ---- integer weights: rows are brought into the order of tiles, and multiplied as tiles are -------------------------
//
// Rejected: to multiply a row of codes as floats. That took four to five times as long as the row's share of a tile's
// product by integers, and as long again for each further row of activations.

// So many columns of the rows of neurons are brought into a tile at a time. The tile then stays in the L1 cache beside
// the activations that it is multiplied with.
constexpr int kTurnedColumns = 1024;
static_assert(kTurnedColumns >= kMostGroup, "a group is turned at once");

// Some groups of 16 neurons' rows, as a tile.
class Turned {
  public:
    explicit Turned(const Matrix& m) : m_(m), groups_(std::max(1, std::min(m.groups(), kTurnedColumns / m.group))) {
        // All tiles have the same number of groups, since activations are found by the tile's number.
        while (m.groups() % groups_ != 0) --groups_;
    }
    int tiles() const { return m_.groups() / groups_; }
    // The matrix that a tile is of.
    Matrix matrix() const { return {kTileRows, groups_ * m_.group, m_.kind, m_.group}; }
    const std::uint8_t* data() const { return tile_; }
    // How many steps of fetching `set` makes for all tiles of the rows.
    int steps() const { return tiles() * groups_; }

    // Brings tile `nth` of the rows [16] here.
    void set(const std::uint8_t* const* rows, int nth, Fetches& fetches) {
        const bool int4 = m_.kind == Kind::kInt4;
        const std::size_t group_bytes = std::size_t(m_.group) / (int4 ? 2 : 1), tile_bytes = 16 * group_bytes + 64;
        for (int g = 0; g < groups_; ++g) {
            fetches.step();
            std::uint8_t* to = tile_ + std::size_t(g) * tile_bytes;
            const std::size_t from = std::size_t(nth * groups_ + g) * group_bytes;
            for (std::size_t byte = from; byte < from + group_bytes; byte += 16, to += 256) {
                if (byte >= m_.codes_bytes()) {  // a row ends within its last group
                    std::memset(to, 0, 256);
                    continue;
                }
                Line lines[4];
                turned(rows, byte, lines);
                if (int4) as_tile(lines);
                for (int j = 0; j < 4; ++j) l_store(to + 64 * j, lines[j]);
            }
        }
        const std::size_t scales = m_.codes_bytes(), minimums = scales + 2 * std::size_t(m_.groups());
        set_halves(rows, scales, nth, tile_ + tile_bytes - 64, tile_bytes);
        set_halves(rows, minimums, nth, tile_ + tile_bytes - 32, tile_bytes);
    }

  private:
    // A row has the first 16 of 32 columns in low nibbles, the others in high nibbles. A tile has columns 0 to 3 in low
    // nibbles, 4 to 7 in high ones, and so on.
    static void as_tile(Line (&x)[4]) {
        constexpr std::int32_t kLow = 0x0f0f0f0f, kHigh = ~kLow;
        const Line low[2] = {l_or(low_nibbles(x[0]), l_left(x[1], 4, kHigh)),
                             l_or(low_nibbles(x[2]), l_left(x[3], 4, kHigh))};
        const Line high[2] = {l_or(l_right(x[0], 4, kLow), l_right(x[1], 0, kHigh)),
                              l_or(l_right(x[2], 4, kLow), l_right(x[3], 0, kHigh))};
        x[0] = low[0], x[1] = low[1], x[2] = high[0], x[3] = high[1];
    }
    // Sets a float16 of each row for each group of tile `nth`: the scales or the minimums, which begin at byte `from`
    // of the rows. Those of one group go `apart` bytes behind those of the group before.
    void set_halves(const std::uint8_t* const* rows, std::size_t from, int nth, std::uint8_t* to, std::size_t apart) {
        constexpr int kAtOnce = 8;
        for (int g = 0; g < groups_; g += kAtOnce) {
            const int count = std::min(kAtOnce, groups_ - g);
            const std::size_t at = from + 2 * std::size_t(nth * groups_ + g);
            alignas(64) std::uint8_t padded[kTileRows][2 * kAtOnce];
            const std::uint8_t* some[kTileRows];
            for (int i = 0; i < kTileRows; ++i) {
                some[i] = rows[i] + at;
                if (count < kAtOnce) std::memcpy(padded[i], some[i], 2 * std::size_t(count)), some[i] = padded[i];
            }
            Line lines[4];
            turned(some, 0, lines);
            for (int j = 0; j < count; ++j) {
                alignas(64) std::uint32_t both[kTileRows];
                l_store(both, lines[j / 2]);
                std::uint16_t halves[kTileRows];
                for (int i = 0; i < kTileRows; ++i) halves[i] = static_cast<std::uint16_t>(both[i] >> (j % 2 * 16));
                std::memcpy(to + std::size_t(g + j) * apart, halves, sizeof halves);
            }
        }
    }

    const Matrix& m_;
    int groups_;
    alignas(64) std::uint8_t tile_[kTurnedColumns * kTileRows + kTurnedColumns / kLineColumns * 64];
};

// sums [end - lo, 16] = rows [lo, end) of x · 16 neurons' rows. The bits are those of a tile of these rows.
void dot_turned(const Matrix& m, const std::uint8_t* const* rows, const Rows& x, int lo, int end, Fetches& fetches,
                float (*sums)[kTileRows]) {
    Turned turned(m);
    const Matrix tile = turned.matrix();
    fetches.pace(turned.steps());
    for (int i = 0; i < turned.tiles(); ++i) {
        turned.set(rows, i, fetches);
        Tiles tiles{1, {turned.data(), 1, 0, 0}, i};
        tile_rows(
            tile, tiles, x, lo, end, [&](int row, int) { return i > 0 ? f_load(sums[row - lo]) : f_zero(); },
            [&](int row, int, F y) { f_store(sums[row - lo], y); });
    }
}

// Whether rows are brought into tiles and multiplied as integers: their activations are rounded.
inline bool by_turning(const Matrix& m, const Rows& x) { return m.quantised() && x.q != nullptr; }

// As `dot_listed`, but by `dot_turned`. x has at most kFewRows rows.
template <class RowOf, class To, class Done>
void dot_listed_turned(const Matrix& m, int count, int known, const RowOf& row_of, const Rows& x, Fetches& fetches,
                       const To& to, const Done& done) {
    float sums[kFewRows][kTileRows];
    for (int i = 0, coming = std::min(count, kTileRows); i < count; i += kTileRows) {
        const int n = std::min(kTileRows, count - i);
        for (; coming < std::min(known, i + n + kTileRows); ++coming) fetches.add_row(m, row_of(coming));
        const std::uint8_t* rows[kTileRows];
        for (int j = 0; j < kTileRows; ++j) rows[j] = row_of(i + std::min(j, n - 1));
        dot_turned(m, rows, x, 0, x.count, fetches, sums);
        for (int j = 0; j < n; ++j) {
            for (int row = 0; row < x.count; ++row) to(i + j, row, sums[row][j]);
            done(i + j);
        }
    }
}

// How many neurons' rows are multiplied at a time with n rows of activations: two if the registers hold the sums of
// both. For one neuron's sums are two chains of additions, each of which waits four cycles for the one before.
template <int n>
constexpr int kRowsTogether = 4 * n * (16 / kLanes) <= kRegisters * 3 / 4 ? 2 : 1;
constexpr int kRowsAhead = 2;  // while rows are multiplied, so many rows after them are fetched

// y[j][i] = row i of activations, x[i] [D] · row j of k neurons, for n rows of activations.
template <Kind kind, int n, int k>
void dot_row(const Matrix& m, const std::uint8_t* const* at, const float* const* x, Fetches& fetches, float (*y)[n]) {
    const auto readers = [&]<std::size_t... j>(std::index_sequence<j...>) {
        return std::array<NeuronRow<kind>, k>{NeuronRow<kind>(m, at[j])...};
    };
    auto rows = readers(std::make_index_sequence<k>());
    F even[k][n], odd[k][n];
    for (int j = 0; j < k; ++j) {
        for (int i = 0; i < n; ++i) even[j][i] = odd[j][i] = f_zero();
    }
    const int whole = m.cols / kLineColumns * kLineColumns;
    constexpr int kStep = NeuronRow<kind>::kStep, kColumns = kStep < 64 ? 64 / kStep * kLineColumns : kLineColumns;
    fetches.pace((m.cols + kColumns - 1) / kColumns);
    const auto enter = [&](int g) {
        for (std::size_t j = 0; j < k; ++j) rows[j].group(g);
    };
    walk<kind>(m, 0, whole, enter, [&](int c) {
        if (c % kColumns == 0) fetches.step();
        for (int j = 0; j < k; ++j) {
            F low, high;
            rows[std::size_t(j)].two(c, low, high);
            for (int i = 0; i < n; ++i) {
                even[j][i] = f_fma(low, f_load(x[i] + c), even[j][i]);
                odd[j][i] = f_fma(high, f_load(x[i] + c + 16), odd[j][i]);
            }
        }
    });
    walk<kind>(m, whole, m.cols, enter, [&](int c) {
        const int left = m.cols - c;
        if (c % kColumns == 0) fetches.step();
        for (int j = 0; j < k; ++j) {
            F low, high;
            rows[std::size_t(j)].two(c, low, high);
            for (int i = 0; i < n; ++i) {
                even[j][i] = f_fma(low, load_some(x[i] + c, left), even[j][i]);
                if (left > 16) odd[j][i] = f_fma(high, load_some(x[i] + c + 16, left - 16), odd[j][i]);
            }
        }
    });
    for (int j = 0; j < k; ++j) {
        for (int i = 0; i < n; ++i) y[j][i] = f_sum(f_add(even[j][i], odd[j][i]));
    }
}

// Calls to(j, i, x[i] · row `at[j]` of m) for k neurons and `count` rows of activations.
template <Kind kind, int k, class To>
void dot_rows(const Matrix& m, const std::uint8_t* const* at, const float* const* x, int count, Fetches& fetches,
              const To& to) {
    const auto some = [&]<int n>(int i) {
        constexpr int kAtATime = std::min(k, kRowsTogether<n>);
        for (int j = 0; j < k; j += kAtATime) {
            float y[kAtATime][n];
            dot_row<kind, n, kAtATime>(m, at + j, x + i, fetches, y);
            for (int of = 0; of < kAtATime; ++of) {
                for (int row = 0; row < n; ++row) to(j + of, i + row, y[of][row]);
            }
        }
        return n;
    };
    for (int i = 0; i < count;) {
        i += count - i >= 4   ? some.template operator()<4>(i)
             : count - i >= 2 ? some.template operator()<2>(i)
                              : some.template operator()<1>(i);
    }
}

// Multiplies the rows of `count` neurons of m with `t` rows of activations. row_of(i): where neuron i's row begins, for
// i below `known`, which may be more than `count`. Calls to(i, row, x[row] · neuron i's row) for each row of
// activations, then done(i). While a row is multiplied the next rows are fetched, up to `known`. The caller has added
// the first kRowsAhead rows to `fetches`.
template <Kind kind, class RowOf, class To, class Done>
void dot_listed(const Matrix& m, int count, int known, const RowOf& row_of, const float* const* x, int t,
                Fetches& fetches, const To& to, const Done& done) {
    for (int i = 0, n; i < count; i += n) {
        n = count - i >= 2 ? 2 : 1;
        for (int j = i + kRowsAhead; j < std::min(known, i + kRowsAhead + n); ++j) fetches.add_row(m, row_of(j));
        const std::uint8_t* const rows[2] = {row_of(i), row_of(i + n - 1)};
        const auto to_one = [&](int j, int row, float y) { to(i + j, row, y); };
        n == 2 ? dot_rows<kind, 2>(m, rows, x, t, fetches, to_one) : dot_rows<kind, 1>(m, rows, x, t, fetches, to_one);
        for (int j = i; j < i + n; ++j) done(j);
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
