// FFNs that lie neuron by neuron, of few rows: threads take fours as they come and compute the values of their neurons,
// then share the columns of the sum. Included after neuron-sums-inl.h.
//
// A sum for each four, which threads then added up, was a MiB of an FFN of 16,384 neurons and a row. It went from one
// core's cache to the other's and back, for 3 MB of records that are read.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

namespace penstock::PENSTOCK_ISA {
namespace {

// The neurons of a four that any row wants, in the order in which they lie.
struct Wanted {
    int count = 0, t = 0;
    std::int16_t* at = nullptr;  // granule of the four times kGranuleRows, plus neuron
    float* values = nullptr;     // [wanted neuron][row]

    static bool take_from(Scratch& scratch, int t, Wanted& to) {
        to.t = t;
        to.at = take<std::int16_t>(scratch, kFourNeurons);
        to.values = take<float>(scratch, std::size_t(kFourNeurons) * std::size_t(t));
        return to.values != nullptr;
    }
    float* of(int i) const { return values + std::ptrdiff_t(i) * t; }
    void add(int granule, int neuron) { at[count++] = static_cast<std::int16_t>(granule * kGranuleRows + neuron); }
};

// Where the rows of a four's wanted neurons are.
struct FourRows {
    const FfnOp& op;
    const Four& four;
    const Wanted& wanted;

    const std::uint8_t* granule(int g) const { return op.weights.data + std::size_t(four.lo + g) * op.weights.stride; }
    const std::uint8_t* row(const Matrix& m, int i) const {
        return row_at(m, granule(wanted.at[i] / kGranuleRows), wanted.at[i] % kGranuleRows);
    }
    float bias(std::size_t bias_at, int i) const {
        return bias_of(op.biased(four.lo + wanted.at[i] / kGranuleRows), bias_at, wanted.at[i] % kGranuleRows);
    }
};

// What a thread does about the fours whose values it computes. The four after one is known, so that its first bytes are
// fetched before.
class FewValues {
  public:
    FewValues(const FfnOp& op, const Rows& x) : op_(op), shape_(op.shape), x_(x), t_(x.count), zeros_(zeros_of(op)) {
        for (int row = 0; row < t_; ++row) h_[row] = op.h + std::ptrdiff_t(row) * shape_.width();
    }

    // Before the first four.
    void begin(const Four& four, Wanted& wanted) {
        if (!shape_.by_records()) return prefetch_run(FourRows{op_, four, wanted}.granule(0));
        list_active(four, wanted);
        for (int i = 0; i < std::min(wanted.count, kRowsAhead); ++i) fetch_first({op_, four, wanted}, i);
    }
    // Computes the values of a four. `next`: the one after it, or the same.
    void compute(const Four& four, Wanted& wanted, const Four& next, Wanted& next_wanted) {
        const FourRows rows{op_, four, wanted}, then{op_, next, next_wanted};
        if (shape_.by_records()) {
            if (&wanted != &next_wanted) list_active(next, next_wanted);
            fire_records(rows, wanted, then);
        } else {
            list_fired(rows, wanted, then.granule(0));
        }
        multiply(rows, wanted);
    }

  private:
    void fetch_first(const FourRows& rows, int i) { fetches_.add_row(shape_.first(), rows.row(shape_.first(), i)); }

    // Lists the neurons of a four that some row fires. Their activation is computed granule by granule, in tiles,
    // unless it is there. `next`: what is read afterwards.
    void list_fired(const FourRows& rows, Wanted& wanted, const std::uint8_t* next) {
        alignas(64) float computed[kFewRows * kGranuleRows];
        const Four& four = rows.four;
        wanted.count = 0;
        for (int g = 0; g < four.hi - four.lo; ++g) {
            const Zeros here = zeros_.at(0, four.lo + g);
            const float* fired = computed;
            bool any;
            if (op_.values != nullptr) {
                fired = op_.values + std::ptrdiff_t(four.lo + g) * t_ * kGranuleRows;
                any = !all_zero(fired, t_ * kGranuleRows);
                for (int row = 0; row < t_; ++row) here.note(row, fired + row * kGranuleRows, shape_.up.rows);
            } else {
                const std::uint8_t* const then = g + 1 < four.hi - four.lo ? rows.granule(g + 1) : next;
                any = fire(shape_, rows.granule(g), then, x_, 0, t_, here, computed);
            }
            if (!any && op_.skips) continue;
            for (int i = 0; i < shape_.up.rows; ++i) {
                float* const values = wanted.of(wanted.count);
                bool wants = !op_.skips;
                for (int row = 0; row < t_; ++row) {
                    values[row] = fired[row * kGranuleRows + i];
                    wants = wants || values[row] != 0.0F;
                }
                if (wants) wanted.add(g, i);
            }
        }
        if (shape_.gate.rows == 0) return;
        for (int i = 0; i < std::min(wanted.count, kRowsAhead); ++i)
            fetches_.add_row(shape_.up, rows.row(shape_.up, i));
    }

    // Lists the neurons of a four that are active in some row.
    void list_active(const Four& four, Wanted& wanted) {
        wanted.count = 0;
        const int neurons = shape_.up.rows;
        for (int g = 0; g < four.hi - four.lo; ++g) {
            const Zeros here = zeros_.at(0, four.lo + g);
            for (int row = 0; here.fired != nullptr && row < t_; ++row) {
                std::fill_n(here.fired + row * here.stride, neurons, std::uint8_t{0});
            }
            alignas(64) std::uint8_t active[kGranuleRows] = {};
            here.join_active(t_, neurons, active);
            for (int from = 0; from < neurons; from += 8) {  // of most eight none is active
                std::uint64_t any;
                std::memcpy(&any, active + from, sizeof any);
                for (int i = from; any != 0 && i < std::min(from + 8, neurons); ++i) {
                    if (active[i] != 0) wanted.add(g, i);
                }
            }
        }
    }

    // Computes the activations of the neurons that are listed, and leaves those in the list that fire. Of the list of
    // the four after it the first rows are fetched.
    void fire_records(const FourRows& rows, Wanted& wanted, const FourRows& then) {
        const Matrix& first = shape_.first();
        const int more = &then.wanted == &wanted ? 0 : std::min(then.wanted.count, kRowsAhead);
        by_kind(first, [&]<Kind kind>() {
            dot_listed<kind>(
                first, wanted.count, wanted.count + more,
                [&](int i) { return i < wanted.count ? rows.row(first, i) : then.row(first, i - wanted.count); }, h_,
                t_, fetches_,
                [&](int i, int row, float y) { wanted.of(i)[row] = y + rows.bias(shape_.first_bias(), i); },
                [&](int i) {
                    const auto fires = [&](float y) { return y > 0.0F || !is_relu(); };
                    if (shape_.gate.rows > 0 && std::any_of(wanted.of(i), wanted.of(i) + t_, fires)) {
                        fetches_.add_row(shape_.up, rows.row(shape_.up, i));
                    }
                });
        });
        const int numbers = wanted.count * t_;
        std::fill(wanted.values + numbers, wanted.values + up_to(numbers, kTileRows), 0.0F);
        activate(shape_.activation, wanted.values, nullptr, wanted.values, up_to(numbers, kTileRows));
        int kept = 0;
        for (int i = 0; i < wanted.count; ++i) {
            const int neuron = wanted.at[i] % kGranuleRows;
            const Zeros here = zeros_.at(0, rows.four.lo + wanted.at[i] / kGranuleRows);
            bool wants = !op_.skips;
            for (int row = 0; row < t_; ++row) {
                const float value = here.counts(row, neuron, wanted.of(i)[row]);
                wants = wants || value != 0.0F;
                if (here.fired != nullptr) here.fired[row * here.stride + neuron] = value != 0.0F;
                wanted.of(kept)[row] = value;
            }
            if (wants) wanted.at[kept++] = wanted.at[i];
        }
        wanted.count = kept;
    }
    bool is_relu() const { return shape_.activation == Activation::kRelu || shape_.activation == Activation::kRelu2; }

    // Multiplies what the neurons' activation gave with `up`, where that is a gate's.
    void multiply(const FourRows& rows, Wanted& wanted) {
        if (shape_.gate.rows == 0) return;
        const Matrix& up = shape_.up;
        by_kind(up, [&]<Kind kind>() {
            dot_listed<kind>(
                up, wanted.count, wanted.count, [&](int i) { return rows.row(up, i); }, h_, t_, fetches_,
                [&](int i, int row, float y) { wanted.of(i)[row] *= y + rows.bias(shape_.up_bias, i); }, [](int) {});
        });
    }

    const FfnOp& op_;
    const FfnShape& shape_;
    const Rows& x_;
    const int t_;
    const Zeros zeros_;
    const float* h_[kFewRows];
    Fetches fetches_;
};

constexpr int kFewColumns = 2048;  // columns that a thread adds neurons up for at a time, of few rows

// Adds up the neurons of fours [begin, begin + lists), for some columns.
class FewSums {
  public:
    FewSums(const FfnOp& op, const Fours& fours, int begin, const std::vector<Wanted>& lists, int count)
        : op_(op), down_(op.shape.down), fours_(fours), begin_(begin), count_(count), t_(op.t), lists_(lists) {}

    // Columns [lo, hi), at most kFewColumns. `lo`: a multiple of kSumColumns.
    void add(int lo, int hi) {
        alignas(64) float own[kFewRows * kFewColumns];
        const FfnSum& sum = op_.sum;
        const int d = op_.shape.width(), columns = hi - lo;
        lo_ = lo, hi_ = hi, coming_four_ = coming_ = 0;
        come(kTogether);
        for (int i = 0; i < count_; ++i) {
            const Four four = fours_.at(begin_ + i);
            const auto each_row = [&](const auto& run) {
                for (int row = 0; row < t_; ++row)
                    run(std::ptrdiff_t(row) * d + lo, own + std::ptrdiff_t(row) * columns);
            };
            each_row([&](std::ptrdiff_t at, float* to) {
                begin_sum(four.continues ? sum.pending + at : nullptr, std::size_t(columns), to);
            });
            const FourRows rows{op_, four, lists_[std::size_t(i)]};
            down_.kind == Kind::kInt4 && !op_.exact ? add_codes(rows, own) : add_floats(i, own);
            const bool starts = sum.starts_sum && begin_ + i == 0;
            each_row([&](std::ptrdiff_t at, const float* from) {
                if (four.keeps) {
                    std::copy_n(from, columns, sum.pending + at);
                } else {
                    add_to(sum.partial + at, from, columns, starts);
                }
            });
        }
    }

  private:
    // to [count] += from, or 0 + from where it `starts`.
    static void add_to(float* to, const float* from, int count, bool starts) {
        int c = 0;
        for (; c + kTileRows <= count; c += kTileRows) {
            f_store(to + c, f_add(starts ? f_zero() : f_load(to + c), f_load(from + c)));
        }
        const int left = count - c;
        if (left == 0) return;
        store_some(to + c, f_add(starts ? f_zero() : load_some(to + c, left), load_some(from + c, left)), left);
    }

    // Adds the next neurons of all lists to what is fetched: of their rows the columns at hand, factors first.
    void come(int neurons) {
        for (; neurons > 0 && coming_four_ < count_; ++coming_) {
            const Wanted& wanted = lists_[std::size_t(coming_four_)];
            if (coming_ >= wanted.count) {
                ++coming_four_, coming_ = -1;
                continue;
            }
            const Four four = fours_.at(begin_ + coming_four_);
            const std::uint8_t* const row = FourRows{op_, four, wanted}.row(down_, coming_);
            const std::size_t lines = std::size_t(up_to(down_.cols, kLineColumns) / kLineColumns);
            const std::size_t line_bytes = down_.codes_bytes() / lines;
            if (down_.quantised()) {
                const std::size_t from = std::size_t(lo_ / down_.group), end = std::size_t((hi_ - 1) / down_.group + 1);
                const std::uint8_t* const scales = row + down_.codes_bytes();
                fetches_.add(scales + 2 * from, 2 * (end - from));
                fetches_.add(scales + 2 * (std::size_t(down_.groups()) + from), 2 * (end - from));
            }
            const std::size_t from = std::size_t(lo_ / kLineColumns), end = std::size_t((hi_ - 1) / kLineColumns + 1);
            fetches_.add(row + from * line_bytes, (end - from) * line_bytes);
            --neurons;
        }
    }

    // own [t, columns] += the neurons of a four, granule by granule, by integer products.
    void add_codes(const FourRows& rows, float* own) {
        const Wanted& wanted = rows.wanted;
        const std::ptrdiff_t columns = hi_ - lo_;
        for (int from = 0, end; from < wanted.count; from = end) {
            const int g = wanted.at[from] / kGranuleRows;
            for (end = from; end < wanted.count && wanted.at[end] / kGranuleRows == g;) ++end;
            come(end - from);
            for (int row = 0; row < t_; row += kPair) {
                const bool two = row + 1 < t_;
                float* const to = own + row * columns;
                float* const sums[kPair] = {to, two ? to + columns : to};
                Some some;
                for (int i = from; i < end; ++i) {
                    const float first = wanted.of(i)[row], second = two ? wanted.of(i)[row + 1] : 0.0F;
                    if (!op_.skips || first != 0.0F || second != 0.0F) some.add(rows.row(down_, i), first, second);
                }
                two ? add_some<2>(down_, some, lo_, hi_, sums, true, &fetches_)
                    : add_some<1>(down_, some, lo_, hi_, sums, true, &fetches_);
            }
        }
    }

    // Row i of the lists from list `four` on, or null.
    const std::uint8_t* later(int four, int i) const {
        for (; four < count_; i -= lists_[std::size_t(four++)].count) {
            const Wanted& wanted = lists_[std::size_t(four)];
            if (i < wanted.count) return FourRows{op_, fours_.at(begin_ + four), wanted}.row(down_, i);
        }
        return nullptr;
    }

    // own [t, columns] += the neurons of list `four`, as floats.
    void add_floats(int four, float* own) {
        const Wanted& wanted = lists_[std::size_t(four)];
        by_kind(down_, [&]<Kind kind>() {
            const std::uint8_t *rows[kTogether], *next[kTogether];
            const float* values[kTogether];
            for (int i = 0; i < wanted.count;) {
                const int left = wanted.count - i;
                const int n = left >= 8 && t_ == 1 ? 8 : left >= 4 ? 4 : 1;
                for (int j = 0; j < n; ++j) {
                    rows[j] = later(four, i + j), values[j] = wanted.of(i + j);
                    next[j] = later(four, i + n + j);
                    if (next[j] == nullptr) next[j] = rows[j];
                }
                const auto add = [&]<bool one>() {
                    if constexpr (one) {
                        if (n == 8) return add_rows<kind, 8, one>(down_, rows, values, t_, lo_, hi_, own, next);
                    }
                    n == 4 ? add_rows<kind, 4, one>(down_, rows, values, t_, lo_, hi_, own, next)
                           : add_rows<kind, 1, one>(down_, rows, values, t_, lo_, hi_, own, next);
                };
                t_ == 1 ? add.template operator()<true>() : add.template operator()<false>();
                i += n;
            }
        });
    }

    const FfnOp& op_;
    const Matrix& down_;
    const Fours& fours_;
    const int begin_, count_, t_;
    const std::vector<Wanted>& lists_;
    int lo_ = 0, hi_ = 0, coming_four_ = 0, coming_ = 0;
    Fetches fetches_;
};

bool neurons_few(Pool& pool, const FfnOp& op, std::size_t cost) {
    const FfnShape& shape = op.shape;
    const Fours fours(op.sum, shape, 0, op.weights.count, op.weights.count);
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(shape.first(), op.h, shape.width(), 1, op.t, op.exact, scratch)) return false;
    std::vector<Wanted> lists;  // of as many fours at a time as scratch has room for
    for (Wanted one; static_cast<int>(lists.size()) < fours.count && Wanted::take_from(scratch, op.t, one);) {
        lists.push_back(one);
    }
    if (lists.empty()) return false;
    const int wave = static_cast<int>(lists.size());
    std::atomic<int> next{0};  // threads take fours as they come, so that others do more while one is held up
    pool.run(cost, [&](const Team& team) {
        const Rows x = input.chunk_at(team, 0);
        const int d = shape.width();
        const int step = std::min(kFewColumns, up_to((d + team.size() - 1) / team.size(), kSumColumns));
        FewValues values(op, x);
        for (int begin = 0; begin < fours.count; begin += wave) {
            const int end = std::min(begin + wave, fours.count);
            // Of the fours of the next wave none is taken before all have come here.
            const auto take_next = [&] { return std::min(end, next.fetch_add(1, std::memory_order_relaxed)); };
            const auto list_of = [&](int four) -> Wanted& { return lists[std::size_t(four - begin)]; };
            int mine = take_next();
            if (mine < end) values.begin(fours.at(mine), list_of(mine));
            for (int after; mine < end; mine = after) {
                after = take_next();
                const int then = after < end ? after : mine;
                values.compute(fours.at(mine), list_of(mine), fours.at(then), list_of(then));
            }
            team.barrier();
            if (team.id() == 0) next.store(end, std::memory_order_relaxed);
            FewSums sums(op, fours, begin, lists, end - begin);
            for (int lo = team.id() * step; lo < d; lo += team.size() * step) sums.add(lo, std::min(lo + step, d));
            if (end < fours.count) team.barrier();
        }
    });
    return true;
}

// What neurons' activation gives, for few rows: threads take granules as they come.
bool fire_neurons(Pool& pool, const FireOp& op) {
    if (op.t > kFewRows || op.shape.up.rows > kGranuleRows) return false;
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(op.shape.first(), op.h, op.shape.width(), 1, op.t, op.exact, scratch)) return false;
    std::atomic<int> next{0};
    pool.run(cost_of(op.weights, bytes_of(op.shape.first()), op.t), [&](const Team& team) {
        const Rows x = input.chunk_at(team, 0);
        const auto granule_at = [&](int g) { return op.weights.data + std::size_t(g) * op.weights.stride; };
        for (int g; (g = next.fetch_add(1, std::memory_order_relaxed)) < op.weights.count;) {
            float* const to = op.values + std::ptrdiff_t(g) * op.t * kGranuleRows;
            if (op.shape.up.rows < kGranuleRows) std::fill_n(to, op.t * kGranuleRows, 0.0F);
            fire(op.shape, granule_at(g), granule_at(std::min(g + 1, op.weights.count - 1)), x, 0, op.t, Zeros{}, to);
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
