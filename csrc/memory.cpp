#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14; older C libraries do not name it
#endif

namespace penstock {
namespace {

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// What a thread takes at once of a mapping. The kernel clears the pages, 64 MiB in 5 to 15 ms.
constexpr std::size_t kTakenAtOnce = std::size_t{64} << 20;

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

Mapping::Mapping(std::size_t nbytes, bool huge) : nbytes_(nbytes) {
    mapped_ = round_up(nbytes, page_bytes());
    // mmap aligns to 4 KiB only. So one huge page more than asked for is mapped, and the bytes before and after the
    // aligned range are given back.
    const std::size_t taken = mapped_ + kHugePage;
    void* start = mmap(nullptr, taken, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    auto* raw = static_cast<std::byte*>(start);
    const std::size_t before =
        round_up(reinterpret_cast<std::uintptr_t>(raw), kHugePage) - reinterpret_cast<std::uintptr_t>(raw);
    const std::size_t after = taken - before - mapped_;
    data_ = raw + before;
    if (before != 0) munmap(raw, before);
    if (after != 0) munmap(data_ + mapped_, after);
    huge_ = huge && madvise(data_, mapped_, MADV_HUGEPAGE) == 0;
}

namespace {

// Takes the pages of a range, which begins on a page. Kernels before 5.14 do not know the call (EINVAL). Where it fails
// otherwise (ENOMEM, EFAULT), touching the pages gets them or the signal that any later use of them would get.
void take_pages(std::byte* data, std::size_t nbytes) {
    if (madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) return;
    const std::size_t step = page_bytes();
    for (std::size_t i = 0; i < nbytes; i += step) {
        // An atomic write of a zero over a zero, for a read from a disk may be writing here at this moment.
        unsigned char zero = 0;
        std::atomic_ref(*reinterpret_cast<unsigned char*>(data + i)).compare_exchange_strong(zero, 0);
    }
}

}  // namespace

void Mapping::populate(std::size_t lo, std::size_t hi, int threads) {
    const std::size_t end = std::min(round_up(hi, page_bytes()), mapped_);
    std::atomic<std::size_t> next{lo};
    const auto work = [&] {
        for (std::size_t at; (at = next.fetch_add(kTakenAtOnce)) < end;)
            take_pages(data_ + at, std::min(kTakenAtOnce, end - at));
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads && lo + static_cast<std::size_t>(i) * kTakenAtOnce < end; ++i) {
        try {
            others.emplace_back(work);
        } catch (const std::system_error&) {
            break;  // no more threads can be had: those that are here take all of it
        }
    }
    work();
    for (auto& other : others) other.join();
}

void Mapping::close() noexcept {
    if (data_ != nullptr) munmap(data_, mapped_);
    data_ = nullptr;
}

}  // namespace penstock
