#include "demand.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

namespace penstock {

Demand::Demand(int layer, std::shared_ptr<ExpertCache> cache, ExpertsOp op, std::vector<std::byte*> slots,
               std::vector<ExpertHome> homes, std::shared_ptr<Sums> sums, ReadAhead ahead, bool poisoned)
    : layer_(layer),
      cache_(std::move(cache)),
      op_(std::move(op)),
      slots_(std::move(slots)),
      homes_(std::move(homes)),
      sums_(std::move(sums)),
      ahead_(std::move(ahead)),
      poisoned_(poisoned),
      expert_bytes_(std::int64_t(op_.per_expert) * std::int64_t(op_.stride)) {}

void Demand::check(int expert) const {
    if (expert < 0 || std::size_t(expert) >= homes_.size()) throw std::invalid_argument("there is no such expert");
}

void Demand::begin() {
    ahead_.begin();
    loaded_bytes_ = 0;
    computed_.clear();
    loaded_.clear();
}

void Demand::give(std::vector<int> experts) {
    for (const int expert : experts) check(expert);
    if (!experts.empty() && experts.size() != std::size_t(op_.t * op_.active)) {
        throw std::invalid_argument("each row has so many experts as are active");
    }
    given_ = std::move(experts);
}

void Demand::give_guess(std::vector<std::vector<int>> experts) {
    for (const auto& row : experts) {
        for (const int expert : row) check(expert);
    }
    given_guess_ = std::move(experts);
}

void Demand::ask() {
    std::int32_t* const ids = op_.routes.ids();
    std::copy(given_.begin(), given_.end(), ids);
    given_.clear();
    said_.assign(ids, ids + op_.t * op_.active);
    std::vector<int> wanted(said_.begin(), said_.end());
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    cache_->ask(wanted);
    present_.clear();
    std::vector<Coming> ahead = std::exchange(coming_, {});
    for (Coming& coming : ahead) (contains(wanted, coming.expert) ? coming_ : wrong_).push_back(std::move(coming));
    std::vector<int> missing;
    for (const int expert : wanted) {
        if (cache_->slot(expert) < 0) {
            missing.push_back(expert);
        } else if (std::none_of(coming_.begin(), coming_.end(), [&](const Coming& c) { return c.expert == expert; })) {
            present_.push_back(expert);
        }
    }
    for (const int expert : missing) {
        const int slot = cache_->admit(expert, wanted);
        if (slot < 0) throw std::logic_error("a cache has fewer slots than a pass wants experts");
        load(expert, slot);
    }
}

void Demand::guess(const Routes& routes, int guesses) {
    const std::int32_t* const ids = routes.ids();
    const float* const weights = routes.weights(op_.t, op_.active);
    guessed_ = std::exchange(given_guess_, {});
    for (int row = 0; guessed_.size() < std::size_t(op_.t); ++row) {  // where none were given
        const std::ptrdiff_t at = std::ptrdiff_t(row) * op_.active;
        std::vector<int> order(static_cast<std::size_t>(op_.active));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int one, int other) {
            const float a = weights[at + one], b = weights[at + other];
            return a > b || (std::isnan(b) && !std::isnan(a));
        });
        for (int& expert : order) expert = ids[at + expert];
        guessed_.push_back(std::move(order));
    }
    std::vector<int> likely;
    for (const auto& row : guessed_) {
        for (const int expert : row) {
            if (!contains(likely, expert)) likely.push_back(expert);
        }
    }
    for (const auto& row : guessed_) {
        int left = guesses;
        for (const int expert : row) {
            if (left == 0) break;
            if (cache_->slot(expert) >= 0) continue;
            --left;
            const int slot = cache_->guess(expert, likely);
            if (slot >= 0) load(expert, slot);
        }
    }
}

void Demand::load(int expert, int slot) {
    std::byte* const to = slots_[std::size_t(slot)];
    const ExpertHome& home = homes_[std::size_t(expert)];
    if (poisoned_) {
        // A wrong guess may still be on its way to this slot.
        for (const Coming& wrong : wrong_) {
            while (wrong.to == to && !wrong.load->done) wrong.reads->wait(*wrong.load, 0.1);
        }
        std::memset(to, 0xFF, std::size_t(expert_bytes_));
    }
    Expected expected;
    if (sums_ != nullptr) expected = {sums_, home.first_sum, std::int64_t(op_.stride)};
    LoadPtr load = home.reads->start(home.fd, {Run{home.offset, to, expert_bytes_}}, std::move(expected));
    if (load == nullptr) throw std::invalid_argument("the reader is closed");
    loaded_bytes_ += expert_bytes_;
    coming_.push_back({expert, to, home.reads, std::move(load)});
}

void Demand::note(const Coming& coming) {
    const Load& load = *coming.load;
    if (load.error != 0 || load.damaged || load.good != expert_bytes_) throw LoadFailed(layer_, coming.expert, load);
    loaded_.push_back({load.start_s, load.end_s, coming.expert});
}

void Demand::compute_placed(const Compute& compute) {
    if (op_.ids.empty()) return;
    const double start_s = now_s();
    compute(op_);
    computed_.push_back({start_s, now_s(), static_cast<int>(op_.ids.size())});
    op_.ids.clear();
    op_.weights.clear();
}

void Demand::compute(const Compute& compute, const Wait& wait) {
    op_.ids.clear();
    op_.weights.clear();
    const auto place = [&](int expert, const std::byte* at) {
        op_.ids.push_back(expert);
        op_.weights.push_back(reinterpret_cast<const std::uint8_t*>(at));
    };
    for (const int expert : present_) place(expert, slots_[std::size_t(cache_->slot(expert))]);
    for (;;) {
        for (auto coming = coming_.begin(); coming != coming_.end();) {
            if (!coming->load->done.load(std::memory_order_acquire)) {
                ++coming;
                continue;
            }
            note(*coming);  // where it throws, the others are still listed, for `abandon`
            place(coming->expert, coming->to);
            coming = coming_.erase(coming);
        }
        compute_placed(compute);
        if (coming_.empty()) return;
        wait(*coming_.front().reads, *coming_.front().load);
    }
}

void Demand::finish(const Wait& wait) {
    for (auto* const loads : {&coming_, &wrong_}) {
        for (const Coming& coming : *loads) {
            wait(*coming.reads, *coming.load);
            note(coming);
        }
        loads->clear();
    }
}

void Demand::abandon() noexcept {
    for (auto* const loads : {&coming_, &wrong_}) {
        for (const Coming& coming : *loads) {
            while (!coming.load->done.load(std::memory_order_acquire)) coming.reads->wait(*coming.load, 0.1);
        }
        loads->clear();
    }
    given_.clear();
    given_guess_.clear();
}

}  // namespace penstock
