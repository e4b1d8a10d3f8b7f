// Measures how fast this machine's RAM and arithmetic are.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace penstock {

// Seconds that `threads` threads, each pinned to a CPU of its own, take to read `nbytes` once: the median over
// `repeats` runs. With memory much bigger than the last-level cache this gives the bandwidth of RAM. Throws
// std::invalid_argument if there are fewer CPUs than threads.
double ram_read_s(const std::byte* data, std::size_t nbytes, int threads, int repeats);

// The most operations per second (a multiplication and an addition are two) that `threads` threads do with these
// kernels' instructions in registers: int8 dot products, or float32 multiply-adds. Throws as ram_read_s does.
double peak_per_s(const Kernels& kernels, bool int8, int threads);

}  // namespace penstock
