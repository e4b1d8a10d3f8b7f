// A small pool of threads of our own. The caller works too, workers are pinned, and to wait is a short spin and then a
// sleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <tuple>
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
    std::pair<int, int> share(int total) const { return share_of(id_, total); }
    // That of another thread.
    std::pair<int, int> share_of(int id, int total) const {
        const auto n = static_cast<std::int64_t>(size_);
        return {static_cast<int>(total * static_cast<std::int64_t>(id) / n),
                static_cast<int>(total * (static_cast<std::int64_t>(id) + 1) / n)};
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

    int threads_;
    Entry entry_ = nullptr;
    const void* job_ = nullptr;
    bool stop_ = false;
    // Each has a cache line of its own, since one side writes it while the other spins on it.
    alignas(64) std::atomic<std::uint32_t> job_number_{0};
    alignas(64) std::atomic<std::uint32_t> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    std::vector<std::thread> workers_;
    std::vector<int> cpus_;  // of the affinity mask: the caller's, then one for each worker that is pinned
};

inline void Team::barrier() const {
    if (size_ > 1) pool_.arrive();
}

// Pieces of a job, of which each thread has a part to begin with, in a row. A thread that has done its part takes
// pieces of others' parts: so all are done at once, though another process holds one of the cores. While a thread is at
// a piece it has taken its next one, and can fetch that one's bytes.
class Pieces {
  public:
    explicit Pieces(int threads) : taken_(2 * std::size_t(threads)) {}

    // Calls work(piece, next) for this thread's pieces of [0, count). `next` is -1 at its last. Its first piece is that
    // of `team.share`. Phases are counted from 0, and between two of them all threads meet at a barrier.
    template <class Work>
    void share(const Team& team, int phase, int count, const Work& work) {
        const auto of = [&](int id, int parity) -> std::atomic<int>& { return taken_[std::size_t(2 * id + parity)].n; };
        of(team.id(), (phase + 1) % 2).store(0, std::memory_order_relaxed);
        auto [first, last] = team.share(count);
        int piece = first < last ? first : -1, left = team.size();  // parts that may have pieces left
        std::atomic<int>* taken = &of(team.id(), phase % 2);
        const auto take = [&] {
            while (left > 0) {
                const int next = first + 1 + taken->fetch_add(1, std::memory_order_relaxed);
                if (next < last) return next;
                const int id = (team.id() + team.size() - --left) % team.size();
                std::tie(first, last) = team.share_of(id, count), taken = &of(id, phase % 2);
            }
            return -1;
        };
        for (piece = piece < 0 ? take() : piece; piece >= 0;) {
            const int next = take();
            work(piece, next);
            piece = next;
        }
    }

  private:
    struct alignas(64) Taken {
        std::atomic<int> n{0};  // beyond a part's first piece, which is its own thread's
    };
    std::vector<Taken> taken_;  // [threads][2]: of this phase and of the next one
};

}  // namespace penstock
