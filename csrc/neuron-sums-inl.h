// Sums of the neurons of a granule whose rows lie in int4: `to` += Σ value · row, by integer products. Included after
// neuron-dots-inl.h.
//
// A row has a scale and a minimum for each group of columns, so its code q stands for q · scale + minimum. Hence
// Σ value · row = Σ (value · scale) · q + Σ value · minimum.
//
// The factors value · scale are rounded to int8, as activations of dense products are. For each group of columns and
// each row of activations, the largest magnitude among the granule's neurons becomes 127. So the first sum is one of
// integers. It does not depend on the order of the neurons, nor on neurons that are left out, which would add 0. The
// second sum is float32, neuron by neuron. The codes of four neurons are brought side by side, so that one instruction
// multiplies and adds four. That takes 4.6 times as many weights a second as to add up floats.
//
// For few rows of activations, eight neurons are read side by side over their whole length, and their integer sums lie
// in memory meanwhile. Where all neurons of a granule were read side by side, 64 bytes of each at a time, memory gave
// 17 GB/s of 50 (Zen 4, two threads). With eight neurons, and the next eight fetched into the second cache, it gives 25
// to 31.
#pragma once

#include <bit>

namespace penstock::PENSTOCK_ISA {
namespace {

// If at most so many neurons of a granule have a value that is not 0 in a row of activations, they are added as floats
// instead. For an integer sum costs as much for one neuron as for four, and half of that again for its factors and its
// end. Only this row's own values decide, so the result depends neither on other rows nor on neurons left out.
constexpr int kFewNeurons = 6;
constexpr int kPair = 2;                                 // rows of activations that codes are unpacked for at a time
constexpr int kQuadColumns = kQuadLines * kLineColumns;  // columns of codes that are unpacked at a time
constexpr int kGroupLanes = 16;                          // groups whose factors are made at a time
constexpr int kWindow = 4096;                            // columns whose factors and sums are held at a time
constexpr int kWindowLines = kWindow / kLineColumns, kWindowSteps = kWindow / kQuadColumns;
constexpr std::size_t kFetched = 128;  // bytes of a row that are fetched at a time

// The neurons of a granule that are wanted by one or two (kPair) rows of activations, in the order in which they lie.
struct Some {
    int count = 0;
    const std::uint8_t* row[kGranuleRows + 3];  // beginnings of their rows
    float value[kPair][kGranuleRows + 3];

    void add(const std::uint8_t* at, float first, float second) {
        row[count] = at, value[0][count] = first, value[1][count++] = second;
    }
    // Completes the last four with neurons whose values are 0.
    void complete() {
        while (count % 4 != 0) add(row[count - 1], 0.0F, 0.0F);
    }
};

// What the codes of `Some` are multiplied with, for kGroupLanes groups from one on.
struct Factors {
    alignas(64) std::int32_t four[kGranuleRows / 4][kGroupLanes];  // int8 of the four neurons, in each group
    alignas(64) float scale[kGroupLanes], minimum[kGroupLanes];    // sum = scale · Σ code · int8 + minimum

    // `at`: where the scales of the first of `groups` groups are in a row.
    void set(const Some& some, const float* value, std::size_t at, std::size_t to_minimums, int groups) {
        const auto halves = [&](const std::uint8_t* from) {
            if (groups >= kGroupLanes) return f_half(from);
            std::uint16_t padded[kGroupLanes] = {};
            std::memcpy(padded, from, 2 * std::size_t(groups));
            return f_half(padded);
        };
        I most = i_zero();
        F sum = f_zero();
        F factor[kGranuleRows];
        for (int i = 0; i < some.count; ++i) {
            const std::uint8_t* const from = some.row[i] + at;
            const F times = f_set(value[i]);
            factor[i] = f_mul(times, halves(from));
            most = i_max(most, i_magnitude(factor[i]));
            sum = f_fma(times, halves(from + to_minimums), sum);
        }
        f_store(minimum, sum);
        // NaN and infinite values stay visible in the scale, so that damaged weights do not pass for zeros. If all
        // factors are 0, their product with 127 / 0 is NaN. `i_round` makes a number of it whose last byte is 0.
        float largest[kGroupLanes];
        static_assert(sizeof most == sizeof largest);
        std::memcpy(largest, &most, sizeof largest);
        f_store(scale, f_div(f_load(largest), f_set(127.0F)));
        const F times_up = f_div(f_set(127.0F), f_load(largest));
        for (int i = 0; i < some.count; i += 4) {
            const auto rounded = [&](int j) { return i_round(f_mul(factor[i + j], times_up)); };
            i_store_fours(four[i / 4], rounded(0), rounded(1), rounded(2), rounded(3));
        }
    }
};

// Rows that are read next. While byte b of the rows before them is used, byte b of these is fetched.
struct Later {
    const std::uint8_t* row[kTogether];
    int count = 0;

    void fetch(std::size_t byte) const {
        for (int i = 0; i < count; ++i) {
            // Into the second cache: the first has no room for them beside the sums.
            for (std::size_t line = 0; line < kFetched; line += 64) __builtin_prefetch(row[i] + byte + line, 0, 2);
        }
    }
};

// Columns [from, end) of some neurons' rows, at most kWindow, times their factors: for `rows` rows of activations.
template <int rows>
struct Window {
    const Matrix& m;
    const Some& some;
    int from, end, first_group;
    int group[kWindowLines + kQuadLines];  // of each line, counted from first_group
    Factors factors[rows][kWindowLines / kGroupLanes];
    QuadSums held[rows][kWindowSteps];

    Window(const Matrix& matrix, const Some& wanted, int lo, int hi)
        : m(matrix), some(wanted), from(lo), end(hi), first_group(lo / matrix.group / kGroupLanes * kGroupLanes) {
        const int lines = m.group / kLineColumns, groups = m.groups() - first_group;
        const int count = (end - from + kQuadColumns - 1) / kQuadColumns * kQuadLines, first = from / kLineColumns;
        // A last line may be missing.
        if (std::has_single_bit(unsigned(lines))) {  // a shift, and no division
            const int bits = std::countr_zero(unsigned(lines));
            for (int i = 0; i < count; ++i) group[i] = std::min(((first + i) >> bits) - first_group, groups - 1);
        } else {
            for (int i = 0; i < count; ++i) group[i] = std::min((first + i) / lines - first_group, groups - 1);
        }
        for (int at = 0; at <= group[count - 1]; at += kGroupLanes) {
            const std::size_t scales = m.codes_bytes() + 2 * std::size_t(first_group + at);
            for (int row = 0; row < rows; ++row) {
                factors[row][at / kGroupLanes].set(some, some.value[row], scales, 2 * std::size_t(m.groups()),
                                                   groups - at);
            }
        }
    }

    // Adds the products of 4 · quads neurons from neuron i on (quads == 0: of all neurons) to the sums held. `begins`:
    // no sums are held yet. `ends`: the sums held are then added to `to`.
    template <int quads>
    void add(int i, bool begins, bool ends, float* const* to, const Later& later, Fetches* fetches) {
        const std::size_t codes_bytes = m.codes_bytes();
        const int* line = group;
        for (int c = from, step = 0; c < end; c += kQuadColumns, ++step, line += kQuadLines) {
            const std::size_t byte = std::size_t(c) / 2;
            if (byte % kFetched == 0) later.fetch(byte);
            if (fetches != nullptr) fetches->step();
            const int chunk = line[0] / kGroupLanes;
            int lane[kQuadLines];
            for (int j = 0; j < kQuadLines; ++j) lane[j] = line[j] % kGroupLanes;
            const QuadGroups lanes(lane);
            QuadSums sums[rows];
            for (int row = 0; row < rows; ++row) {
                if (begins) {
                    sums[row].clear();
                } else {
                    sums[row] = held[row][step];
                }
            }
            const bool whole = byte + kQuadColumns / 2 <= codes_bytes;
            const auto add_four = [&](int first) {
                const std::uint8_t* codes[4];
                std::uint8_t padded[4][kQuadColumns / 2];
                for (int k = 0; k < 4; ++k) {
                    codes[k] = some.row[first + k] + byte;
                    if (!whole) std::memcpy(padded[k], codes[k], codes_bytes - byte), codes[k] = padded[k];
                }
                const Quads four = quads_of(codes);
                for (int row = 0; row < rows; ++row) sums[row].add(four, lanes, factors[row][chunk].four[first / 4]);
            };
            if constexpr (quads > 0) {
#pragma GCC unroll 2
                for (int q = 0; q < quads; ++q) add_four(i + 4 * q);
            } else {
                for (int first = 0; first < some.count; first += 4) add_four(first);
            }
            for (int row = 0; row < rows; ++row) {
                if (!ends) {
                    held[row][step] = sums[row];
                } else {
                    finish(sums[row], factors[row][chunk], lane, c, to[row] + (c - from));
                }
            }
        }
    }

    // `add`, in a function of its own: beside what calls it, registers were too few.
    template <int quads>
    [[gnu::noinline]] void add_alone(int i, bool begins, bool ends, float* const* to, const Later& later,
                                     Fetches* fetches) {
        add<quads>(i, begins, ends, to, later, fetches);
    }

    void finish(const QuadSums& sums, const Factors& of, const int* lane, int c, float* to) const {
        I sum[2 * kQuadLines];
        sums.columns(sum);
        const auto each = [&](const auto& run) {
            for (int j = 0; j < kQuadLines; ++j) {
                const F scale = f_set(of.scale[lane[j]]), minimum = f_set(of.minimum[lane[j]]);
                for (int k = 2 * j; k < 2 * j + 2; ++k) run(k * kTileRows, f_fma(scale, f_from(sum[k]), minimum));
            }
        };
        const int count = end - c;
        if (count >= kQuadColumns) return each([&](int at, F y) { f_store(to + at, f_add(f_load(to + at), y)); });
        each([&](int at, F y) {
            if (at < count) store_some(to + at, f_add(load_some(to + at, count - at), y), count - at);
        });
    }
};

// to[i] [at least hi - lo] += Σ value · row over some neurons, for columns [lo, hi) of m, and for each row of
// activations i of `rows`. `lo`: a multiple of kSumColumns. `by_eights`: the neurons' rows come from RAM, so they are
// read eight at a time. `fetches`: what is fetched meanwhile (null: nothing).
template <int rows>
void add_some(const Matrix& m, Some& some, int lo, int hi, float* const* to, bool by_eights,
              Fetches* fetches = nullptr) {
    if (some.count == 0) return;
    const int wanted = some.count;
    some.complete();
    const bool at_once = !by_eights || some.count <= 4;
    const int passes = at_once ? 1 : (some.count + kTogether - 1) / kTogether;
    if (fetches != nullptr) fetches->pace(passes * ((hi - lo + kQuadColumns - 1) / kQuadColumns));
    for (int from = lo; from < hi; from += kWindow) {
        const int end = std::min(hi, from + kWindow);
        Window<rows> window(m, some, from, end);
        const auto later_of = [&](int i) {
            Later later;
            for (int k = i + kTogether; k < wanted && later.count < kTogether; ++k)
                later.row[later.count++] = some.row[k];
            return later;
        };
        float* sums[rows];
        for (int row = 0; row < rows; ++row) sums[row] = to[row] + (from - lo);
        if (at_once) {
            window.template add<0>(0, true, true, sums, later_of(0), fetches);
            continue;
        }
        for (int i = 0; i < some.count; i += kTogether) {
            const bool ends = i + kTogether >= some.count;
            some.count - i > 4 ? window.template add_alone<2>(i, i == 0, ends, sums, later_of(i), fetches)
                               : window.template add_alone<1>(i, i == 0, ends, sums, later_of(i), fetches);
        }
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
