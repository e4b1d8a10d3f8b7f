#include "reads.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace penstock {

LoadPtr Reads::start(int fd, std::vector<Run> runs, Expected expected) {
    auto load = std::make_shared<Load>();
    load->fd = fd;
    load->direct = is_direct(fd);
    load->runs = std::move(runs);
    std::int64_t nbytes = 0;
    for (const Run& run : load->runs) nbytes += run.nbytes;
    load->nbytes = load->good = nbytes;
    if (expected.sums != nullptr) {
        const std::int64_t granules = nbytes / expected.stride;
        if (!expected.sums->checked(expected.first, granules)) {
            load->expected = std::move(expected);
            load->lacking.assign(static_cast<std::size_t>(granules), load->expected.stride);
        }
    }
    {
        const std::lock_guard lock(mutex_);
        if (stop_) return nullptr;
        if (load->expected.sums != nullptr && !comparer_.joinable()) comparer_ = std::thread([this] { compare(); });
        queue_.push_back(load);
        wake();  // under the mutex, so that close() cannot come in between
    }
    return load;
}

bool Reads::wait(const Load& load, double seconds) {
    progress();  // a read that the kernel refused when it was begun, for want of memory, is begun now
    std::unique_lock lock(mutex_);
    const auto is_done = [&load] { return load.done.load(std::memory_order_acquire); };
    return done_.wait_for(lock, std::chrono::duration<double>(seconds), is_done);
}

CheckedRead Reads::read(int fd, std::int64_t offset, std::byte* to, std::int64_t nbytes, const Expected& expected) {
    Piece piece{fd, is_direct(fd), offset, to, nbytes};
    read_here(piece);
    bytes_read_ += piece.done;
    CheckedRead result{{piece.done, piece.error}, std::nullopt};
    if (expected.sums != nullptr && piece.done == nbytes) {
        result.damaged = expected.sums->first_wrong(expected.first, nbytes / expected.stride, to, expected.stride);
    }
    return result;
}

void Reads::inject(const Fault& fault) {
    const std::lock_guard lock(mutex_);
    fault_ = fault;
    attempts_ = 0;
}

bool Reads::blocked(const Load& load) const {
    return std::any_of(under_way_.begin(), under_way_.end(), [&load](const LoadPtr& other) {
        return other.get() != &load && other->begin() < load.end() && load.begin() < other->end();
    });
}

std::optional<Reads::Block> Reads::claim() {
    if (queue_.empty() || stop_) return std::nullopt;
    const LoadPtr load = queue_.front();
    if (load->claimed == 0) {
        if (blocked(*load)) return std::nullopt;
        load->start_s = now_s();
        under_way_.push_back(load);
    }
    const std::int64_t start = load->claimed;
    const Run run = load->runs[load->run];
    const std::int64_t in_run = start - load->run_start;
    const std::int64_t nbytes = std::min(block_bytes_, run.nbytes - in_run);
    if (in_run + nbytes == run.nbytes) {
        load->run_start += run.nbytes;
        ++load->run;
    }
    load->claimed = start + std::max<std::int64_t>(nbytes, 1);  // a load of nothing is one block of nothing
    ++load->under_way;
    if (load->all_claimed()) queue_.pop_front();
    return Block{load, Piece{load->fd, load->direct, run.offset + in_run, run.to + in_run, nbytes}, start};
}

void Reads::finish(const Block& block) {
    Load& load = *block.load;
    const std::int64_t lo = block.start, hi = lo + block.piece.done;
    bytes_read_ += block.piece.done;
    if (block.piece.done < block.piece.nbytes) {
        spoil(load, hi, block.piece.error, std::nullopt);
        if (!load.all_claimed()) {  // nobody needs the rest of a bad load
            load.claimed = std::max<std::int64_t>(load.nbytes, 1);
            std::erase(queue_, block.load);
        }
    } else if (auto arrived = arrived_whole(block.load, lo, hi)) {
        to_compare_.push_back(*std::move(arrived));
        comparing_.notify_one();
        return;  // the block stays under way until compare() settles it
    }
    settle(block.load);
}

std::optional<Reads::Arrived> Reads::arrived_whole(const LoadPtr& load, std::int64_t lo, std::int64_t hi) {
    if (load->lacking.empty() || lo == hi) return std::nullopt;
    const std::int64_t stride = load->expected.stride;
    Arrived arrived{load, lo / stride, lo / stride};
    for (std::int64_t g = lo / stride; g * stride < hi; ++g) {
        std::int64_t& lacking = load->lacking[static_cast<std::size_t>(g)];
        lacking -= std::min(hi, (g + 1) * stride) - std::max(lo, g * stride);
        if (lacking == 0) {
            arrived.hi = g + 1;
        } else if (arrived.hi == arrived.lo) {  // only the block's first and last granules can lack bytes
            arrived.lo = arrived.hi = g + 1;
        }
    }
    if (arrived.lo == arrived.hi) return std::nullopt;
    return arrived;
}

void Reads::spoil(Load& load, std::int64_t good, int error, std::optional<std::int64_t> damaged) {
    if (good >= load.good) return;
    load.good = good;
    load.error = error;
    load.damaged = damaged;
}

void Reads::settle(const LoadPtr& load) {
    if (--load->under_way > 0 || !load->all_claimed()) return;
    load->end_s = now_s();
    under_way_.remove(load);
    load->done.store(true, std::memory_order_release);
    done_.notify_all();
    if (!queue_.empty()) wake();  // the next load may have waited for this load's memory
}

void Reads::compare() {
    std::unique_lock lock(mutex_);
    for (;;) {
        comparing_.wait(lock, [this] { return compares_no_more_ || !to_compare_.empty(); });
        if (to_compare_.empty()) return;
        const Arrived now = std::move(to_compare_.front());
        to_compare_.pop_front();
        lock.unlock();
        const auto& [sums, first, stride] = now.load->expected;
        const std::byte* const at = now.load->begin() + now.lo * stride;
        const auto wrong = sums->first_wrong(first + now.lo, now.hi - now.lo, at, stride);
        lock.lock();
        if (wrong) spoil(*now.load, (now.lo + *wrong) * stride, 0, now.lo + *wrong);
        settle(now.load);
    }
}

void Reads::stop_comparing() {
    {
        const std::lock_guard lock(mutex_);
        compares_no_more_ = true;
    }
    comparing_.notify_all();
    if (comparer_.joinable()) comparer_.join();
}

void Reads::cancel() {
    for (const auto& load : queue_) {
        load->good = 0;
        load->error = ECANCELED;
        load->start_s = load->end_s = now_s();
        load->done.store(true, std::memory_order_release);
    }
    queue_.clear();
    under_way_.clear();
    done_.notify_all();
}

Attempt Reads::attempt(const Piece& piece) {
    const std::int64_t wanted = piece.nbytes - piece.done;
    ++attempts_;
    const bool faulty = fault_.at != 0 && (fault_.forever ? attempts_ >= fault_.at : attempts_ == fault_.at);
    return faulty ? Attempt{fault_.error, wanted, fault_.most_bytes} : Attempt{0, wanted, wanted};
}

void Reads::read_here(Piece& piece) {
    for (bool over = piece.nbytes == 0; !over;) {
        Attempt now;
        {
            const std::lock_guard lock(mutex_);
            now = attempt(piece);
        }
        std::int64_t result = -now.error;
        if (now.error == 0) {
            const auto wanted = static_cast<std::size_t>(now.wanted);
            result = pread(piece.fd, piece.to + piece.done, wanted, piece.offset + piece.done);
            result = now.result(result < 0 ? -errno : result);
        }
        over = piece.take(result, now.wanted);
    }
}

ThreadReads::ThreadReads(int depth, std::int64_t block_bytes) : Reads(depth, block_bytes) {
    for (int i = 0; i < depth; ++i) threads_.emplace_back([this] { serve(); });
}

void ThreadReads::close() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    stop_comparing();
    const std::lock_guard lock(mutex_);
    cancel();
}

void ThreadReads::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        std::optional<Block> block;
        work_.wait(lock, [&] { return stop_ || (block = claim()).has_value(); });
        if (!block) return;
        if (queued()) work_.notify_one();  // to the next thread, if there is one to spare
        lock.unlock();
        read_here(block->piece);
        lock.lock();
        finish(*block);
    }
}

}  // namespace penstock
