// Several reads of a disk in flight (PIPO section 3.3, blockwise and multi-threaded): loads queue up, each is cut into
// blocks, and `depth` blocks are on their way at any time. The next load's first blocks start while this one's last are
// still under way, and nobody has to be woken in between, so the disk does not idle between two loads.
//
// A load may say what its bytes must be. A thread of its own then compares each granule as soon as its last block is
// there, while the disk goes on with `depth` blocks in flight, and the load is done when its last granule was right.
// One thread hashes 10 GB/s and more, which is more than the disks that we know.
#pragma once

#include <atomic>
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

// What a load must bring: granules of `stride` bytes, number `first` and on of `sums` (null: whatever it is).
struct Expected {
    std::shared_ptr<Sums> sums;
    std::int64_t first = 0, stride = 0;
};

// A range of a file on its way to memory. The caller keeps file and memory until it is done.
struct Load {
    int fd;
    bool direct;
    std::int64_t offset;
    std::byte* to;
    std::int64_t nbytes;
    Expected expected;

    // Guarded by the reader's mutex until `done`.
    std::vector<std::int64_t> lacking;  // where granules are compared: bytes of each that have not arrived
    std::int64_t claimed = 0;           // where the next block starts
    int under_way = 0;                  // blocks, until their granules were compared
    std::int64_t good;  // bytes from the start on that are right, as far as known: what a bad block lowers
    int error = 0;      // of the first bad block
    std::optional<std::int64_t> damaged;  // granule of this load, where that is what is bad
    double start_s = 0, end_s = 0;        // steady clock
    std::atomic<bool> done = false;

    bool all_claimed() const { return claimed >= nbytes && claimed > 0; }
};

using LoadPtr = std::shared_ptr<Load>;

// For tests: from the block read number `at` on (counted from 1), or at it alone, a read fails with `error`, or where
// that is 0, tells of at most `most_bytes`.
struct Fault {
    std::int64_t at = 0;  // 0: never
    int error = 0;
    std::int64_t most_bytes = 0;
    bool forever = true;
};

// A read of what a piece lacks: `error` instead of it, or at most `most` of its bytes count.
struct Attempt {
    int error;
    std::int64_t wanted;
    std::int64_t most;

    std::int64_t result(std::int64_t true_result) const { return true_result < most ? true_result : most; }
};

// What came of reading one block: bytes, errno, and the first granule that is not what it should be.
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
    // Returns when nothing is under way any more. Loads that no block was read of are done with ECANCELED.
    virtual void close() = 0;

    // nullptr once closed.
    LoadPtr start(int fd, std::int64_t offset, std::byte* to, std::int64_t nbytes, Expected expected = {});
    // True once the load is done; false after about so many seconds.
    bool wait(const Load& load, double seconds);
    // One block, read and compared by the calling thread, past the queue: for what somebody waits for, waking another
    // thread is dearer.
    CheckedRead read(int fd, std::int64_t offset, std::byte* to, std::int64_t nbytes, const Expected& expected = {});

    void inject(const Fault& fault);
    std::int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
    int depth() const { return depth_; }
    std::int64_t block_bytes() const { return block_bytes_; }

  protected:
    struct Block {
        LoadPtr load;
        Piece piece;
    };

    // Under mutex_. A load that writes where an unfinished one does waits for it, and what follows waits behind it.
    std::optional<Block> claim();
    void finish(const Block& block);
    void cancel();  // what is left when nobody reads any more
    // Not under mutex_: returns when what arrived has been compared. Nothing may arrive afterwards.
    void stop_comparing();
    Attempt attempt(const Piece& piece);
    // Not under mutex_: reads a piece to its end, one read after the other.
    void read_here(Piece& piece);
    virtual void wake() = 0;  // there is something to claim, or it stops

    std::mutex mutex_;
    std::condition_variable done_;
    bool stop_ = false;

  private:
    // Granules [lo, hi) of a load, which are there.
    struct Arrived {
        LoadPtr load;
        std::int64_t lo, hi;
    };

    bool blocked(const Load& load) const;
    // Under mutex_, all of them.
    static std::optional<Arrived> arrived_whole(const LoadPtr& load, std::int64_t lo, std::int64_t hi);
    static void spoil(Load& load, std::int64_t good, int error, std::optional<std::int64_t> damaged);
    void settle(const LoadPtr& load);

    void compare();  // the thread that compares

    int depth_;
    std::int64_t block_bytes_;
    std::deque<LoadPtr> queue_;     // not claimed whole
    std::list<LoadPtr> under_way_;  // claimed at least in part, and not done
    Fault fault_;
    std::int64_t attempts_ = 0;
    std::atomic<std::int64_t> bytes_read_ = 0;

    std::deque<Arrived> to_compare_;
    bool compares_no_more_ = false;
    std::condition_variable comparing_;
    std::thread comparer_;  // begun with the first load that is compared
};

// `depth` threads that read a block each, and sleep while there is none. Not pinned: they hardly compute, and the
// system finds them a core between those that do.
class ThreadReads final : public Reads {
  public:
    ThreadReads(int depth, std::int64_t block_bytes);
    ~ThreadReads() override { close(); }
    void close() override;
    const char* engine() const override { return "threads"; }

  private:
    void serve();
    void wake() override { work_.notify_all(); }

    std::condition_variable work_;
    std::vector<std::thread> threads_;
};

// One thread that keeps `depth` blocks in flight through an io_uring. nullptr where the kernel has none or refuses it;
// errno says why.
std::shared_ptr<Reads> uring_reads(int depth, std::int64_t block_bytes);

}  // namespace penstock
