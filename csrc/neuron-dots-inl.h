// Products of neurons' rows with activations, and what is fetched meanwhile. Included after neuron-rows-inl.h.
//
// Rows lie apart, and the processor's own prefetcher finds none of them. A core keeps some 24 misses in flight. Where a
// row of 36 lines was fetched at once it stood still at the 25th, and memory did after it. So rows that come later are
// listed, and a few lines of them are fetched with each line that is multiplied.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

// Runs of bytes that are read later, in the order in which they are wanted.
class Fetches {
  public:
    // Where there is no room, nothing is fetched: it is read when it is wanted.
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
    // From now on each step fetches so much that all is fetched after so many steps.
    void pace(int steps) { per_step_ = (left_ + steps - 1) / steps; }
    [[gnu::always_inline]] void step() {
        for (int i = std::min(per_step_, left_); i > 0; --i) {
            Run& run = runs_[begin_ % kRuns];
            // Into the second cache: the first has little room beside activations.
            __builtin_prefetch(run.at, 0, 2);
            run.at += kLine, --left_;
            if (--run.lines == 0) ++begin_;
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

// The most rows of neurons that are multiplied at a time with n rows of activations, as many as registers have room for
// the sums of. One row's sums are two chains of additions, each of which waits four cycles for the one before.
template <int n>
constexpr int kRowsTogether = 4 * n * (16 / kLanes) <= kRegisters * 3 / 4 ? 2 : 1;
constexpr int kRowsAhead = 2;  // rows after those that are multiplied, which are fetched meanwhile

// y [k][n] = x[i] [D] · k neurons' rows, for n rows of activations.
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

// The rows of m of some neurons [count]: row_of(i) is where neuron i's begins. Calls to(i, row, x[row] · its row) for
// `t` rows of activations, and done(i) after a neuron's. While a row is multiplied the next ones are fetched, of
// `known` that row_of has. The first kRowsAhead have been added to `fetches` before.
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
