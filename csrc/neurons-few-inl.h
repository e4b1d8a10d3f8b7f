// FFNs that lie neuron by neuron, of few rows: a thread takes whole fours. Included after neuron-rows-inl.h.
#pragma once

#include <atomic>

namespace penstock::PENSTOCK_ISA {
namespace {

// The neurons of a four that any row wants, in the order in which they lie.
struct Wanted {
    int count = 0;
    std::int16_t at[kFourNeurons];                     // granule of the four times kGranuleRows, plus neuron
    alignas(64) float values[kFourNeurons][kFewRows];  // [wanted neuron][row]
};

// Lists the neurons of a four that some row fires. Their activation is computed granule by granule, in tiles, unless
// it is there.
void list_fired(const FfnOp& op, const Four& four, const Zeros& zeros, const Rows& x, Wanted& wanted) {
    alignas(64) float computed[kFewRows * kGranuleRows];
    const auto granule_at = [&](int g) { return op.weights.data + std::size_t(four.lo + g) * op.weights.stride; };
    for (int g = 0; g < four.hi - four.lo; ++g) {
        const Zeros here = zeros.at(0, four.lo + g);
        const float* fired = computed;
        bool any;
        if (op.values != nullptr) {
            fired = op.values + std::ptrdiff_t(four.lo + g) * x.count * kGranuleRows;
            any = !all_zero(fired, x.count * kGranuleRows);
            for (int row = 0; row < x.count; ++row) here.note(row, fired + row * kGranuleRows, op.shape.up.rows);
        } else {
            const std::uint8_t* const next = granule_at(g + 1 < four.hi - four.lo ? g + 1 : g);
            any = fire(op.shape, granule_at(g), next, x, 0, x.count, here, computed);
        }
        if (!any && op.skips) continue;
        for (int i = 0; i < op.shape.up.rows; ++i) {
            float* const values = wanted.values[wanted.count];
            bool wants = !op.skips;
            for (int row = 0; row < x.count; ++row) {
                values[row] = fired[row * kGranuleRows + i];
                wants = wants || values[row] != 0.0F;
            }
            if (wants) wanted.at[wanted.count++] = static_cast<std::int16_t>(g * kGranuleRows + i);
        }
    }
}

// Lists the neurons of a four that are active in some of t rows.
void list_active(const FfnOp& op, const Four& four, const Zeros& zeros, int t, Wanted& wanted) {
    for (int g = 0; g < four.hi - four.lo; ++g) {
        const Zeros here = zeros.at(0, four.lo + g);
        for (int row = 0; here.fired != nullptr && row < t; ++row) {
            std::fill_n(here.fired + row * here.stride, op.shape.up.rows, std::uint8_t{0});
        }
        if (!here.any_active(0, t, op.shape.up.rows)) continue;
        for (int i = 0; i < op.shape.up.rows; ++i) {
            bool wants = false;
            for (int row = 0; row < t; ++row) wants = wants || here.is_active(row, i);
            if (wants) wanted.at[wanted.count++] = static_cast<std::int16_t>(g * kGranuleRows + i);
        }
    }
}

// Computes the activations of the neurons that are listed, for t rows of h, and leaves those in the list that fire.
void fire_records(const FfnOp& op, const Four& four, const Zeros& zeros, const float* const* h, int t, Wanted& wanted) {
    const FfnShape& shape = op.shape;
    const Matrix& first = shape.first();
    const auto granule_at = [&](int g) { return op.weights.data + std::size_t(four.lo + g) * op.weights.stride; };
    const auto fetch = [&](int i) {
        if (i >= wanted.count) return;
        const int g = wanted.at[i] / kGranuleRows;
        prefetch_run(row_at(first, granule_at(g), wanted.at[i] % kGranuleRows), row_bytes(first));
    };
    constexpr int kRowsAhead = 3;
    for (int i = 0; i < kRowsAhead; ++i) fetch(i);
    by_kind(first, [&]<Kind kind>() {
        for (int i = 0; i < wanted.count; ++i) {
            fetch(i + kRowsAhead);
            float* const values = wanted.values[i];
            std::fill(values + t, values + kFewRows, 0.0F);
            const int g = wanted.at[i] / kGranuleRows;
            dot_rows<kind>(first, shape.first_bias(), granule_at(g), op.biased(four.lo + g),
                           wanted.at[i] % kGranuleRows, h, t, [&](int row, float y) { values[row] = y; });
        }
    });
    float* const all = wanted.values[0];
    const int numbers = wanted.count * kFewRows;
    std::fill(all + numbers, all + up_to(numbers, kTileRows), 0.0F);
    activate(shape.activation, all, nullptr, all, up_to(numbers, kTileRows));
    int kept = 0;
    for (int i = 0; i < wanted.count; ++i) {
        const int neuron = wanted.at[i] % kGranuleRows;
        const Zeros here = zeros.at(0, four.lo + wanted.at[i] / kGranuleRows);
        bool wants = !op.skips;
        float values[kFewRows];
        for (int row = 0; row < t; ++row) {
            values[row] = here.counts(row, neuron, wanted.values[i][row]);
            wants = wants || values[row] != 0.0F;
            if (here.fired != nullptr) here.fired[row * here.stride + neuron] = values[row] != 0.0F;
        }
        if (!wants) continue;
        wanted.at[kept] = wanted.at[i];
        std::copy_n(values, t, wanted.values[kept++]);
    }
    wanted.count = kept;
}

// to [t, D] += the neurons of a four that are listed, granule by granule, by integer products.
void sum_codes(const FfnOp& op, const Four& four, const Wanted& wanted, int t, float* to) {
    const Matrix& down = op.shape.down;
    const int d = op.shape.width();
    const auto row_of = [&](int i) {
        const int g = wanted.at[i] / kGranuleRows;
        const std::uint8_t* const granule = op.weights.data + std::size_t(four.lo + g) * op.weights.stride;
        return row_at(down, granule, wanted.at[i] % kGranuleRows);
    };
    for (int lo = 0, hi; lo < wanted.count; lo = hi) {
        const int g = wanted.at[lo] / kGranuleRows;
        for (hi = lo; hi < wanted.count && wanted.at[hi] / kGranuleRows == g;) ++hi;
        const int ahead_count = std::min(wanted.count - hi, hi - lo + kTogether);
        const std::uint8_t* ahead[kGranuleRows + kTogether];
        for (int i = 0; i < ahead_count; ++i) ahead[i] = row_of(hi + i);
        for (int i = 0; i < ahead_count; ++i) {
            prefetch_run(ahead[i] + down.codes_bytes(), row_bytes(down) - down.codes_bytes());
        }
        for (int row = 0; row < t; row += kPair) {
            const bool two = row + 1 < t;
            float* const sums[kPair] = {to + std::ptrdiff_t(row) * d, to + std::ptrdiff_t(row + (two ? 1 : 0)) * d};
            Some some;
            for (int i = lo; i < hi; ++i) {
                const float first = wanted.values[i][row], second = two ? wanted.values[i][row + 1] : 0.0F;
                if (!op.skips || first != 0.0F || second != 0.0F) some.add(row_of(i), first, second);
            }
            const int fetched = row == 0 ? ahead_count : 0;
            two ? add_some<2>(down, some, 0, d, sums, true, ahead, fetched)
                : add_some<1>(down, some, 0, d, sums, true, ahead, fetched);
        }
    }
}

// to [T, D] = the sum over the neurons of a four.
void sum_neurons(const FfnOp& op, const Rows& x, const Four& four, float* to) {
    const FfnShape& shape = op.shape;
    const Matrix& down = shape.down;
    const bool gated = shape.gate.rows > 0;
    const int t = x.count, d = shape.width();
    const Zeros zeros = zeros_of(op);
    Wanted wanted;
    const float* h[kFewRows];
    for (int row = 0; row < t; ++row) h[row] = op.h + std::ptrdiff_t(row) * d;
    const auto granule_at = [&](int g) { return op.weights.data + std::size_t(four.lo + g) * op.weights.stride; };
    const auto granule_of = [&](int i) { return granule_at(wanted.at[i] / kGranuleRows); };
    if (shape.by_records()) {
        list_active(op, four, zeros, t, wanted);
        fire_records(op, four, zeros, h, t, wanted);
    } else {
        list_fired(op, four, zeros, x, wanted);
    }
    // Rows lie apart, and the processor's own prefetcher finds none of them. The first ones are fetched now, the others
    // while those before them are used.
    for (int i = 0; i < std::min(wanted.count, kTogether); ++i) {
        const int neuron = wanted.at[i] % kGranuleRows;
        if (gated) prefetch_run(row_at(shape.up, granule_of(i), neuron), row_bytes(shape.up));
        prefetch_run(row_at(down, granule_of(i), neuron), row_bytes(down));
    }
    if (gated) {
        by_kind(shape.up, [&]<Kind kind>() {
            for (int i = 0; i < wanted.count; ++i) {
                if (i + 1 < wanted.count) {
                    const std::uint8_t* next = row_at(shape.up, granule_of(i + 1), wanted.at[i + 1] % kGranuleRows);
                    prefetch_run(next, row_bytes(shape.up));
                }
                const std::uint8_t* const biased = op.biased(four.lo + wanted.at[i] / kGranuleRows);
                times_up<kind>(shape, granule_of(i), biased, wanted.at[i] % kGranuleRows, h, t, wanted.values[i]);
            }
        });
    }
    begin_sum(four.continues ? op.sum.pending : nullptr, std::size_t(t) * std::size_t(d), to);
    if (down.kind == Kind::kInt4 && !op.exact) return sum_codes(op, four, wanted, t, to);
    by_kind(down, [&]<Kind kind>() {
        const std::uint8_t *rows[kTogether], *next[kTogether];
        const float* values[kTogether];
        const auto row_of = [&](int i) { return row_at(down, granule_of(i), wanted.at[i] % kGranuleRows); };
        for (int i = 0; i < wanted.count;) {
            const int left = wanted.count - i;
            const int n = left >= 8 && t == 1 ? 8 : left >= 4 ? 4 : 1;
            for (int j = 0; j < n; ++j) {
                rows[j] = row_of(i + j), values[j] = wanted.values[i + j];
                next[j] = i + n + j < wanted.count ? row_of(i + n + j) : rows[j];
            }
            const auto add = [&]<bool one>() {
                if constexpr (one) {
                    if (n == 8) return add_rows<kind, 8, one>(down, rows, values, t, to, next);
                }
                n == 4 ? add_rows<kind, 4, one>(down, rows, values, t, to, next)
                       : add_rows<kind, 1, one>(down, rows, values, t, to, next);
            };
            t == 1 ? add.template operator()<true>() : add.template operator()<false>();
            i += n;
        }
    });
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
