#include "expert_cache.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace penstock {
namespace {

constexpr double kHalfLife = 64.0;  // passes: HALF_LIFE of graph/cache.py

}  // namespace

ExpertCache::ExpertCache(int slots, bool least_used)
    : slots_(slots), least_used_(least_used), held_(static_cast<std::size_t>(slots), -1) {}

int ExpertCache::slot(int expert) const {
    return std::size_t(expert) < slot_of_.size() ? slot_of_[std::size_t(expert)] : -1;
}

void ExpertCache::know(int expert) {
    if (std::size_t(expert) < slot_of_.size()) return;
    slot_of_.resize(std::size_t(expert) + 1, -1);
    uses_.resize(std::size_t(expert) + 1, kNever);
}

void ExpertCache::touch(int expert) {
    const auto at = std::find(by_age_.begin(), by_age_.end(), expert);
    if (at != by_age_.end()) std::rotate(at, at + 1, by_age_.end());
}

void ExpertCache::ask(std::vector<int> experts) {
    now_ += 1;
    std::sort(experts.begin(), experts.end());
    asked_ = std::move(experts);
    for (const int expert : asked_) know(expert);
    if (least_used_) {
        const double use = now_ / kHalfLife;
        for (const int expert : asked_) {
            double& uses = uses_[std::size_t(expert)];
            uses = use + std::log2(1 + std::exp2(uses - use));
        }
    } else {
        std::vector<int> order;  // wrong guesses leave first
        for (const int expert : guessed_) {
            if (!contains(asked_, expert)) order.push_back(expert);
        }
        const std::size_t wrong = order.size();
        for (const int expert : by_age_) {
            if (!std::count(order.begin(), order.begin() + std::ptrdiff_t(wrong), expert)) order.push_back(expert);
        }
        by_age_ = std::move(order);
        for (const int expert : asked_) touch(expert);
    }
    guessed_.clear();
}

int ExpertCache::admit(int expert, const std::vector<int>& keep, const std::vector<int>& first) {
    const int slot = take(expert, keep, first);
    if (slot < 0 || least_used_) return slot;
    for (const int later : asked_) {
        if (later > expert) touch(later);
    }
    return slot;
}

int ExpertCache::guess(int expert, const std::vector<int>& keep) {
    const int slot = take(expert, keep, {});
    if (slot >= 0) guessed_.push_back(expert);
    return slot;
}

int ExpertCache::take(int expert, const std::vector<int>& keep, const std::vector<int>& first) {
    know(expert);
    int slot = filled_;
    if (filled_ < slots_) {
        ++filled_;
    } else {
        const std::optional<int> leaves = leaving(keep, first);
        if (!leaves) return -1;
        slot = std::exchange(slot_of_[std::size_t(*leaves)], -1);
        std::erase(by_age_, *leaves);
    }
    held_[std::size_t(slot)] = expert;
    slot_of_[std::size_t(expert)] = slot;
    if (!least_used_) by_age_.push_back(expert);
    return slot;
}

std::optional<int> ExpertCache::leaving(const std::vector<int>& keep, const std::vector<int>& first) const {
    std::optional<int> found;
    const auto sooner = [&](int one, int other) {
        const double a = uses_[std::size_t(one)], b = uses_[std::size_t(other)];
        return a != b ? a < b : one < other;
    };
    for (const int expert : least_used_ ? held_ : by_age_) {
        if (contains(keep, expert) || (!first.empty() && !contains(first, expert))) continue;
        if (!least_used_) return expert;
        if (!found || sooner(expert, *found)) found = expert;
    }
    return found || first.empty() ? found : leaving(keep, {});
}

}  // namespace penstock
