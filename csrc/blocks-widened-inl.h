// Products of activations that are not rounded with weights in the formats of spec/blocks.py, for one instruction set:
// codes are widened to floats, four columns at a time. Included in blocks-inl.h.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

// Bytes as float8 (e4m3, without infinities): a sign, 4 bits of an exponent, 3 of a mantissa. Where 16-bit numbers can
// be looked up, magnitudes are, as bfloat16. Else bits are put where float32 has them. Its exponent is then 120 too
// small, also for numbers below 2^-6, which float32 has below its least normal number too.
struct Float8 {
    std::uint16_t magnitudes[128];

    constexpr Float8() : magnitudes{} {
        for (int code = 1; code < 128; ++code) {
            int exponent = code >> 3, mantissa = code & 7;
            if (exponent == 0) {
                for (exponent = 1; mantissa < 8; --exponent) mantissa *= 2;
            }
            magnitudes[code] = static_cast<std::uint16_t>((exponent + 120) << 7 | (mantissa & 7) << 4);
        }
    }
};
alignas(64) constexpr Float8 kFloat8;

// Columns 0 … 3 of each row's four bytes. A template, so that only what has l_words_of compiles its call.
template <class Bytes>
[[gnu::always_inline]] inline void f_float8s(const Bytes& x, F (&to)[4]) {
    if constexpr (kLooksUpWords) {
        const Line even = l_words_of(x, kFloat8.magnitudes), odd = l_words_of(l_right(x, 8, -1), kFloat8.magnitudes);
        const Line even_signs = l_left(x, 8, std::int32_t(0x80008000U)),
                   odd_signs = l_right(x, 0, std::int32_t(0x80008000U));
        to[0] = f_bf16_even(l_or(even, even_signs)), to[2] = f_bf16_odd(l_or(even, even_signs));
        to[1] = f_bf16_even(l_or(odd, odd_signs)), to[3] = f_bf16_odd(l_or(odd, odd_signs));
    } else {
        constexpr std::int32_t kPlaces = std::int32_t(0x87f00000U);
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {
            const Line top = b < 3 ? l_left(x, 24 - 8 * b, -1) : x;
            to[b] = f_mul(f_bits(l_right_signed(top, 4, kPlaces)), f_set(0x1p120F));
        }
    }
}

// Calls each(column, its numbers of each row, those of the next three columns) for the columns of a tile, four by four.
// What lies `ahead` bytes after a byte is fetched meanwhile.
template <Kind kind, class Each>
[[gnu::always_inline]] inline void widen_blocks(const Matrix& m, const std::uint8_t* p, std::size_t ahead, bool reused,
                                                const Each& each) {
    constexpr Blocks kLayout = blocks_of(kind);
    constexpr int kLines = kLayout.low + kLayout.high;
    const int span = kLayout.span(m.cols);
    for (int c = 0; c < m.cols; c += span) {
        const BlockFactors<kind> factors(p, span);
        p += kLayout.header_bytes(span);
        for (int g = 0; g < span / kBlockGroup; ++g, p += 64 * kLines) {
            for (int l = 0; l < kLines; ++l) prefetch(p + std::size_t(64 * l) + ahead, reused);
#pragma GCC unroll 2
            for (int l = 0; l < 8; ++l) {
                const int column = c + kBlockGroup * g + 4 * l, i = kLayout.scale_of(kBlockGroup * g + 4 * l);
                const F scale = factors.scale[i];
                const Line codes = four_codes<kind>(p, l);
                if constexpr (kind == Kind::kFloat8) {
                    F four[4];
                    f_float8s(codes, four);
                    each(column, f_mul(four[0], scale), f_mul(four[1], scale), f_mul(four[2], scale),
                         f_mul(four[3], scale));
                } else {
                    F minimum;
                    if constexpr (BlockFactors<kind>::kMinimum) {
                        minimum = factors.minimum[i];
                    } else {
                        minimum = f_mul(scale, f_set(static_cast<float>(-kLayout.offset)));
                    }
                    each(column, f_fma(f_byte<0>(codes), scale, minimum), f_fma(f_byte<1>(codes), scale, minimum),
                         f_fma(f_byte<2>(codes), scale, minimum), f_fma(f_byte<3>(codes), scale, minimum));
                }
            }
        }
    }
}

// sums += tiles · x. Even and odd columns have sums of their own, as in dot_float. The compiler knows which is which:
// while a column's number chose one of two, sums lay in memory, and one row took four times as long.
template <Kind kind, int n>
void dot_widened(const Matrix& m, const Series& series, const Operand& x, Sums<n, 1>& out) {
    for (int i = 0; i < series.count; ++i) {
        F even[n], odd[n];
        for (int r = 0; r < n; ++r) even[r] = odd[r] = f_zero();
        const float* const a = x.f + std::ptrdiff_t(i) * m.cols * n;
        const std::uint8_t* const p = series.first + std::size_t(i) * series.stride;
        widen_blocks<kind>(m, p, series.ahead, series.reused, [&](int column, F w0, F w1, F w2, F w3) {
            const float* const at = a + column * n;
            for (int r = 0; r < n; ++r) {
                even[r] = f_fma(w0, f_set(at[r]), even[r]);
                odd[r] = f_fma(w1, f_set(at[n + r]), odd[r]);
                even[r] = f_fma(w2, f_set(at[2 * n + r]), even[r]);
                odd[r] = f_fma(w3, f_set(at[3 * n + r]), odd[r]);
            }
        });
        for (int r = 0; r < n; ++r) out.at[r][0] = f_add(out.at[r][0], f_add(even[r], odd[r]));
    }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
