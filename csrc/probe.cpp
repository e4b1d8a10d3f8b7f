#include "probe.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu.h"
#include "kernels.h"

#if defined(__x86_64__)
#define PENSTOCK_TARGET(isa) __attribute__((target(isa)))
#endif

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;
// One cache line. The compiler splits it where registers are smaller.
using Words = std::uint64_t __attribute__((vector_size(64)));
using Sum = std::uint64_t (*)(const std::byte*, std::size_t);

// Reads one stream without prefetch: two and four streams per thread were 20-35 % slower, and software prefetch changed
// nothing. There are four independent sums, so that at one addition per load arithmetic is far from the limit.
[[gnu::always_inline]] inline std::uint64_t sum_lines(const std::byte* data, std::size_t nbytes) {
    constexpr std::size_t kLine = sizeof(Words);
    Words sums[4] = {};
    std::size_t i = 0;
    for (; i + 4 * kLine <= nbytes; i += 4 * kLine) {
        for (std::size_t k = 0; k < 4; ++k) {
            Words line;
            std::memcpy(&line, data + i + k * kLine, kLine);
            sums[k] += line;
        }
    }
    std::uint64_t rest = 0;
    for (; i < nbytes; ++i) rest += std::to_integer<std::uint64_t>(data[i]);
    const Words all = sums[0] + sums[1] + sums[2] + sums[3];
    for (std::size_t k = 0; k < kLine / sizeof(std::uint64_t); ++k) rest += all[k];
    return rest;
}

std::uint64_t sum_portable(const std::byte* data, std::size_t nbytes) { return sum_lines(data, nbytes); }

#if defined(__x86_64__)
PENSTOCK_TARGET("avx2") std::uint64_t sum_avx2(const std::byte* data, std::size_t nbytes) {
    return sum_lines(data, nbytes);
}
PENSTOCK_TARGET("avx512f") std::uint64_t sum_avx512(const std::byte* data, std::size_t nbytes) {
    return sum_lines(data, nbytes);
}
#endif

Sum best_sum() {
#if defined(__x86_64__)
    if (has_feature("avx512f")) return sum_avx512;
    if (has_feature("avx2")) return sum_avx2;
#endif
    return sum_portable;
}

}  // namespace

namespace {

// Seconds from the first start to the last end of work(thread), on pinned threads that start together: the median over
// `repeats` runs.
template <class Work>
double timed_s(int threads, int repeats, const Work& work) {
    const std::vector<int> cpus = allowed_cpus();
    if (threads < 1 || static_cast<std::size_t>(threads) > cpus.size()) {
        throw std::invalid_argument(std::to_string(threads) + " threads asked for, " + std::to_string(cpus.size()) +
                                    " CPUs allowed");
    }
    if (repeats < 1) throw std::invalid_argument("repeats must be at least 1");

    const auto count = static_cast<std::size_t>(threads), rounds = static_cast<std::size_t>(repeats);
    struct Span {
        Clock::time_point start, end;
    };
    std::vector<Span> spans(count * rounds);  // [round, thread]
    std::barrier line_up(threads);
    const auto serve = [&](std::size_t thread) {
        run_on({cpus[thread]});
        for (std::size_t round = 0; round < rounds; ++round) {
            line_up.arrive_and_wait();
            Span& span = spans[round * count + thread];
            span.start = Clock::now();
            work(thread);
            span.end = Clock::now();
        }
    };
    {
        std::vector<std::jthread> pool;
        for (std::size_t thread = 0; thread < count; ++thread) pool.emplace_back(serve, thread);
    }
    std::vector<double> seconds;
    for (std::size_t round = 0; round < rounds; ++round) {
        const auto begin = spans.begin() + static_cast<std::ptrdiff_t>(round * count);
        const auto end = begin + threads;
        const auto first = std::min_element(begin, end, [](auto& a, auto& b) { return a.start < b.start; })->start;
        const auto last = std::max_element(begin, end, [](auto& a, auto& b) { return a.end < b.end; })->end;
        seconds.push_back(std::chrono::duration<double>(last - first).count());
    }
    std::sort(seconds.begin(), seconds.end());
    return (seconds[(rounds - 1) / 2] + seconds[rounds / 2]) / 2;
}

}  // namespace

double ram_read_s(const std::byte* data, std::size_t nbytes, int threads, int repeats) {
    const auto count = static_cast<std::size_t>(threads);
    const Sum sum = best_sum();
    std::atomic<std::uint64_t> sink{0};  // so that the sums are not optimised away
    return timed_s(threads, repeats, [&](std::size_t thread) {
        const std::size_t share = nbytes / count, first = share * thread;
        sink += sum(data + first, thread + 1 == count ? nbytes - first : share);
    });
}

double peak_per_s(const Kernels& kernels, bool int8, int threads) {
    constexpr std::int64_t kRounds = 30000;  // some milliseconds
    std::atomic<std::int64_t> operations{0};
    const double seconds = timed_s(threads, 5, [&](std::size_t) {
        float sink[2] = {1.0F, 0.5F};
        operations = (int8 ? kernels.int8_products : kernels.float_products)(kRounds, sink);
    });
    return static_cast<double>(operations) * threads / seconds;
}

}  // namespace penstock
