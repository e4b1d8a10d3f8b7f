// Products of one tile of weights with a few rows of activations, for one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Rows of activations multiplied with a tile at once. Eight int8 chains fill the registers of AVX-512 without a spill,
// and amortise unpacking nibbles (3 instructions for every 16 dot products).
constexpr int kRows = 8;

// Activations as the kernels read them. For float weights the rows as they are; for integer weights padded to whole
// groups, granule by granule: int8 with a scale per group, or (exact) float32; either with the sum of each group.
struct Rows {
    const float* f = nullptr;
    const std::int8_t* q = nullptr;
    std::ptrdiff_t stride = 0;  // elements of f or q from row to row
    const float* scale = nullptr;
    const float* sum = nullptr;
    std::ptrdiff_t group_stride = 0;

    // Seen from the first column and group of a later granule.
    Rows at(int columns, int groups) const {
        Rows r = *this;
        if (r.f != nullptr) r.f += columns;
        if (r.q != nullptr) r.q += columns;
        if (r.scale != nullptr) r.scale += groups;
        if (r.sum != nullptr) r.sum += groups;
        return r;
    }
};

template <int n>
void dot_float(const Matrix& m, const std::uint8_t* p, const Rows& x, std::ptrdiff_t row, F* acc) {
    // Two chains per row, even and odd columns: one fused multiply-add waits 4 cycles for the one before it.
    F even[n], odd[n];
    for (int r = 0; r < n; ++r) even[r] = odd[r] = f_zero();
    const float* a = x.f + row * x.stride;
    int c = 0;
    for (; c + 1 < m.cols; c += 2) {
        F w0, w1;
        if (m.kind == Kind::kBfloat16) {
            const Line both = line(p + std::size_t(c) * 32);
            w0 = f_bf16_even(both), w1 = f_bf16_odd(both);
        } else if (m.kind == Kind::kFloat16) {
            w0 = f_half(p + std::size_t(c) * 32), w1 = f_half(p + std::size_t(c) * 32 + 32);
        } else {
            w0 = f_load(p + std::size_t(c) * 64), w1 = f_load(p + std::size_t(c) * 64 + 64);
        }
        for (int r = 0; r < n; ++r) {
            even[r] = f_fma(w0, f_set(a[r * x.stride + c]), even[r]);
            odd[r] = f_fma(w1, f_set(a[r * x.stride + c + 1]), odd[r]);
        }
    }
    if (c < m.cols) {
        F w;
        if (m.kind == Kind::kBfloat16) {
            w = f_bf16_even(line(p + std::size_t(c) * 32));
        } else if (m.kind == Kind::kFloat16) {
            w = f_half(p + std::size_t(c) * 32);
        } else {
            w = f_load(p + std::size_t(c) * 64);
        }
        for (int r = 0; r < n; ++r) even[r] = f_fma(w, f_set(a[r * x.stride + c]), even[r]);
    }
    for (int r = 0; r < n; ++r) acc[r] = f_add(even[r], odd[r]);
}

// Σ groups: (Σ code · q) · (scale · x scale) + minimum · x sum.
template <int n, bool int4>
void dot_int8(const Matrix& m, const std::uint8_t* p, const Rows& x, std::ptrdiff_t row, F* acc) {
    const int lines = m.group / (int4 ? 8 : 4);
    for (int r = 0; r < n; ++r) acc[r] = f_zero();
    for (int j = 0; j < m.groups(); ++j) {
        const std::int8_t* a = x.q + row * x.stride + std::ptrdiff_t(j) * m.group;
        I even[n], odd[n];
        for (int r = 0; r < n; ++r) even[r] = odd[r] = i_zero();
        for (int i = 0; i < lines; ++i, p += 64) {
            const Line w = line(p);
            if constexpr (int4) {
                const Line low = low_nibbles(w), high = high_nibbles(w);
                for (int r = 0; r < n; ++r) {
                    even[r] = i_dot(even[r], low, a + r * x.stride + 8 * i);
                    odd[r] = i_dot(odd[r], high, a + r * x.stride + 8 * i + 4);
                }
            } else {
                for (int r = 0; r < n; ++r) even[r] = i_dot(even[r], w, a + r * x.stride + 4 * i);
            }
        }
        const F scale = f_half(p), minimum = f_half(p + 32);
        p += 64;
        for (int r = 0; r < n; ++r) {
            const std::ptrdiff_t at = (row + r) * x.group_stride + j;
            const I whole = int4 ? i_add(even[r], odd[r]) : even[r];
            acc[r] = f_fma(f_from(whole), f_mul(scale, f_set(x.scale[at])), acc[r]);
            acc[r] = f_fma(minimum, f_set(x.sum[at]), acc[r]);
        }
    }
}

// The same without rounding activations: Σ groups: (Σ code · x) · scale + minimum · x sum.
template <int n, bool int4>
void dot_exact(const Matrix& m, const std::uint8_t* p, const Rows& x, std::ptrdiff_t row, F* acc) {
    const int lines = m.group / (int4 ? 8 : 4);
    for (int r = 0; r < n; ++r) acc[r] = f_zero();
    for (int j = 0; j < m.groups(); ++j) {
        const float* a = x.f + row * x.stride + std::ptrdiff_t(j) * m.group;
        F even[n], odd[n];
        for (int r = 0; r < n; ++r) even[r] = odd[r] = f_zero();
        const auto four = [&](Line w, int column) {
            const F w0 = f_byte<0>(w), w1 = f_byte<1>(w), w2 = f_byte<2>(w), w3 = f_byte<3>(w);
            for (int r = 0; r < n; ++r) {
                const float* b = a + r * x.stride + column;
                even[r] = f_fma(w0, f_set(b[0]), even[r]);
                odd[r] = f_fma(w1, f_set(b[1]), odd[r]);
                even[r] = f_fma(w2, f_set(b[2]), even[r]);
                odd[r] = f_fma(w3, f_set(b[3]), odd[r]);
            }
        };
        for (int i = 0; i < lines; ++i, p += 64) {
            const Line w = line(p);
            if constexpr (int4) {
                four(low_nibbles(w), 8 * i);
                four(high_nibbles(w), 8 * i + 4);
            } else {
                four(w, 4 * i);
            }
        }
        const F scale = f_half(p), minimum = f_half(p + 32);
        p += 64;
        for (int r = 0; r < n; ++r) {
            const std::ptrdiff_t at = (row + r) * x.group_stride + j;
            acc[r] = f_fma(f_add(even[r], odd[r]), scale, acc[r]);
            acc[r] = f_fma(minimum, f_set(x.sum[at]), acc[r]);
        }
    }
}

template <int n>
void dot(const Matrix& m, const std::uint8_t* p, const Rows& x, std::ptrdiff_t row, F* acc) {
    if (!m.quantised()) {
        dot_float<n>(m, p, x, row, acc);
    } else if (x.q != nullptr) {
        m.kind == Kind::kInt4 ? dot_int8<n, true>(m, p, x, row, acc) : dot_int8<n, false>(m, p, x, row, acc);
    } else {
        m.kind == Kind::kInt4 ? dot_exact<n, true>(m, p, x, row, acc) : dot_exact<n, false>(m, p, x, row, acc);
    }
}

// sink(row, 16 outputs) for every row of x with one tile.
template <class Sink>
void tile_rows(const Matrix& m, const std::uint8_t* tile, const Rows& x, int t, const Sink& sink) {
    F acc[kRows];
    int row = 0;
    const auto step = [&]<int n>() {
        for (; row + n <= t; row += n) {
            dot<n>(m, tile, x, row, acc);
            for (int r = 0; r < n; ++r) sink(row + r, acc[r]);
        }
    };
    step.template operator()<kRows>();
    step.template operator()<4>();
    step.template operator()<2>();
    step.template operator()<1>();
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
