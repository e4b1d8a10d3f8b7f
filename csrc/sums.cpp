#include "sums.h"

#include <bit>
#include <cstring>

#include "kernels.h"

namespace penstock {

static_assert(std::endian::native == std::endian::little, "checksums lie little-endian, as weights do");

Sums::Sums(const std::byte* content, std::size_t count) : expected_(count), checked_((count + 63) / 64) {
    std::memcpy(expected_.data(), content, count * sizeof(std::uint64_t));
}

bool Sums::is_checked(std::size_t i) const {
    return (checked_[i / 64].load(std::memory_order_relaxed) >> (i % 64) & 1) != 0;
}

bool Sums::checked(std::int64_t first, std::int64_t count) const {
    for (std::int64_t i = first; i < first + count; ++i) {
        if (!is_checked(static_cast<std::size_t>(i))) return false;
    }
    return true;
}

std::optional<std::int64_t> Sums::first_wrong(std::int64_t first, std::int64_t count, const std::byte* data,
                                              std::int64_t stride) {
    static const Kernels* const kernels = best_kernels();  // kept, since a look-up takes longer than to hash 4 KiB
    for (std::int64_t i = 0; i < count; ++i) {
        const auto number = static_cast<std::size_t>(first + i);
        if (is_checked(number)) continue;
        if (kernels->hash(data + i * stride, static_cast<std::size_t>(stride)) != expected_[number]) return i;
        checked_[number / 64].fetch_or(std::uint64_t{1} << (number % 64), std::memory_order_relaxed);
    }
    return std::nullopt;
}

}  // namespace penstock
