// Weights that are read into the processor's caches while a disk is waited for: those of the ops that come next.
#pragma once

#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "threads.h"

namespace penstock {

constexpr std::size_t kByAll = std::numeric_limits<std::size_t>::max();  // the cost of a job that is too much for one

class ReadAhead {
  public:
    // `ranges`: (first byte, bytes), in the order in which they will be wanted.
    explicit ReadAhead(const std::vector<std::pair<const std::byte*, std::size_t>>& ranges);

    void begin() { next_ = 0; }
    // Reads the next piece, every thread of the pool a part of it, in some 10 µs. Returns false where none is left.
    bool some(Pool& pool);

  private:
    std::vector<std::pair<const std::byte*, std::size_t>> pieces_;
    std::size_t next_ = 0;
};

}  // namespace penstock
