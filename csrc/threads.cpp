#include "threads.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace penstock {
namespace {

// Spins before a worker sleeps: about 0.4 ms. Between two jobs of a step lie some tens of microseconds of Python. It is
// worth spinning through them, since a worker that sleeps takes longer to come back. A worker with nothing to do for
// longer leaves its core to others.
constexpr int kSpins = 40000;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void wait_while(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        relax();
    }
    value.wait(old, std::memory_order_acquire);
}

void pin(std::thread& thread, int nth) {
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed) || seen++ != nth) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
        return;
    }
#else
    (void)thread, (void)nth;
#endif
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
    for (int id = 1; id < threads_; ++id) {
        workers_.emplace_back([this, id] { serve(id); });
        pin(workers_.back(), id);
    }
}

Pool::~Pool() {
    stop_ = true;
    job_number_.fetch_add(1, std::memory_order_release);
    job_number_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::start(Entry entry, const void* job) {
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
