// FFNs that lie neuron by neuron, of few rows: threads take fours as they come and compute the values of their neurons,
// then share the columns of the sum. Included after neurons-listed-inl.h.
//
// Rejected: a sum for each four, which the threads then add up. In an FFN of 16,384 neurons these sums are 1 MiB for
// each row. They crossed from one core's cache to the other's and back, while only 3 MB of records are read.
// The exception is a single row whose activation is computed in tiles: see `row_by_fours`.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

namespace penstock::PENSTOCK_ISA {
namespace {

// A thread adds neurons up for at most so many columns times rows at a time.
constexpr int kFewSums = 2048 * kFewRows;

// The columns that each of some threads adds neurons up for at a time, of d. As many as may be: a neuron's codes are
// read one after the other. With half of 4,096 columns at a time, of a single row, rows of int4 took 1.3 times as long.
inline int few_columns(int d, int t, int threads) {
    const int most = threads * std::min(kWindow, kFewSums / t / kSumColumns * kSumColumns);
    const int turns = threads * ((d + most - 1) / most);
    return up_to((d + turns - 1) / turns, kSumColumns);
}

// Adds up the neurons of fours [begin, begin + count), for some columns. `lists` [count]: the wanted neurons of each
// four. `one`: for a single four of a single row, where its sum goes. Null: sums are added to the op's `partial`.
class FewSums {
  public:
    FewSums(const FfnOp& op, const Fours& fours, int begin, const Wanted* lists, int count, float* one = nullptr)
        : op_(op),
          down_(op.shape.down),
          fours_(fours),
          begin_(begin),
          count_(count),
          t_(op.t),
          lists_(lists),
          one_(one) {}

    // Columns [lo, hi), at most `few_columns`. `lo`: a multiple of kSumColumns.
    void add(int lo, int hi) {
        alignas(64) float buffer[kFewSums];
        lo_ = lo, hi_ = hi, coming_ = coming_factors_ = {};
        if (count_ > 0 && lists_[0].count > 0) come_factors(granule_end(lists_[0], 0), false);  // wanted at once
        come(kTogether);
        for (int i = 0; i < count_; ++i) {
            const bool by_codes = down_.kind == Kind::kInt4 && !op_.exact && !(op_.skips && all_few(lists_[i]));
            if (!by_codes) come(lists_[i].count, false), come_factors(lists_[i].count, false);
            // The sums of several rows would lie 8 KB apart, in the same sets of the L1 cache. So fewer columns at a
            // time.
            const int step = by_codes || t_ == 1 ? hi - lo : kSumColumns;
            for (lo_ = lo; lo_ < hi; lo_ = hi_) {
                hi_ = std::min(lo_ + step, hi);
                add_four(i, by_codes, one_ != nullptr ? one_ + lo_ : buffer);
            }
        }
    }

  private:
    // Adds up the neurons of a four in `own` [t, columns at hand], and then adds `own` to the op's sum.
    void add_four(int i, bool by_codes, float* own) {
        const FfnSum& sum = op_.sum;
        const int d = op_.shape.width(), columns = hi_ - lo_;
        const Four four = fours_.at(begin_ + i);
        const auto each_row = [&](const auto& run) {
            for (int row = 0; row < t_; ++row) run(std::ptrdiff_t(row) * d + lo_, own + std::ptrdiff_t(row) * columns);
        };
        each_row([&](std::ptrdiff_t at, float* to) {
            begin_sum(four.continues ? sum.pending + at : nullptr, std::size_t(columns), to);
        });
        by_codes ? add_codes({op_, four, lists_[i]}, own) : add_floats(i, own);
        if (one_ != nullptr) return;
        const bool starts = sum.starts_sum && begin_ + i == 0;
        each_row([&](std::ptrdiff_t at, const float* from) {
            if (four.keeps) {
                std::copy_n(from, columns, sum.pending + at);
            } else {
                add_to(sum.partial + at, from, columns, starts);
            }
        });
    }

    // to [count] += from. `starts`: to [count] = 0 + from.
    static void add_to(float* to, const float* from, int count, bool starts) {
        int c = 0;
        for (; c + kTileRows <= count; c += kTileRows) {
            f_store(to + c, f_add(starts ? f_zero() : f_load(to + c), f_load(from + c)));
        }
        const int left = count - c;
        if (left == 0) return;
        store_some(to + c, f_add(starts ? f_zero() : load_some(to + c, left), load_some(from + c, left)), left);
    }

    // A neuron of the lists.
    struct Place {
        int four = 0, i = 0;
    };
    // Goes on in the lists from `place`, at most so many neurons, and calls each(row) for their rows.
    template <class Each>
    void go_on(Place& place, int neurons, const Each& each) {
        while (neurons > 0 && place.four < count_) {
            const Wanted& wanted = lists_[place.four];
            if (place.i >= wanted.count) {
                ++place.four, place.i = 0;
                continue;
            }
            --neurons;
            each(FourRows{op_, fours_.at(begin_ + place.four), wanted}.row(down_, place.i++));
        }
    }
    // Has the codes of the next neurons of all lists fetched, of the columns at hand. With `fetch` false it only counts
    // these neurons as done.
    void come(int neurons, bool fetch = true) {
        const std::size_t lines = std::size_t(up_to(down_.cols, kLineColumns) / kLineColumns);
        const std::size_t line_bytes = down_.codes_bytes() / lines;
        const std::size_t from = std::size_t(lo_ / kLineColumns), end = std::size_t((hi_ - 1) / kLineColumns + 1);
        go_on(coming_, neurons, [&](const std::uint8_t* row) {
            if (fetch) fetches_.add(row + from * line_bytes, (end - from) * line_bytes);
        });
    }
    // As `come`, for factors.
    void come_factors(int neurons, bool fetch = true) {
        if (!down_.quantised()) return;
        const std::size_t from = std::size_t(lo_ / down_.group), end = std::size_t((hi_ - 1) / down_.group + 1);
        go_on(coming_factors_, neurons, [&](const std::uint8_t* row) {
            const std::uint8_t* const scales = row + down_.codes_bytes();
            if (!fetch) return;
            fetches_.add(scales + 2 * from, 2 * (end - from));
            fetches_.add(scales + 2 * (std::size_t(down_.groups()) + from), 2 * (end - from));
        });
    }

    // The index in a list behind the last neuron that lies in the same granule as neuron `from`.
    static int granule_end(const Wanted& wanted, int from) {
        int end = from;
        for (const int g = wanted.at[from] / kGranuleRows; end < wanted.count && wanted.at[end] / kGranuleRows == g;)
            ++end;
        return end;
    }
    // Whether at most kFewNeurons of a list's neurons [from, end), all of one granule, have a value in this row.
    static bool has_few(const Wanted& wanted, int from, int end, int row) {
        int some = 0;
        for (int i = from; i < end; ++i) some += wanted.of(i)[row] != 0.0F;
        return some <= kFewNeurons;
    }
    // Whether all rows have few of each granule's.
    bool all_few(const Wanted& wanted) const {
        for (int from = 0, end; from < wanted.count; from = end) {
            end = granule_end(wanted, from);
            for (int row = 0; end - from > kFewNeurons && row < t_; ++row) {
                if (!has_few(wanted, from, end, row)) return false;
            }
        }
        return true;
    }

    // own [t, columns] += the neurons of a four, granule by granule: by integer products, or as floats in the rows that
    // have few of the granule's neurons.
    void add_codes(const FourRows& rows, float* own) {
        const Wanted& wanted = rows.wanted;
        const std::ptrdiff_t columns = hi_ - lo_;
        for (int from = 0, end; from < wanted.count; from = end) {
            end = granule_end(wanted, from);
            const int behind = std::min(end - from, kTogether);
            come(end - from - behind, false);  // of this granule: `add_some` has them fetched
            come(behind);
            come_factors(end - from);
            bool few[kFewRows];
            for (int row = 0; row < t_; ++row) few[row] = has_few(wanted, from, end, row);
            if (std::any_of(few, few + t_, [](bool each) { return each; })) add_few(rows, from, end, few, own);
            for (int row = 0; row < t_; row += kPair) {
                const bool two = row + 1 < t_;
                if (few[row] && (!two || few[row + 1])) continue;
                float* const to = own + row * columns;
                float* const sums[kPair] = {to, two ? to + columns : to};
                Some some;
                for (int i = from; i < end; ++i) {
                    const auto value = [&](int r) { return few[r] ? 0.0F : wanted.of(i)[r]; };
                    const float first = value(row), second = two ? value(row + 1) : 0.0F;
                    if (!op_.skips || first != 0.0F || second != 0.0F) some.add(rows.row(down_, i), first, second);
                }
                two ? add_some<2>(down_, some, lo_, hi_, sums, true, &fetches_)
                    : add_some<1>(down_, some, lo_, hi_, sums, true, &fetches_);
            }
        }
    }

    // own [t, columns] += the neurons [from, end) of a four, as floats, in the rows that have few of them.
    void add_few(const FourRows& rows, int from, int end, const bool* few, float* own) {
        float value[kGranuleRows][kFewRows];
        const std::uint8_t* at[kGranuleRows];
        const float* values[kGranuleRows];
        int count = 0;
        for (int i = from; i < end; ++i) {
            bool any = false;
            for (int row = 0; row < t_; ++row) {
                value[count][row] = few[row] ? rows.wanted.of(i)[row] : 0.0F;
                any = any || value[count][row] != 0.0F;
            }
            if (any) at[count] = rows.row(down_, i), values[count] = value[count], ++count;
        }
        const auto add = [&]<int k, bool one>(int i) {
            const std::uint8_t* const* const next = at + (i + 2 * k <= count ? i + k : i);
            add_rows<Kind::kInt4, k, one, true>(down_, at + i, values + i, t_, lo_, hi_, own, next);
        };
        const auto some = [&]<int k>(int i) {
            t_ == 1 ? add.template operator()<k, true>(i) : add.template operator()<k, false>(i);
        };
        int i = 0;
        for (; i + 4 <= count; i += 4) some.template operator()<4>(i);
        for (; i < count; ++i) some.template operator()<1>(i);
    }

    // Row i of the lists from list `four` on, or null.
    const std::uint8_t* later(int four, int i) const {
        for (; four < count_; i -= lists_[four++].count) {
            const Wanted& wanted = lists_[four];
            if (i < wanted.count) return FourRows{op_, fours_.at(begin_ + four), wanted}.row(down_, i);
        }
        return nullptr;
    }

    // own [t, columns] += the neurons of list `four`, as floats.
    void add_floats(int four, float* own) {
        const Wanted& wanted = lists_[four];
        by_kind(down_.kind, [&]<Kind kind>() {
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
                    // Of several rows of activations few columns are at hand, and their bytes have room in the first
                    // cache.
                    n == 4 ? add_rows<kind, 4, one, !one>(down_, rows, values, t_, lo_, hi_, own, next)
                           : add_rows<kind, 1, one, !one>(down_, rows, values, t_, lo_, hi_, own, next);
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
    const Wanted* const lists_;
    float* const one_;
    // The neurons whose rows are fetched next. A granule's integer sum wants the factors of all its neurons first, so
    // factors are fetched as many neurons ahead as the first granule has, and codes kTogether neurons ahead.
    Place coming_, coming_factors_;
    int lo_ = 0, hi_ = 0;
    Fetches fetches_;
};

// For a single row whose activation is computed in tiles. A thread computes the values of a four and adds its neurons
// up. When all fours are done, the threads add up the fours' sums. So one thread streams tiles while another reads
// single rows. Rejected: all threads stream tiles first and add neurons afterwards, which took 1.06 to 1.16 times as
// long in an FFN of OPT-6.7B's shape. Returns false if scratch is too small.
bool row_by_fours(Pool& pool, const FfnOp& op, const Fours& fours, Input& input, Scratch scratch, std::size_t cost) {
    const int d = op.shape.width(), step = few_columns(d, 1, 1), busy = std::min(pool.threads(), fours.count);
    std::vector<Wanted> lists(std::size_t(busy), Wanted{});
    for (Wanted& list : lists) {
        if (!Wanted::take_from(scratch, 1, list)) return false;
    }
    const std::size_t sum_bytes = std::size_t(d) * sizeof(float);
    const int wave = static_cast<int>(std::min(std::size_t(fours.count), scratch.nbytes / 64 * 64 / sum_bytes));
    float* const sums = wave < busy ? nullptr : take<float>(scratch, std::size_t(wave) * std::size_t(d));
    if (sums == nullptr) return false;
    std::atomic<int> next{0};  // threads take fours as they come, so that others do more while one is held up
    pool.run(cost, [&](const Team& team) {
        const Rows x = input.chunk_at(team, 0);
        FewValues values(op, x);
        const auto take_next = [&] {
            return team.id() < busy ? std::min(fours.count, next.fetch_add(1, std::memory_order_relaxed)) : fours.count;
        };
        int mine = take_next();
        Wanted none;
        Wanted& list = mine < fours.count ? lists[std::size_t(team.id())] : none;
        if (mine < fours.count) values.begin(fours.at(mine), list);
        for (int begin = 0; begin < fours.count; begin += wave) {
            const int end = std::min(begin + wave, fours.count);
            for (int after; mine < end; mine = after) {
                after = take_next();
                values.compute(fours.at(mine), list, fours.at(after < fours.count ? after : mine), list);
                FewSums sum(op, fours, mine, &list, 1, sums + std::ptrdiff_t(mine - begin) * d);
                for (int lo = 0; lo < d; lo += step) sum.add(lo, std::min(lo + step, d));
            }
            team.barrier();
            fold_fours(team, fours, begin, end - begin, sums, 1, d);
            if (end < fours.count) team.barrier();
        }
    });
    return true;
}

bool neurons_few(Pool& pool, const FfnOp& op, std::size_t cost) {
    const FfnShape& shape = op.shape;
    const Fours fours(op.sum, shape, 0, op.weights.count, op.weights.count);
    Scratch scratch = op.scratch;
    Input input;
    if (!input.plan(shape.first(), op.h, shape.width(), 1, op.t, op.exact, scratch)) return false;
    if (op.t == 1 && !shape.by_records() && row_by_fours(pool, op, fours, input, scratch, cost)) return true;
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
        const int step = few_columns(d, op.t, team.size());
        FewValues values(op, x);
        for (int begin = 0; begin < fours.count; begin += wave) {
            const int end = std::min(begin + wave, fours.count);
            // No thread takes a four of the next wave before all threads have come here.
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
            FewSums sums(op, fours, begin, lists.data(), end - begin);
            for (int lo = team.id() * step; lo < d; lo += team.size() * step) sums.add(lo, std::min(lo + step, d));
            if (end < fours.count) team.barrier();
        }
    });
    return true;
}

// The op `fire`: the activations of all neurons, for few rows. Threads take granules as they come.
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
