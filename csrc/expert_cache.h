// The cache of a layer's experts, as graph/cache.py defines it: the same requests lead to the same slots. A test
// compares the two. This one decides without Python, while a pass runs.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

namespace penstock {

inline bool contains(const std::vector<int>& experts, int expert) {
    return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

class ExpertCache {
  public:
    // `least_used`: the policy "lfu", else "lru".
    ExpertCache(int slots, bool least_used);

    int slots() const { return slots_; }
    bool least_used() const { return least_used_; }
    // The expert in each slot; -1: none.
    const std::vector<int>& held() const { return held_; }
    // The slot of an expert; -1: it is missing.
    int slot(int expert) const;
    void ask(std::vector<int> experts);
    // The slot that a missing expert takes; -1 where all hold experts to `keep`. `first`: leave before all others.
    int admit(int expert, const std::vector<int>& keep, const std::vector<int>& first = {});
    int guess(int expert, const std::vector<int>& keep);

  private:
    static constexpr double kNever = -std::numeric_limits<double>::infinity();

    void know(int expert);   // makes room for its number
    void touch(int expert);  // it is the latest used
    int take(int expert, const std::vector<int>& keep, const std::vector<int>& first);
    std::optional<int> leaving(const std::vector<int>& keep, const std::vector<int>& first) const;

    int slots_;
    bool least_used_;
    int filled_ = 0;            // slots [0, filled_) hold experts
    std::vector<int> held_;     // slot → expert
    std::vector<int> slot_of_;  // expert → slot or -1
    std::vector<double> uses_;  // expert → log2 of its uses, as in graph/cache.py
    std::vector<int> by_age_;   // "lru": experts that are held, the longest unused first
    std::vector<int> asked_;    // by the latest pass, upwards
    std::vector<int> guessed_;  // for the coming pass
    double now_ = 0;            // passes so far
};

}  // namespace penstock
