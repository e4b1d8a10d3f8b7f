#include "threads.h"

#include <algorithm>
#include <chrono>

#include "cpu.h"

#ifdef __linux__
#include <sched.h>
#endif

namespace penstock {
namespace {

// How long a worker spins before it sleeps. Between two jobs of a step lie some tens of microseconds of Python. It is
// worth spinning through them, since a worker that sleeps takes longer to come back. A worker with nothing to do for
// longer leaves its core to others. A clock says when, since a pause takes 10 ns on some processors and 50 on others.
constexpr auto kSpin = std::chrono::microseconds(400);
constexpr int kSpinsPerLook = 64;  // pauses between two looks at the clock

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void Pool::wait_while(const std::atomic<std::uint32_t>& value, std::uint32_t old) const {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kSpinsPerLook; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            relax();
        }
    } while (awake_.load(std::memory_order_relaxed) || std::chrono::steady_clock::now() < until);
    value.wait(old, std::memory_order_acquire);
}

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), cpus_(allowed_cpus()) {
    if (cpus_.size() > std::size_t(threads_)) cpus_.resize(std::size_t(threads_));
    for (int id = 1; id < threads_; ++id) {
        workers_.emplace_back([this, id] {
            if (std::size_t(id) < cpus_.size()) run_on({cpus_[std::size_t(id)]});
            serve(id);
        });
    }
}

Pool::~Pool() {
    stop_ = true;
    job_number_.fetch_add(1, std::memory_order_release);
    job_number_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::leave_workers_cpu() const {
#ifdef __linux__
    const int cpu = sched_getcpu();
    if (cpus_.size() < 2 || cpu == cpus_[0] || std::find(cpus_.begin(), cpus_.end(), cpu) == cpus_.end()) return;
    const std::vector<int> before = allowed_cpus();
    if (std::find(before.begin(), before.end(), cpus_[0]) == before.end()) return;
    run_on({cpus_[0]});
    run_on(before);
#endif
}

void Pool::start(Entry entry, const void* job) {
    leave_workers_cpu();
    entry_ = entry;
    job_ = job;
    job_number_.fetch_add(1, std::memory_order_release);
    job_number_.notify_all();
    entry(job, Team(*this, 0, threads_));
    arrive();  // so that `job` outlives its last user
}

void Pool::serve(int id) {
    for (std::uint32_t seen = 0;; ++seen) {
        wait_while(job_number_, seen);
        if (stop_) return;
        entry_(job_, Team(*this, id, threads_));
        arrive();
    }
}

void Pool::arrive() {
    const auto phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.fetch_add(1, std::memory_order_release);
        phase_.notify_all();
    } else {
        wait_while(phase_, phase);
    }
}

}  // namespace penstock
