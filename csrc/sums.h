// The checksums of a packed model's granules, and a note of which granules were compared with them already.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace penstock {

inline constexpr std::int64_t kLeastHashed = 241;  // bytes: `Kernels::hash` takes no fewer

// Granules are numbered from 0 over all parts of a model. A granule that was right once is not compared again. Any
// thread may call any function.
class Sums {
  public:
    Sums(const std::byte* content, std::size_t count);  // 8 bytes each, little-endian

    std::int64_t count() const { return static_cast<std::int64_t>(expected_.size()); }
    // Whether all granules [first, first + count) were right once.
    bool checked(std::int64_t first, std::int64_t count) const;
    // Compares granules first, first + 1, … of `stride` bytes each, which lie at `data`. Returns the number of the
    // first one that is wrong, counted from `first`.
    std::optional<std::int64_t> first_wrong(std::int64_t first, std::int64_t count, const std::byte* data,
                                            std::int64_t stride);

  private:
    bool is_checked(std::size_t i) const;

    std::vector<std::uint64_t> expected_;
    std::vector<std::atomic<std::uint64_t>> checked_;  // a bit each
};

}  // namespace penstock
