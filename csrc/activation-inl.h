// Activation functions for one instruction set, 16 numbers at a time, without library calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// e^x to 2 units in the last place: x = n ln 2 + r with |r| ≤ ln 2 / 2. A polynomial gives e^r, and n goes into the
// exponent.
inline float exp_of(float x) {
    x = std::min(std::max(x, -87.0F), 88.0F);
    const float n = (x * 1.44269504F + 12582912.0F) - 12582912.0F;
    const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
    float y = 1.9875691500e-4F;
    y = y * r + 1.3981999507e-3F;
    y = y * r + 8.3334519073e-3F;
    y = y * r + 4.1665795894e-2F;
    y = y * r + 1.6666665459e-1F;
    y = y * r + 5.0000001201e-1F;
    y = y * r * r + r + 1.0F;
    const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return y * power;
}

// e^x of 16 numbers at once. It is 0 below -87, and NaN stays NaN.
inline F f_exp(F x) {
    const F z = f_min(f_set(88.0F), x);  // what lies far below -87 makes nonsense, which the last line drops
    const F n = f_whole(f_mul(z, f_set(1.44269504F)));
    const F r = f_fma(n, f_set(2.12194440e-4F), f_fma(n, f_set(-0.693359375F), z));
    F y = f_set(1.9875691500e-4F);
    for (const float next :
         {1.3981999507e-3F, 8.3334519073e-3F, 4.1665795894e-2F, 1.6666665459e-1F, 5.0000001201e-1F}) {
        y = f_fma(y, r, f_set(next));
    }
    y = f_fma(f_mul(y, r), r, f_add(r, f_set(1.0F)));
    return f_unless_below(x, -87.0F, f_scaled(y, n));
}

// tanh x = 1 - 2 / (e^2x + 1), with an error of at most 1e-7.
inline F f_tanh(F x) {
    const F one = f_set(1.0F);
    return f_add(one, f_div(f_set(-2.0F), f_add(f_exp(f_add(x, x)), one)));
}

inline F f_sigmoid(F x) {
    const F one = f_set(1.0F);
    return f_div(one, f_add(one, f_exp(f_mul(x, f_set(-1.0F)))));
}

// The error function by Abramowitz and Stegun 7.1.26, as in the reference.
inline F f_erf(F x) {
    const F one = f_set(1.0F), z = f_abs(x), t = f_div(one, f_fma(f_set(0.3275911F), z, one));
    F series = f_set(1.061405429F);
    for (const float next : {-1.453152027F, 1.421413741F, -0.284496736F, 0.254829592F}) {
        series = f_fma(series, t, f_set(next));
    }
    const F rest = f_mul(f_mul(series, t), f_exp(f_mul(f_mul(z, z), f_set(-1.0F))));
    return f_with_sign(f_add(one, f_mul(rest, f_set(-1.0F))), x);
}

// out [count] = f(x), multiplied by `times` where given. `count` is a multiple of 16. The loop is vectorised by hand,
// since `out` is often `times`, and then a compiler's own loops are scalar.
template <class Function>
inline void each(Function f, const float* x, const float* times, float* out, int count) {
    for (int i = 0; i < count; i += 16) {
        const F y = f(f_load(x + i));
        f_store(out + i, times != nullptr ? f_mul(y, f_load(times + i)) : y);
    }
}

constexpr float kSwigluLimit = 7.0F;  // of gpt-oss: gates above it, and ups beyond ± it, count as it

// act(gate) times up, of 16 neurons, where `gate` is activated already.
inline F times_gate(Activation kind, F gate, F up) {
    if (kind != Activation::kSwigluClamped) return f_mul(gate, up);
    const F near = f_min(f_set(kSwigluLimit), f_max(f_set(-kSwigluLimit), up));
    return f_mul(gate, f_add(near, f_set(1.0F)));
}

// out [count] = act(x), multiplied by `times` where given. `out` may be `x` or `times`.
inline void activate(Activation kind, const float* x, const float* times, float* out, int count) {
    switch (kind) {
        case Activation::kSilu:
            return each([](F v) { return f_mul(v, f_sigmoid(v)); }, x, times, out, count);
        case Activation::kGelu:
            return each(
                [](F v) {
                    const F half = f_mul(v, f_set(0.5F));
                    return f_fma(half, f_erf(f_mul(v, f_set(0.70710678F))), half);
                },
                x, times, out, count);
        case Activation::kGeluTanh:
            // tanh(u) = 2 sigmoid(2u) - 1, so 0.5 v (1 + tanh u) = v sigmoid(2u).
            return each(
                [](F v) {
                    const F cube = f_mul(f_mul(v, v), v);
                    return f_mul(v, f_sigmoid(f_mul(f_set(1.59576912F), f_fma(f_set(0.044715F), cube, v))));
                },
                x, times, out, count);
        case Activation::kSwigluClamped:
            return each(
                [](F v) {
                    const F low = f_min(f_set(kSwigluLimit), v);
                    return f_mul(low, f_sigmoid(f_mul(f_set(1.702F), low)));
                },
                x, times, out, count);
        case Activation::kGeluQuick:
            return each([](F v) { return f_mul(v, f_sigmoid(f_mul(f_set(1.702F), v))); }, x, times, out, count);
        case Activation::kRelu:
            return each([](F v) { return f_max(f_zero(), v); }, x, times, out, count);
        case Activation::kRelu2:
            return each(
                [](F v) {
                    const F kept = f_max(f_zero(), v);
                    return f_mul(kept, kept);
                },
                x, times, out, count);
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
