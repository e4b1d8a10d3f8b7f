// How fast this machine is, measured.
#pragma once

#include <cstddef>

namespace penstock {

// Median over `repeats` of the seconds that `threads` threads, pinned to CPUs of their own, take to read `nbytes` once.
// Memory much bigger than the last-level cache gives the bandwidth of RAM. Throws std::invalid_argument if there are
// fewer CPUs than threads.
double ram_read_s(const std::byte* data, std::size_t nbytes, int threads, int repeats);

// Operations per second (a multiplication and an addition are two) that `threads` threads do at most with the best
// kernels' instructions: int8 dot products, or float32 multiply-adds, in registers. Throws as above.
double peak_per_s(bool int8, int threads);

}  // namespace penstock
