// Reads of files that bypass the page cache. A cyclic scan of more than RAM gets nothing from the cache, and evicts
// other data from it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

struct ReadResult {
    std::int64_t nbytes;  // fewer than asked for only at the end of the file, or after an error
    int error;            // errno, 0 if all went well
};

// A range of a file on its way to memory, which may take several reads.
struct Piece {
    int fd;
    bool direct;
    std::int64_t offset;
    std::byte* to;
    std::int64_t nbytes;
    std::int64_t done = 0;
    int error = 0;

    // Takes the result of a read of the next `wanted` bytes: how many came, or -errno. Returns true if nothing is left
    // to ask for: all bytes are there, the file ended, or the read failed.
    bool take(std::int64_t result, std::int64_t wanted);
};

bool is_direct(int fd);

// Reads a range in blocks of at most block_bytes, one after the other. With O_DIRECT offset, address and block_bytes
// must be multiples of the disk's sector: 512 bytes or 4 KiB.
ReadResult read_into(int fd, std::int64_t offset, std::byte* to, std::int64_t nbytes, std::int64_t block_bytes);

struct OpenResult {
    int fd;       // -1 if it failed
    bool direct;  // false where the file system has no O_DIRECT
    int error;
};

// Opens a regular file for reading. Anything else gives EISDIR or EINVAL at once: it never waits for a pipe's writer.
OpenResult open_direct(const char* path);

// Tells the kernel that the cache need not keep this range. Returns errno, 0 if all went well.
int drop_cached(int fd, std::int64_t offset, std::int64_t nbytes);

}  // namespace penstock
