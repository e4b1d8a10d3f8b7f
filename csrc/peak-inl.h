// Measures the most that the arithmetic units deliver, by chains of products in registers. Included after
// kernels-inl.h.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int kPeakChains =
    kFewRows >= 8 ? 12 : 5;  // enough to hide an instruction's latency, few enough for registers

// Both functions return the number of operations: a multiplication and an addition are two.
std::int64_t float_products(std::int64_t rounds, float* sink) {
    F chains[kPeakChains], x = f_set(sink[0]);
    const F factor = f_set(sink[1]);
    for (F& chain : chains) chain = x;
    for (std::int64_t i = 0; i < rounds; ++i) {
        for (F& chain : chains) chain = f_fma(chain, factor, x);
    }
    for (const F& chain : chains) x = f_add(x, chain);
    sink[0] = f_sum(x);
    return rounds * kPeakChains * kTileRows * 2;
}

std::int64_t int8_products(std::int64_t rounds, float* sink) {
    alignas(64) std::uint8_t bytes[64];
    std::memset(bytes, static_cast<int>(sink[0]), 64);
    const std::uint8_t* volatile from = bytes;  // volatile, so that nothing moves out of the loop
    const std::int8_t four[4] = {1, 2, 3, static_cast<std::int8_t>(sink[1])};
    constexpr int kAgain = 64;
    using Sum = CodeSum<15>;
    Sum chains[kPeakChains];
    for (std::int64_t i = 0; i < rounds; ++i) {
        Line weights = line(from);
#pragma GCC unroll 64
        for (int again = 0; again < kAgain; ++again) {
            for (Sum& chain : chains) {
                weights = l_keep(weights);  // else products that are the same are computed once
                chain.add(weights, four);
            }
            if (Sum::kFull > 0 && (again + 1) % std::max(1, Sum::kFull) == 0) {
                for (Sum& chain : chains) chain.widen();
            }
        }
    }
    I total = i_zero();
    for (const Sum& chain : chains) total = i_add(total, chain.total);
    sink[0] = static_cast<float>(i_sum(total));
    return rounds * kAgain * kPeakChains * kTileRows * 4 * 2;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
