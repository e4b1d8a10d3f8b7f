// Reads a disk with several reads in flight (PIPO section 3.3, blockwise and multi-threaded). Loads queue up, each is
// cut into blocks, and `depth` blocks are on their way at any time. The first blocks of the next load start while the
// last blocks of this load are still under way, and no thread has to be woken in between. So the disk does not idle
// between two loads.
//
// A load may come with checksums. A separate thread then compares each granule as soon as its last block is there,
// while the disk goes on with `depth` blocks in flight. The load is done when its last granule was right. One thread
// hashes 10 GB/s and more, which is more than any disk known to us reads.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "file.h"
#include "sums.h"

namespace penstock {

// Of the steady clock, by which loads and what waits for them are timed.
inline double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The granules that a load must bring: of `stride` bytes each, with the checksums from number `first` of `sums` on.
// Null: nothing is compared.
struct Expected {
    std::shared_ptr<Sums> sums;
    std::int64_t first = 0, stride = 0;
};

// `nbytes` at `offset` of a file, and where they go.
struct Run {
    std::int64_t offset;
    std::byte* to;
    std::int64_t nbytes;
};

// Runs of a file on their way to memory, in rising order there. The caller keeps file and memory until it is done.
// Bytes of a load are counted as if its runs lay one after the other.
struct Load {
    int fd;
    bool direct;
    std::vector<Run> runs;  // at least one
    std::int64_t nbytes;    // of all runs
    Expected expected;      // only of a load with one run

    std::byte* begin() const { return runs.front().to; }
    std::byte* end() const { return runs.back().to + runs.back().nbytes; }

    // Guarded by the reader's mutex until `done`.
    std::vector<std::int64_t> lacking;  // bytes of each granule that have not arrived; empty if nothing is compared
    std::int64_t claimed = 0;           // byte at which the next block starts
    std::size_t run = 0;                // the run that it belongs to
    std::int64_t run_start = 0;         // the byte at which that run starts
    int under_way = 0;                  // blocks that are being read, or whose granules are being compared
    std::int64_t good;  // bytes from the start on that are right, as far as known; a bad block lowers it
    int error = 0;      // errno of the first bad block
    std::optional<std::int64_t> damaged;  // the granule of this load whose checksum is wrong
    double start_s = 0, end_s = 0;        // steady clock
    std::atomic<bool> done = false;

    bool all_claimed() const { return claimed >= nbytes && claimed > 0; }
};

using LoadPtr = std::shared_ptr<Load>;

// A fault for tests. Read number `at` (counted from 1) fails with `error`, or if that is 0, gives at most `most_bytes`.
// With `forever` all reads after it do so too.
struct Fault {
    std::int64_t at = 0;  // 0: never
    int error = 0;
    std::int64_t most_bytes = 0;
    bool forever = true;
};

// A read of the `wanted` bytes that a piece lacks. A fault makes it fail with `error`, or makes at most `most` bytes
// count.
struct Attempt {
    int error;
    std::int64_t wanted;
    std::int64_t most;

    std::int64_t result(std::int64_t true_result) const { return true_result < most ? true_result : most; }
};

// The result of reading one block: bytes, errno, and the first granule whose checksum is wrong.
struct CheckedRead {
    ReadResult read;
    std::optional<std::int64_t> damaged;
};

class Reads {
  public:
    Reads(int depth, std::int64_t block_bytes) : depth_(depth), block_bytes_(block_bytes) {}
    virtual ~Reads() = default;
    Reads(const Reads&) = delete;
    Reads& operator=(const Reads&) = delete;
    virtual const char* engine() const = 0;
    // Returns when nothing is under way any more. Loads of which no block was read end with ECANCELED.
    virtual void close() = 0;

    // Begins a load of these runs. Returns nullptr once closed.
    LoadPtr start(int fd, std::vector<Run> runs, Expected expected = {});
    // Notes reads that are done, where the calling thread can do that as well as another. For who waits without sleep.
    virtual void progress() {}
    // Waits for a load. Returns true once it is done, false after about so many seconds.
    bool wait(const Load& load, double seconds);
    // Reads and compares one block in the calling thread, past the queue. If the caller waits for the block anyway, to
    // wake another thread would take longer.
    CheckedRead read(int fd, std::int64_t offset, std::byte* to, std::int64_t nbytes, const Expected& expected = {});

    void inject(const Fault& fault);
    std::int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
    int depth() const { return depth_; }
    std::int64_t block_bytes() const { return block_bytes_; }

  protected:
    struct Block {
        LoadPtr load;
        Piece piece;
        std::int64_t start;  // its first byte among the load's
    };

    // The next block to read. Call it under mutex_. A load waits for an unfinished load that writes to the same memory,
    // and later loads wait behind it.
    std::optional<Block> claim();
    bool queued() const { return !queue_.empty(); }  // whether blocks are left to claim; under mutex_
    void finish(const Block& block);
    void cancel();  // ends the loads that are left when nothing reads any more
    // Returns when all granules that arrived were compared. Call it without mutex_, when nothing arrives any more.
    void stop_comparing();
    Attempt attempt(const Piece& piece);
    // Reads a piece to its end, one read after the other. Call it without mutex_.
    void read_here(Piece& piece);
    virtual void wake() = 0;  // tells the reading threads that there is something to claim

    std::mutex mutex_;
    std::condition_variable done_;
    bool stop_ = false;

  private:
    // Granules [lo, hi) of a load that have arrived.
    struct Arrived {
        LoadPtr load;
        std::int64_t lo, hi;
    };

    bool blocked(const Load& load) const;
    // These three are called under mutex_.
    static std::optional<Arrived> arrived_whole(const LoadPtr& load, std::int64_t lo, std::int64_t hi);
    static void spoil(Load& load, std::int64_t good, int error, std::optional<std::int64_t> damaged);
    void settle(const LoadPtr& load);

    void compare();  // the thread that compares

    int depth_;
    std::int64_t block_bytes_;
    std::deque<LoadPtr> queue_;     // loads with blocks that are not claimed yet
    std::list<LoadPtr> under_way_;  // loads that are claimed at least in part, and not done
    Fault fault_;
    std::int64_t attempts_ = 0;
    std::atomic<std::int64_t> bytes_read_ = 0;

    std::deque<Arrived> to_compare_;
    bool compares_no_more_ = false;
    std::condition_variable comparing_;
    std::thread comparer_;  // starts with the first load that has checksums
};

// Reads by `depth` threads, each with one block at a time. They sleep while there is no block. They are not pinned,
// since they hardly compute, and the system finds them a core between the threads that do.
class ThreadReads final : public Reads {
  public:
    ThreadReads(int depth, std::int64_t block_bytes);
    ~ThreadReads() override { close(); }
    void close() override;
    const char* engine() const override { return "threads"; }

  private:
    void serve();
    // One thread: it wakes the next, as long as blocks are left. To wake them all takes the cores from who computes.
    void wake() override { work_.notify_one(); }

    std::condition_variable work_;
    std::vector<std::thread> threads_;
};

// Reads through an io_uring that keeps `depth` blocks in flight: threads that begin loads submit them, and one thread
// of its own goes on when some are done. Returns nullptr where the kernel has
// none or refuses it; errno says why.
std::shared_ptr<Reads> uring_reads(int depth, std::int64_t block_bytes);

}  // namespace penstock
