#include "file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace penstock {
namespace {

constexpr std::int64_t kSector = 512;  // the smallest alignment that any disk takes

}  // namespace

ReadResult read_into(int fd, std::int64_t offset, std::byte* to, std::int64_t nbytes, std::int64_t block_bytes) {
    const bool direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    std::int64_t done = 0;
    while (done < nbytes) {
        const std::int64_t wanted = std::min(nbytes - done, block_bytes);
        const ssize_t got = pread(fd, to + done, static_cast<std::size_t>(wanted), offset + done);
        if (got < 0 && errno == EINTR) continue;
        // A direct read cut short at half a 4 KiB sector has met the end of the file; asking for more is an error
        // there.
        if (got < 0 && errno == EINVAL && direct && done > 0) break;
        if (got < 0) return {done, errno};
        if (got == 0) break;
        done += got;
        if (direct && got < wanted && got % kSector != 0) break;  // the end of the file, for the same reason
    }
    return {done, 0};
}

OpenResult open_direct(const char* path) {
    const auto open_with = [path](int extra) {
        int fd;
        do {
            fd = open(path, O_RDONLY | O_CLOEXEC | extra);
        } while (fd < 0 && errno == EINTR);
        return fd;
    };
    int fd = open_with(O_DIRECT);
    if (fd >= 0) return {fd, true, 0};
    if (errno != EINVAL && errno != EOPNOTSUPP) return {-1, false, errno};
    fd = open_with(0);
    return {fd, false, fd < 0 ? errno : 0};
}

int drop_cached(int fd, std::int64_t offset, std::int64_t nbytes) {
    return posix_fadvise(fd, offset, nbytes, POSIX_FADV_DONTNEED);
}

}  // namespace penstock
