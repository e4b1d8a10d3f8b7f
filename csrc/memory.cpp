#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14; older C libraries do not name it
#endif

namespace penstock {
namespace {

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

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

void Mapping::populate() {
    if (madvise(data_, mapped_, MADV_POPULATE_WRITE) == 0) return;
    const std::size_t step = page_bytes();
    for (std::size_t i = 0; i < mapped_; i += step) {
        auto* byte = reinterpret_cast<volatile unsigned char*>(data_ + i);
        *byte = *byte;
    }
}

void Mapping::close() noexcept {
    if (data_ != nullptr) munmap(data_, mapped_);
    data_ = nullptr;
}

}  // namespace penstock
