// A small pool of threads of our own. The caller works too, workers are pinned, and to wait is a short spin and then a
// sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace penstock {

class Pool;

// One thread's view of a job: which thread it is, of how many, and a barrier for all of them.
class Team {
  public:
    Team(Pool& pool, int id, int size) : pool_(pool), id_(id), size_(size) {}
    int id() const { return id_; }
    int size() const { return size_; }
    void barrier() const;
    // This thread's part [first, last) of [0, total). No result depends on which thread computes it.
    std::pair<int, int> share(int total) const {
        const auto n = static_cast<std::int64_t>(size_);
        return {static_cast<int>(total * static_cast<std::int64_t>(id_) / n),
                static_cast<int>(total * (static_cast<std::int64_t>(id_) + 1) / n)};
    }

  private:
    Pool& pool_;
    int id_, size_;
};

class Pool {
  public:
    // Workers are pinned to CPUs of the affinity mask, from its second on. The caller stays where the system puts it,
    // unless that is a worker's CPU when a job begins: then it moves to the first CPU of the mask. A caller that has
    // waited for a disk wakes on any CPU, and a worker that shares it gets its turn after 2 ms.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Whether workers spin until there is a job, however long that takes. For someone who waits for what comes within a
    // millisecond, often: a worker that sleeps comes 50 µs late.
    void stay_awake(bool awake) { awake_.store(awake, std::memory_order_relaxed); }

    // Calls work(team) on every thread and returns when all are done. It is not re-entrant, and `work` must not throw.
    // `cost`: about how many bytes of weights or KV the job walks through, once per four rows. A job of a few
    // microseconds is done by the caller alone: where another process holds a core, every barrier waits for that core's
    // next turn.
    template <class Work>
    void run(std::size_t cost, const Work& work) {
        if (threads_ == 1 || cost < kAlone) {
            work(Team(*this, 0, 1));
        } else {
            start([](const void* job, const Team& team) { (*static_cast<const Work*>(job))(team); }, &work);
        }
    }

  private:
    friend class Team;
    using Entry = void (*)(const void* job, const Team& team);
    static constexpr std::size_t kAlone = std::size_t{512} << 10;  // 20 µs of one core

    void start(Entry entry, const void* job);
    void leave_workers_cpu() const;
    void serve(int id);
    void arrive();
    void wait_while(const std::atomic<std::uint32_t>& value, std::uint32_t old) const;

    int threads_;
    Entry entry_ = nullptr;
    const void* job_ = nullptr;
    bool stop_ = false;
    // Each has a cache line of its own, since one side writes it while the other spins on it.
    alignas(64) std::atomic<std::uint32_t> job_number_{0};
    alignas(64) std::atomic<std::uint32_t> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    std::atomic<bool> awake_{false};
    std::vector<std::thread> workers_;
    std::vector<int> cpus_;  // of the affinity mask: the caller's, then one for each worker that is pinned
};

inline void Team::barrier() const {
    if (size_ > 1) pool_.arrive();
}

}  // namespace penstock
