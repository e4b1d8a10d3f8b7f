// What FFNs of either layout share: fours of granules, and what their activation gives. Included after kernels-inl.h.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

// Granules [lo, hi) of a call that belong to one four of the layer. A four is kSumNeurons neurons, mostly four
// granules. `continues`: granules before these began the sum of the four. `keeps`: granules after these complete it.
struct Four {
    int lo, hi;
    bool continues, keeps;
};

// The fours that granules [begin, end) of a call with `all` granules belong to. Fours are counted from the layer's
// first granule. So the first four and the last one may reach beyond [begin, end): into other granules of the same
// call, or at the call's own ends into neighbouring units. `FfnSum` says whether they reach into neighbouring units.
struct Fours {
    const FfnSum& sum;
    int begin, end, all, per_four, first, count;
    Fours(const FfnSum& s, const FfnShape& shape, int from, int to, int granules)
        : sum(s),
          begin(from),
          end(to),
          all(granules),
          per_four(sum_granules(shape.up.rows)),
          first((s.granule + from) / per_four),
          count((s.granule + to - 1) / per_four - first + 1) {}
    // Whether four i is the call's first, and so the first addend of `partial`. A call may take its granules in blocks,
    // and a block may end within a four.
    bool starts(int i) const { return sum.starts_sum && first + i == sum.granule / per_four; }
    Four at(int i) const {
        const int lo = (first + i) * per_four - sum.granule, hi = lo + per_four;
        const bool at_start = begin == 0 && i == 0, at_end = end == all && i == count - 1;
        return {std::max(lo, begin), std::min(hi, end), at_start ? sum.continues : lo < begin,
                at_end ? sum.keeps : hi > end};
    }
};

// What a call does about neurons that do not fire. `skips`: it leaves out what would be multiplied by 0. `fired`
// [rows, neurons]: where it notes which neurons fired (null: nowhere). Rows lie `stride` bytes apart. `active`: which
// neurons are active, in the same shape (null: all are). `level`: activations below it count as 0. `per_granule`: how
// many neurons a granule has.
struct Zeros {
    bool skips = false;
    std::uint8_t* fired = nullptr;
    std::ptrdiff_t stride = 0;
    const std::uint8_t* active = nullptr;
    std::ptrdiff_t active_stride = 0;
    float level = 0;
    int per_granule = kGranuleRows;

    // From a later row and granule on.
    Zeros at(int row, int granule) const {
        const std::ptrdiff_t neuron = std::ptrdiff_t(granule) * per_granule;
        return {skips,         fired ? fired + row * stride + neuron : nullptr,
                stride,        active ? active + row * active_stride + neuron : nullptr,
                active_stride, level,
                per_granule};
    }
    // Notes which of a granule's `count` neurons fired in one row. `values` [count]: their activations.
    void note(int row, const float* values, int count) const {
        for (int i = 0; fired != nullptr && i < count; ++i) fired[row * stride + i] = values[i] != 0.0F;
    }
    bool is_active(int row, int neuron) const { return active == nullptr || active[row * active_stride + neuron] != 0; }
    // Whether any of a granule's `count` neurons is active in one of the rows [row0, end).
    bool any_active(int row0, int end, int count) const {
        if (active == nullptr) return true;
        for (int row = row0; row < end; ++row) {
            std::uint8_t any = 0;
            for (int i = 0; i < count; ++i) any |= active[row * active_stride + i];
            if (any != 0) return true;
        }
        return false;
    }
    // to [count] |= which of a granule's neurons are active in one of the rows [0, end).
    void join_active(int end, int count, std::uint8_t* to) const {
        if (active == nullptr) std::fill_n(to, count, std::uint8_t{1});
        for (int row = 0; active != nullptr && row < end; ++row) {
            for (int i = 0; i < count; ++i) to[i] |= active[row * active_stride + i];
        }
    }
    // The activation of a neuron, or 0 if it does not count. NaN is not below the level, so that damage stays visible.
    float counts(int row, int neuron, float value) const {
        return !is_active(row, neuron) || std::fabs(value) < level ? 0.0F : value;
    }
    // Sets those of a granule's `count` activations in one row that do not count to 0.
    void keep_counting(int row, float* values, int count) const {
        if (active == nullptr && level <= 0) return;
        for (int i = 0; i < count; ++i) values[i] = counts(row, i, values[i]);
    }
};
inline Zeros zeros_of(const FfnOp& op) {
    return Zeros{op.skips, op.fired, op.fired_stride, op.active, op.active_stride, op.level, spaced(op.shape.up)}.at(
        0, op.sum.granule);
}

// Whether `count` (a multiple of 16) numbers are all 0. NaN is not 0.
bool all_zero(const float* x, int count) {
    I most = i_zero();
    for (int i = 0; i < count; i += kTileRows) most = i_max(most, i_magnitude(f_load(x + i)));
    return i_max_of(most) == 0;
}

// out [end - row0, spaced(m)] = rows [row0, end) of h · a block in tiles of one granule, plus the bias at byte `bias`
// of the granule (0: none). `next`: the bytes that are read afterwards.
void granule_rows(const Matrix& m, std::size_t bias, const std::uint8_t* granule, const std::uint8_t* next,
                  const Rows& h, int row0, int end, float* out) {
    const Cuts cuts(m, h.count);
    for (int cut = 0; cut < cuts.per_granule; ++cut) {
        const auto sink = [&](int row, int tile, F y) {
            const int at = (cuts.tile(cut) + tile) * kTileRows;
            if (bias != 0) {
                y = f_add(y, load_some(reinterpret_cast<const float*>(granule + bias) + at, m.rows - at));
            }
            f_store(out + (row - row0) * spaced(m) + at, y);
        };
        Tiles tiles = cuts.tiles_of({granule, 1, 0}, m, cut);
        tiles.then = cut + 1 < cuts.per_granule ? cuts.tiles_of({granule, 1, 0}, m, cut + 1).series.first : next;
        tile_rows(m, tiles, h, row0, end, nothing, sink);
    }
}

// out [end - row0, spaced(up)] = act(gate h), or act(up h) where there is no gate, and 0 where a neuron is not active.
// That matrix, gate or up, lies in tiles. Returns whether any result is not 0. `next`: the bytes that are read
// afterwards, which are fetched meanwhile.
bool fire(const FfnShape& shape, const std::uint8_t* granule, const std::uint8_t* next, const Rows& h, int row0,
          int end, const Zeros& zeros, float* out) {
    const int apart = spaced(shape.up);
    if (!zeros.any_active(row0, end, shape.up.rows)) {
        std::fill_n(out, std::ptrdiff_t(end - row0) * apart, 0.0F);
        for (int row = row0; row < end; ++row) zeros.note(row, out, shape.up.rows);
        return false;
    }
    granule_rows(shape.first(), shape.first_bias(), granule, next, h, row0, end, out);
    prefetch_run(next);  // it arrives during the arithmetic below, which reads no weights
    bool any = false;
    for (int row = row0; row < end; ++row) {
        float* const x = out + (row - row0) * apart;
        activate(shape.activation, x, nullptr, x, shape.up.rows);
        zeros.keep_counting(row, x, shape.up.rows);
        zeros.note(row, x, shape.up.rows);
        any = any || !all_zero(x, shape.up.rows);
    }
    return any;
}

// to [count] = before (null: 0).
void begin_sum(const float* before, std::size_t count, float* to) {
    if (before == nullptr) {
        std::fill_n(to, count, 0.0F);
    } else {
        std::copy_n(before, count, to);
    }
}

// Adds the sums [count, T, D] of fours [begin, begin + count) to partial, one after the other, for this thread's
// columns. The sum of a four that is not complete goes to `pending`.
void fold_fours(const Team& team, const Fours& fours, int begin, int count, const float* sums, int t, int d) {
    const FfnSum& sum = fours.sum;
    const auto [lo, hi] = team.share((d + kTileRows - 1) / kTileRows);
    const bool keeps = fours.at(begin + count - 1).keeps;  // no other four reaches beyond the call's granules
    const std::ptrdiff_t apart = std::ptrdiff_t(t) * d;
    // In tiles. The sums of the fours lie in few sets of the caches, so a thread reads four tiles next to each other.
    constexpr int kSideBySide = 4;
    for (int row = 0; row < t; ++row) {
        const auto fold = [&]<int n>(int tile, const auto& load, const auto& store) {
            const std::ptrdiff_t at = std::ptrdiff_t(row) * d + tile * kTileRows;
            const int added = keeps ? count - 1 : count;
            F y[n];
            for (int k = 0; k < n; ++k) {
                y[k] = sum.starts_sum && begin == 0 ? f_zero() : load(sum.partial + at + k * kTileRows);
            }
            for (int i = 0; i < added; ++i) {
                for (int k = 0; k < n; ++k) y[k] = f_add(y[k], load(sums + i * apart + at + k * kTileRows));
            }
            for (int k = 0; k < n; ++k) {
                if (keeps) store(sum.pending + at + k * kTileRows, load(sums + added * apart + at + k * kTileRows));
                store(sum.partial + at + k * kTileRows, y[k]);
            }
        };
        const auto load = [](const float* from) { return f_load(from); };
        const auto store = [](float* to, F x) { f_store(to, x); };
        int tile = lo;
        for (; tile + kSideBySide <= hi && (tile + kSideBySide) * kTileRows <= d; tile += kSideBySide) {
            fold.template operator()<kSideBySide>(tile, load, store);
        }
        for (; tile < hi; ++tile) {
            const int columns = d - tile * kTileRows;
            fold.template operator()<1>(
                tile, [&](const float* from) { return load_some(from, columns); },
                [&](float* to, F x) { store_some(to, x, columns); });
        }
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
