// The router of an FFN with experts, for one instruction set: each row's experts and their weights. Included after
// ffn-inl.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace penstock::PENSTOCK_ISA {
namespace {

inline float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

// Turns the router's outputs [X] into scores in place, by softmax or sigmoid. Returns false if one is no finite number.
inline bool score(const RouterShape& shape, float* scores, int experts) {
    float most = scores[0];
    for (int i = 0; i < experts; ++i) {
        if (!std::isfinite(scores[i])) return false;
        most = std::max(most, scores[i]);
    }
    if (!shape.softmax) {
        for (int i = 0; i < experts; ++i) scores[i] = sigmoid(scores[i]);
        return true;
    }
    float total = 0;
    for (int i = 0; i < experts; ++i) total += scores[i] = std::exp(scores[i] - most);
    for (int i = 0; i < experts; ++i) scores[i] /= total;
    return true;
}

// Sets ranked [X] to -inf outside of the groups that are kept: those with the largest sums of their two best. Of equal
// groups the first is kept.
inline void keep_groups(const RouterShape& shape, float* ranked, int experts) {
    const int per_group = experts / shape.groups;
    std::vector<float> sums(static_cast<std::size_t>(shape.groups));
    for (int g = 0; g < shape.groups; ++g) {
        float best = -INFINITY, second = -INFINITY;
        for (int i = g * per_group; i < (g + 1) * per_group; ++i) {
            second = std::max(second, std::min(best, ranked[i]));
            best = std::max(best, ranked[i]);
        }
        sums[std::size_t(g)] = best + second;
    }
    for (int dropped = shape.groups; dropped > shape.groups_kept; --dropped) {
        int worst = 0;
        for (int g = 1; g < shape.groups; ++g) worst = sums[std::size_t(g)] <= sums[std::size_t(worst)] ? g : worst;
        sums[std::size_t(worst)] = INFINITY;
        std::fill_n(ranked + worst * per_group, per_group, -INFINITY);
    }
}

// Chooses the experts of one row by its scores [X], which are overwritten. Writes ids [A] in rising order and their
// weights [A]. `ranked` [X]: room.
inline void choose(const RouterShape& shape, float* scores, float* ranked, int experts, std::int32_t* ids,
                   float* weights) {
    const int active = shape.active;
    for (int i = 0; shape.bias_scored && i < experts; ++i) scores[i] += shape.bias[i];
    if (!score(shape, scores, experts)) {  // NaN weights, so that damage shows in the logits
        for (int i = 0; i < active; ++i) ids[i] = i, weights[i] = NAN;
        return;
    }
    const bool biased = shape.bias != nullptr && !shape.bias_scored;
    for (int i = 0; i < experts; ++i) ranked[i] = biased ? scores[i] + shape.bias[i] : scores[i];
    if (shape.groups > 1) keep_groups(shape, ranked, experts);
    for (int i = 0; i < active; ++i) {
        ids[i] = static_cast<std::int32_t>(std::max_element(ranked, ranked + experts) - ranked);  // the first of equals
        ranked[ids[i]] = -INFINITY;
    }
    std::sort(ids, ids + active);
    float total = 0;
    for (int i = 0; i < active; ++i) total += weights[i] = scores[ids[i]];
    // Scores may all round to 0; then so do the weights (transformers' Glm4MoeTopkRouter adds the same).
    const float by = shape.normalised ? total + 1e-20F : 1.0F;
    for (int i = 0; i < active; ++i) weights[i] = weights[i] / by * shape.scale;
}

bool route(Pool& pool, const RouteOp& op) {
    const RouterShape& shape = op.shape;
    const int experts = shape.scores.rows, t = op.t;
    Scratch scratch = op.scratch;
    const std::size_t x = std::size_t(experts);
    auto* scores = take<float>(scratch, x * std::size_t(t));
    auto* ranked = take<float>(scratch, x);
    if (scores == nullptr || ranked == nullptr) return false;
    float* const weights = op.routes.weights(t, shape.active);
    float* const shared = op.routes.shared(t, shape.active);
    const auto product = [&](const Matrix& m, float* to) {
        Scratch left = scratch;
        const Granules granule{op.weights, 1, 0};
        return multiply(pool, granule, m, op.h, m.cols, t, m.rows, true, left,
                        [&](const Team&, int row, int column, F y, int count) {
                            store_some(to + std::ptrdiff_t(row) * m.rows + column, y, count);
                        });
    };
    if (!product(shape.scores, scores)) return false;
    for (int row = 0; row < t; ++row) {
        const std::ptrdiff_t at = std::ptrdiff_t(row) * shape.active;
        choose(shape, scores + std::ptrdiff_t(row) * experts, ranked, experts, op.routes.ids() + at, weights + at);
    }
    if (shape.gate.rows == 0) {
        std::fill_n(shared, t, 1.0F);
        return true;
    }
    if (!product(shape.gate, shared)) return false;
    for (int row = 0; row < t; ++row) shared[row] = sigmoid(shared[row]);
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
