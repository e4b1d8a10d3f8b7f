#include "read_ahead.h"

#include <algorithm>

namespace penstock {
namespace {

constexpr std::size_t kPiece = std::size_t{512} << 10;
constexpr std::size_t kLine = 64;

}  // namespace

ReadAhead::ReadAhead(const std::vector<std::pair<const std::byte*, std::size_t>>& ranges) {
    for (const auto& [from, nbytes] : ranges) {
        for (std::size_t at = 0; at < nbytes; at += kPiece)
            pieces_.emplace_back(from + at, std::min(kPiece, nbytes - at));
    }
}

bool ReadAhead::some(Pool& pool) {
    if (next_ == pieces_.size()) return false;
    const auto [from, nbytes] = pieces_[next_++];
    pool.run(kByAll, [from = static_cast<const volatile std::byte*>(from), nbytes = nbytes](const Team& team) {
        const auto [lo, hi] = team.share(static_cast<int>((nbytes + kLine - 1) / kLine));
        for (int line = lo; line < hi; ++line) static_cast<void>(from[std::size_t(line) * kLine]);
    });
    return true;
}

}  // namespace penstock
