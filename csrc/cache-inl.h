// Stores rows in the KV cache and reads them, in any of its formats, for one instruction set. spec/format.py says how
// they lie.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "scratch.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr bool quantised(Kind kind) { return kind == Kind::kInt8 || kind == Kind::kInt4; }

// ---- storing -------------------------------------------------------------------------------------------------------

inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fc0U;  // NaN; rounding up could wrap it to 0
    return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

constexpr float kMostHalf = 65504.0F;

// Writes `count` numbers in a float format. float16 saturates at ±65504 instead of becoming infinite.
inline void narrow_row(const float* from, Kind kind, int count, std::uint8_t* to) {
    if (kind == Kind::kFloat32) {
        std::memcpy(to, from, std::size_t(count) * 4);
    } else if (kind == Kind::kBfloat16) {
        for (int i = 0; i < count; ++i) {
            const std::uint16_t half = to_bf16(from[i]);
            std::memcpy(to + 2 * std::size_t(i), &half, 2);
        }
    } else {
        alignas(64) float lanes[16] = {};
        alignas(64) std::uint8_t halves[32];
        for (int i = 0; i < count; i += 16) {
            const int n = std::min(16, count - i);
            for (int k = 0; k < n; ++k) lanes[k] = std::min(std::max(from[i + k], -kMostHalf), kMostHalf);
            f_store_half(halves, f_load(lanes));
            std::memcpy(to + 2 * std::size_t(i), halves, std::size_t(n) * 2);
        }
    }
}

// The float16 that is nearest to a value among those that are not above it (`down`) or not below it. `value` is the
// float16 as a float.
struct Half {
    std::uint16_t bits;
    float value;
};
inline Half half_beyond(float value, bool down) {
    alignas(64) std::uint16_t halves[16];
    alignas(64) float lanes[16];
    f_store_half(halves, f_set(value));
    f_store(lanes, f_half(halves));
    if (down ? lanes[0] > value : lanes[0] < value) {
        std::uint16_t& bits = halves[0];
        const bool negative = (bits & 0x8000U) != 0, zero = (bits & 0x7fffU) == 0;
        if (zero) {
            bits = down ? 0x8001U : 0x0001U;
        } else {
            bits = static_cast<std::uint16_t>(negative == down ? bits + 1U : bits - 1U);
        }
        f_store(lanes, f_half(halves));
    }
    return {halves[0], lanes[0]};
}

// Quantises one group of a row to codes [count], a float16 scale and a float16 minimum. The rule is that of weights
// (store/quantize.py), after values are clipped to ±65504. A NaN makes the whole group NaN.
inline void quantise_group(const float* from, int count, int levels, std::uint8_t* codes, std::uint16_t* scale,
                           std::uint16_t* minimum) {
    const F most = f_set(kMostHalf), least = f_set(-kMostHalf);
    const auto values = [&](int i) {  // 16 values; lanes beyond the last hold the group's first value
        alignas(64) float lanes[16];
        for (int k = 0; k < 16; ++k) lanes[k] = from[i + k < count ? i + k : 0];
        return f_load(lanes);
    };
    I bits = i_zero();
    F low = most, high = least;
    for (int i = 0; i < count; i += 16) {
        const F x = values(i);
        bits = i_max(bits, i_magnitude(x));
        low = f_min(x, low), high = f_max(x, high);
    }
    if (i_max_of(bits) > 0x7f800000) {
        std::memset(codes, 0, std::size_t(count));
        *scale = 0, *minimum = 0x7e00U;
        return;
    }
    const float top = f_max_of(high), bottom = -f_max_of(f_mul(low, f_set(-1.0F)));
    const Half offset = half_beyond(std::max(bottom, -kMostHalf), true);
    const Half step = half_beyond((std::min(top, kMostHalf) - offset.value) / static_cast<float>(levels), false);
    const F inverse = f_set(step.value > 0 ? 1.0F / step.value : 0.0F), base = f_set(-offset.value);
    for (int i = 0; i < count; i += 16) {
        const F x = f_max(f_min(values(i), most), least);
        alignas(64) float scaled[16];
        // Below levels + 1, since steps are rounded up.
        f_store(scaled, f_add(f_mul(f_add(x, base), inverse), f_set(0.5F)));
        for (int k = 0; k < std::min(16, count - i); ++k) codes[i + k] = static_cast<std::uint8_t>(scaled[k]);
    }
    *scale = step.bits, *minimum = offset.bits;
}

// Stores a row of K or V for the token at `slot` of a page. `block`: the block of its KV head in the page.
inline void store_row(const float* from, const KvCache& cache, std::uint8_t* block, int slot) {
    std::uint8_t* const row = block + std::size_t(slot) * cache.row_bytes();
    if (!quantised(cache.kind)) {
        narrow_row(from, cache.kind, cache.head_dim, row);
        return;
    }
    const bool int4 = cache.kind == Kind::kInt4;
    for (int g = 0; g < cache.groups(); ++g) {
        alignas(64) std::uint8_t codes[kMostGroup];
        const int first = g * cache.group, count = std::min(cache.group, cache.head_dim - first);
        std::uint16_t halves[2];
        quantise_group(from + first, count, int4 ? 15 : 255, codes, halves, halves + 1);
        std::memcpy(block + cache.scale_at(g, slot), halves, 2);
        std::memcpy(block + cache.minimum_at(g, slot), halves + 1, 2);
        const int padded = up_to(count, int4 ? 32 : 16);
        std::memset(codes + count, 0, std::size_t(padded - count));
        std::uint8_t* to = row + std::size_t(int4 ? first / 2 : first);
        if (!int4) {
            std::memcpy(to, codes, std::size_t(padded));
            continue;
        }
        for (int i = 0; i < padded; i += 32, to += 16) {
            for (int k = 0; k < 16; ++k) to[k] = static_cast<std::uint8_t>(codes[i + k] | codes[i + 16 + k] << 4);
        }
    }
}

// ---- reading -------------------------------------------------------------------------------------------------------

constexpr std::size_t kFetchBytes = std::size_t{16} << 10;
// Whether rows that are read later are fetched into the L2 cache, or past all caches but the first. Zen 4, one row over
// 8,192 positions in float16: 26 to 28 GB/s in place of 14 to 17, for the first cache has few misses under way; codes
// with rounded factors 18 in place of 10. Elsewhere the L2 cache was the worse place, and integers that are widened,
// which are bound by arithmetic, gain nothing.
const bool kIntoL2 = fetches_rows_into_l2();

// Always inline: GCC takes a function that only fetches for one without effects, and leaves its calls out.
template <bool widened_integers>
[[gnu::always_inline]] inline void fetch(const std::uint8_t* p) {
    if (!widened_integers && kIntoL2) {
        __builtin_prefetch(p, 0, 2);
    } else {
        __builtin_prefetch(p, 0, 0);
    }
}

// Keys or values of a run: rows `row_bytes` apart. For integers, each group of `group` columns has scales and
// minimums, float32 [G, stride] each. Floats are one group without them. `ahead`: the rows that are read next, or null.
struct Cached {
    const std::uint8_t* data;
    std::size_t row_bytes;
    int group;
    const float *scales = nullptr, *minimums = nullptr;
    int stride = 0;
    const std::uint8_t* ahead = nullptr;

    // What to fetch while row `token` of `count` is read: the row kFetchBytes further on, of those that are read next
    // too.
    const std::uint8_t* fetched(int token, int count) const {
        if (ahead == nullptr) return nullptr;
        const int further = token + std::min(static_cast<int>(kFetchBytes / row_bytes), count);
        return further < count ? data + std::size_t(further) * row_bytes
                               : ahead + std::size_t(further - count) * row_bytes;
    }
};

// Vectors of 16 columns that are read together.
template <Kind kind>
constexpr int kVectors = kind == Kind::kInt4 ? 2 : 1;

// Bytes of 16 columns.
template <Kind kind>
constexpr std::size_t kVectorBytes = kind == Kind::kFloat32 ? 64
                                     : kind == Kind::kInt8  ? 16
                                     : kind == Kind::kInt4  ? 8
                                                            : 32;

// Columns that are read together go a register at a time: kSteps registers' steps for each. Step s has the columns
// from column_of(s) on, kLanes of them, and where codes are nibbles as many 16 columns further. Its bytes lie at
// byte_of(s) of a row.
constexpr int kSteps = 16 / kLanes;
template <Kind kind>
constexpr int column_of(int step) {
    return step / kSteps * 16 * kVectors<kind> + step % kSteps * kLanes;
}
template <Kind kind>
constexpr std::size_t byte_of(int step) {
    constexpr std::size_t kRead = kVectorBytes<kind> * kVectors<kind>;
    return std::size_t(step / kSteps) * kRead + std::size_t(step % kSteps) * (kRead / kSteps);
}

// The numbers of a step.
template <Kind kind>
struct Numbers {
    H v[kVectors<kind>];
};

// Reads a step of a token's row, from its bytes on, with the scale and minimum of its group.
template <Kind kind>
[[gnu::always_inline]] inline Numbers<kind> read(const std::uint8_t* row, const float* scale, const float* minimum) {
    Numbers<kind> x;
    if constexpr (kind == Kind::kInt8) {
        x.v[0] = h_fma(h_bytes(row), h_set(*scale), h_set(*minimum));
    } else if constexpr (kind == Kind::kInt4) {
        h_nibbles(row, h_set(*scale), h_set(*minimum), x.v[0], x.v[1]);
    } else if constexpr (kind == Kind::kFloat32) {
        x.v[0] = h_load(reinterpret_cast<const float*>(row));
    } else {
        x.v[0] = kind == Kind::kFloat16 ? h_half(row) : h_bf16(row);
    }
    return x;
}

// Widens row `token`, of `count` columns, to float32 [width], `width` being attend_width(). What follows the columns
// are zeros of floats, and numbers of integers, whose rows are padded.
template <Kind kind>
inline void widen_row(const Cached& rows, int token, int count, int width, float* to) {
    const std::uint8_t* const row = rows.data + std::size_t(token) * rows.row_bytes;
    for (int step = 0; column_of<kind>(step) < width; ++step) {
        const int column = column_of<kind>(step), factors = column / rows.group * rows.stride + token;
        const std::uint8_t* from = row + byte_of<kind>(step);
        alignas(64) std::uint8_t tail[64];
        if (!quantised(kind) && column + kLanes > count) {  // the bytes that follow may be anything, NaN too
            std::memset(tail, 0, sizeof tail);
            if (column < count) std::memcpy(tail, from, std::size_t(count - column) * (kVectorBytes<kind> / 16));
            from = tail;
        }
        const Numbers<kind> x = read<kind>(from, rows.scales + factors, rows.minimums + factors);
        for (int v = 0; v < kVectors<kind>; ++v) h_store(to + column + 16 * v, x.v[v]);
    }
}

// Widens scales and minimums of `count` tokens from `slot` on to float32 [2 G, stride].
inline void widen_factors(const KvCache& cache, const std::uint8_t* block, int slot, int count, int stride, float* to) {
    for (int g = 0; g < 2 * cache.groups(); ++g, to += stride) {
        const std::uint8_t* from = block + cache.scale_at(g, slot);  // minimums follow the last group's scales
        for (int i = 0; i < count; i += 16) f_store(to + i, f_half(from + 2 * i));
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
