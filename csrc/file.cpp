#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace penstock {
namespace {

constexpr std::int64_t kSector = 512;  // bytes; the smallest alignment that any disk takes

// Makes a regular file's descriptor a blocking one and returns it. For anything else closes it and returns -1 with
// errno set: EISDIR, or EINVAL for a pipe or a device.
int regular(int fd) {
    struct stat status;
    int error = 0;
    if (fstat(fd, &status) != 0) {
        error = errno;
    } else if (!S_ISREG(status.st_mode)) {
        error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
    } else if (const int flags = fcntl(fd, F_GETFL); flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) != 0) {
        error = errno;  // it must block: an io_uring would give EAGAIN for reads of a descriptor that does not
    }
    if (error == 0) return fd;
    close(fd);
    errno = error;
    return -1;
}

}  // namespace

bool Piece::take(std::int64_t result, std::int64_t wanted) {
    if (result == -EINTR) return false;
    // A direct read that ended inside a 4 KiB sector has met the end of the file. To ask for more there is an error.
    if (result == -EINVAL && direct && done > 0) return true;
    if (result < 0) {
        error = static_cast<int>(-result);
        return true;
    }
    done += result;
    if (result == 0 || done == nbytes) return true;
    return direct && result < wanted && result % kSector != 0;  // this too is the end of the file
}

bool is_direct(int fd) { return (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

ReadResult read_into(int fd, std::int64_t offset, std::byte* to, std::int64_t nbytes, std::int64_t block_bytes) {
    Piece piece{fd, is_direct(fd), offset, to, nbytes};
    for (bool over = nbytes == 0; !over;) {
        const std::int64_t wanted = std::min(nbytes - piece.done, block_bytes);
        const ssize_t got = pread(fd, to + piece.done, static_cast<std::size_t>(wanted), offset + piece.done);
        over = piece.take(got < 0 ? -errno : got, wanted);
    }
    return {piece.done, piece.error};
}

OpenResult open_direct(const char* path) {
    const auto open_with = [path](int extra) {
        int fd;
        do {
            fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | extra);  // O_NONBLOCK: else a pipe waits for a writer
        } while (fd < 0 && errno == EINTR);
        return fd;
    };
    int fd = open_with(O_DIRECT);
    const bool direct = fd >= 0;
    if (!direct) {
        if (errno != EINVAL && errno != EOPNOTSUPP) return {-1, false, errno};
        fd = open_with(0);
    }
    if (fd >= 0) fd = regular(fd);
    return {fd, direct, fd < 0 ? errno : 0};
}

int drop_cached(int fd, std::int64_t offset, std::int64_t nbytes) {
    return posix_fadvise(fd, offset, nbytes, POSIX_FADV_DONTNEED);
}

}  // namespace penstock
