// The softmax of attention, block by block, for one instruction set. Included after kernels-inl.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "scratch.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// The running softmax of one query: the largest score so far and the sum of weights. A sink is a score that was seen
// before all others, with a value of 0.
struct Running {
    float best, weight;
};

// scores [n] become softcap · tanh(score / softcap).
inline void cap(float* scores, int n, float softcap) {
    const F inverse = f_set(1.0F / softcap);
    for (int i = 0; i < n; i += 16) {
        f_store(scores + i, f_mul(f_tanh(f_mul(f_load(scores + i), inverse)), f_set(softcap)));
    }
}

// Hides the scores of a block outside [oldest, seen).
inline void hide_beyond(float* scores, int oldest, int seen) {
    std::fill(scores + seen, scores + kBlockTokens, -INFINITY);
    std::fill(scores, scores + std::min(oldest, kBlockTokens), -INFINITY);
}

// As `soften`, where no score so far is a number above -inf.
[[gnu::noinline]] inline float soften_unseen(float* scores, Running& run) {
    I most_bits = i_zero();
    for (int i = 0; i < kBlockTokens; i += 16) most_bits = i_max(most_bits, i_magnitude(f_load(scores + i)));
    std::fill_n(scores, kBlockTokens, 0.0F);
    if (i_max_of(most_bits) <= 0x7f800000) return 1.0F;
    run.weight = scores[0] = NAN;
    return NAN;
}

// Turns the 256 scores of a block into weights. Returns the factor by which earlier sums shrink. Hidden scores are
// -inf.
inline float soften(float* scores, Running& run) {
    F peaks = f_load(scores);
    for (int i = 16; i < kBlockTokens; i += 16) peaks = f_max(peaks, f_load(scores + i));
    // f_max may lose a NaN, but a row that met one must stay NaN. Weights of it are NaN, and so is their sum.
    const float peak = std::max(run.best, f_max_of(peaks));
    if (std::isinf(peak) && peak < 0) return soften_unseen(scores, run);
    const float shrink = peak == run.best ? 1.0F : std::isinf(run.best) ? 0.0F : exp_of(run.best - peak);
    F total = f_zero();
    for (int i = 0; i < kBlockTokens; i += 16) {
        const F weight = f_exp(f_add(f_load(scores + i), f_set(-peak)));
        f_store(scores + i, weight);
        total = f_add(total, weight);
    }
    run.weight = run.weight * shrink + f_sum(total);
    run.best = peak;
    return shrink;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
