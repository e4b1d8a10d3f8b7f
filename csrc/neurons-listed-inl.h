// For FFNs that lie neuron by neuron, and few rows: which neurons of a four are wanted, and their values. Included
// after neuron-sums-inl.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace penstock::PENSTOCK_ISA {
namespace {

// The neurons of a four that any row wants, in the order in which they lie.
struct Wanted {
    int count = 0, t = 0;
    std::int16_t* at = nullptr;  // [wanted neuron]: granule of the four times kGranuleRows, plus neuron
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

// Computes the values of fours, for one thread. While it computes a four it knows the next one, and fetches its first
// bytes.
class FewValues {
  public:
    FewValues(const FfnOp& op, const Rows& x) : op_(op), shape_(op.shape), x_(x), t_(x.count), zeros_(zeros_of(op)) {
        for (int row = 0; row < t_; ++row) h_[row] = op.h + std::ptrdiff_t(row) * shape_.width();
    }

    // Fetches the beginning of the first four.
    void begin(const Four& four, Wanted& wanted) {
        if (!shape_.by_records()) return prefetch_run(FourRows{op_, four, wanted}.granule(0));
        list_active(four, wanted);
        for (int i = 0; i < std::min(wanted.count, kRowsAhead); ++i) fetch_first({op_, four, wanted}, i);
    }
    // Computes the values of a four. `next`: the four after it, or the same if it is the last.
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

    // Lists the neurons of a four that some row fires. Their activations are computed granule by granule, in tiles,
    // unless the op `fire` has computed them. `next`: the bytes that are read afterwards.
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
            for (int from = 0; from < neurons; from += 8) {  // most runs of eight neurons have no active one
                std::uint64_t any;
                std::memcpy(&any, active + from, sizeof any);
                for (int i = from; any != 0 && i < std::min(from + 8, neurons); ++i) {
                    if (active[i] != 0) wanted.add(g, i);
                }
            }
        }
    }

    // Computes the activations of the listed neurons, and takes those that do not fire off the list. Fetches the first
    // rows of the next four's list, `then`.
    void fire_records(const FourRows& rows, Wanted& wanted, const FourRows& then) {
        const Matrix& first = shape_.first();
        const int ahead = by_turning(first, x_) ? kTileRows : kRowsAhead;
        const int more = &then.wanted == &wanted ? 0 : std::min(then.wanted.count, ahead);
        dot_wanted(
            first, wanted.count, wanted.count + more,
            [&](int i) { return i < wanted.count ? rows.row(first, i) : then.row(first, i - wanted.count); },
            [&](int i, int row, float y) { wanted.of(i)[row] = y + rows.bias(shape_.first_bias(), i); },
            [&](int i) {
                const auto fires = [&](float y) { return y > 0.0F || !is_relu(); };
                if (shape_.gate.rows > 0 && std::any_of(wanted.of(i), wanted.of(i) + t_, fires)) {
                    fetches_.add_row(shape_.up, rows.row(shape_.up, i));
                }
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

    // If there is a gate, whose activations the values are so far, multiplies them with the products of `up`.
    void multiply(const FourRows& rows, Wanted& wanted) {
        if (shape_.gate.rows == 0) return;
        const Matrix& up = shape_.up;
        dot_wanted(
            up, wanted.count, wanted.count, [&](int i) { return rows.row(up, i); },
            [&](int i, int row, float y) { wanted.of(i)[row] *= y + rows.bias(shape_.up_bias, i); }, [](int) {});
    }
    // As `dot_listed` for all rows of activations, or as `dot_listed_turned` where these are rounded.
    template <class RowOf, class To, class Done>
    void dot_wanted(const Matrix& m, int count, int known, const RowOf& row_of, const To& to, const Done& done) {
        if (by_turning(m, x_)) return dot_listed_turned(m, count, known, row_of, x_, fetches_, to, done);
        by_kind(m.kind, [&]<Kind kind>() { dot_listed<kind>(m, count, known, row_of, h_, t_, fetches_, to, done); });
    }

    const FfnOp& op_;
    const FfnShape& shape_;
    const Rows& x_;
    const int t_;
    const Zeros zeros_;
    const float* h_[kFewRows];
    Fetches fetches_;
};

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
