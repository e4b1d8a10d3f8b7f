// Reads through an io_uring, by system calls alone: liburing would be one more thing to install.
#include <cerrno>
#include <chrono>
#include <memory>

#include "reads.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifdef IORING_FEAT_RW_CUR_POS  // since Linux 5.6, which has IORING_OP_READ
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

namespace penstock {
namespace {

constexpr std::chrono::microseconds kAgain{100};  // until reads that the kernel had no memory for are submitted again

// The two rings that the kernel shares with us. Threads submit reads and take results one at a time.
class Ring {
  public:
    explicit Ring(unsigned entries) {
        io_uring_params params{};
        fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
        if (fd_ < 0) return;
        if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0 || (params.features & IORING_FEAT_RW_CUR_POS) == 0) {
            fail(ENOSYS);
            return;
        }
        const std::size_t submissions = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const std::size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        rings_bytes_ = submissions > completions ? submissions : completions;
        entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
        rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
        if (rings_ != nullptr) entries_ = static_cast<io_uring_sqe*>(map(entries_bytes_, IORING_OFF_SQES));
        if (entries_ == nullptr) {
            fail(errno);
            return;
        }
        auto* base = static_cast<char*>(rings_);
        const auto at = [base](unsigned offset) { return reinterpret_cast<unsigned*>(base + offset); };
        sq_tail_ = at(params.sq_off.tail);
        sq_mask_ = *at(params.sq_off.ring_mask);
        sq_array_ = at(params.sq_off.array);
        cq_head_ = at(params.cq_off.head);
        cq_tail_ = at(params.cq_off.tail);
        cq_mask_ = *at(params.cq_off.ring_mask);
        completions_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    }
    ~Ring() { close(); }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    bool open() const { return fd_ >= 0; }
    void close() {
        if (entries_ != nullptr) munmap(entries_, entries_bytes_);
        if (rings_ != nullptr) munmap(rings_, rings_bytes_);
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
        entries_ = nullptr;
        rings_ = nullptr;
    }

    // Adds a read. There is always room: the rings have one entry more than there are blocks in flight.
    void push(int fd, void* to, std::int64_t nbytes, std::int64_t offset, std::uint64_t tag) {
        const unsigned tail = *sq_tail_;
        io_uring_sqe& entry = entries_[tail & sq_mask_];
        entry = {};
        entry.opcode = IORING_OP_READ;
        entry.fd = fd;
        entry.addr = reinterpret_cast<std::uintptr_t>(to);
        entry.len = static_cast<unsigned>(nbytes);
        entry.off = static_cast<std::uint64_t>(offset);
        entry.user_data = tag;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
        ++unsubmitted_;
    }

    // Submits the reads that were pushed. If memory is short for a moment, the next call submits the rest.
    void submit() {
        if (unsubmitted_ == 0) return;
        const long taken = syscall(__NR_io_uring_enter, fd_, unsubmitted_, 0, 0, nullptr, 0);
        if (taken > 0) unsubmitted_ -= static_cast<unsigned>(taken);
    }

    // Sleeps until a read is done. Other threads may submit meanwhile.
    void wait() const { syscall(__NR_io_uring_enter, fd_, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0); }

    bool left_over() const { return unsubmitted_ > 0; }

    template <class Take>
    void take_all(const Take& take) {
        unsigned head = *cq_head_;
        while (head != std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) {
            const io_uring_cqe entry = completions_[head & cq_mask_];
            std::atomic_ref(*cq_head_).store(++head, std::memory_order_release);
            take(entry.user_data, entry.res);
        }
    }

  private:
    void* map(std::size_t nbytes, off_t offset) {
        void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
        return address == MAP_FAILED ? nullptr : address;
    }
    void fail(int error) {
        close();
        errno = error;
    }

    int fd_ = -1;
    void* rings_ = nullptr;
    io_uring_sqe* entries_ = nullptr;
    std::size_t rings_bytes_ = 0, entries_bytes_ = 0;
    unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0, unsubmitted_ = 0;
    io_uring_cqe* completions_ = nullptr;
};

class UringReads final : public Reads {
  public:
    UringReads(int depth, std::int64_t block_bytes)
        : Reads(depth, block_bytes), ring_(static_cast<unsigned>(depth) + 1), wakeup_(eventfd(0, EFD_CLOEXEC)) {
        if (!ring_.open() || wakeup_ < 0) return;
        slots_.resize(static_cast<std::size_t>(depth));
        thread_ = std::thread([this] { serve(); });
    }
    ~UringReads() override { close(); }
    void close() override {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        if (thread_.joinable()) {
            const std::uint64_t one = 1;
            [[maybe_unused]] const auto written = write(wakeup_, &one, sizeof one);  // nobody else fills the counter
            thread_.join();
        }
        stop_comparing();
        const std::lock_guard lock(mutex_);
        cancel();
        ring_.close();
        if (wakeup_ >= 0) ::close(wakeup_);
        wakeup_ = -1;
    }
    bool open() const { return thread_.joinable(); }
    const char* engine() const override { return "io_uring"; }

  private:
    // Whoever begins a load submits its reads: to wake the thread for that took 40 µs more of a read of 2.6 MB.
    void wake() override {
        fill();
        ring_.submit();
    }

    // Not once close() has begun: then the thread below alone takes what comes, close()'s bell with it, and the ring
    // may be gone.
    void progress() override {
        if (std::unique_lock lock(mutex_, std::try_to_lock); lock && !stop_) take();
    }

    // Takes results, and fills the slots again as long as any load ends. The thread below does so too, whenever a read
    // is done.
    void take() {
        ring_.take_all([&](std::uint64_t tag, std::int64_t result) {
            if (tag < slots_.size()) took(tag, result);  // else it is that of close()
        });
        wake();
    }

    void serve() {
        {
            const std::lock_guard lock(mutex_);
            ring_.push(wakeup_, &rung_, sizeof rung_, 0, slots_.size());
            ring_.submit();
        }
        for (bool left_over = false;;) {
            {
                const std::lock_guard lock(mutex_);
                take();
                if (stop_ && busy_ == 0) return;
                left_over = ring_.left_over();
            }
            if (left_over) {  // the kernel takes no more for now: no result may come that ends a wait
                std::this_thread::sleep_for(kAgain);
            } else {
                ring_.wait();
            }
        }
    }

    // Gives every free slot a block. Called under mutex_.
    void fill() {
        for (std::size_t i = 0; i < slots_.size(); ++i) {
            while (!slots_[i].block) {
                slots_[i].block = claim();
                if (!slots_[i].block) return;
                ++busy_;
                if (slots_[i].block->piece.nbytes == 0) {
                    over(i);
                } else {
                    ask(i);
                }
            }
        }
    }

    void took(std::size_t i, std::int64_t result) {
        const Attempt& asked = slots_[i].asked;
        if (result == -ECANCELED) {  // the thread that submitted it has ended
            ask(i);
        } else if (slots_[i].block->piece.take(asked.result(result), asked.wanted)) {
            over(i);
        } else {
            ask(i);
        }
    }

    // Submits a read of the bytes that the slot's piece lacks. A read that fails at once frees the slot.
    void ask(std::size_t i) {
        Piece& piece = slots_[i].block->piece;
        for (;;) {
            const Attempt now = slots_[i].asked = attempt(piece);
            if (now.error == 0) {
                ring_.push(piece.fd, piece.to + piece.done, now.wanted, piece.offset + piece.done, i);
                return;
            }
            if (piece.take(-now.error, now.wanted)) break;
        }
        over(i);
    }

    void over(std::size_t i) {
        finish(*slots_[i].block);
        slots_[i].block.reset();
        --busy_;
    }

    struct Slot {
        std::optional<Block> block;
        Attempt asked{};
    };
    Ring ring_;
    int wakeup_;
    std::uint64_t rung_ = 0;
    std::vector<Slot> slots_;
    int busy_ = 0;
    std::thread thread_;
};

}  // namespace

std::shared_ptr<Reads> uring_reads(int depth, std::int64_t block_bytes) {
    auto reads = std::make_shared<UringReads>(depth, block_bytes);
    if (!reads->open()) return nullptr;
    return reads;
}

}  // namespace penstock

#else

namespace penstock {

std::shared_ptr<Reads> uring_reads(int, std::int64_t) {
    errno = ENOSYS;
    return nullptr;
}

}  // namespace penstock

#endif
