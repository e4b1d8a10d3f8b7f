// Checksums of a packed model's granules, and which of them were compared with what was read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace penstock {

inline constexpr std::int64_t kLeastHashed = 241;  // bytes: `Kernels::hash` takes no fewer

// Numbered from 0 over all parts of a model. A granule is compared until it was right once: whoever reads it again
// finds `checked` and hashes nothing. Any thread may call anything.
class Sums {
  public:
    Sums(const std::byte* content, std::size_t count);  // 8 bytes each, little-endian

    std::int64_t count() const { return static_cast<std::int64_t>(expected_.size()); }
    // Whether all of [first, first + count) were right once.
    bool checked(std::int64_t first, std::int64_t count) const;
    // Compares granules first, first + 1, … of `stride` bytes at `data`. Returns the first one that is wrong, counted
    // from `first`.
    std::optional<std::int64_t> first_wrong(std::int64_t first, std::int64_t count, const std::byte* data,
                                            std::int64_t stride);

  private:
    bool is_checked(std::size_t i) const;

    std::vector<std::uint64_t> expected_;
    std::vector<std::atomic<std::uint64_t>> checked_;  // a bit each
};

}  // namespace penstock
