// Reads that go around the page cache: a cyclic scan bigger than RAM gets nothing from it, and evicts what would.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

struct ReadResult {
    std::int64_t nbytes;  // fewer than asked for only at the end of the file
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

    // Takes what a read of the next `wanted` bytes came to: bytes, or -errno. True if nothing is left to ask for: all
    // is there, the file ended, or it failed.
    bool take(std::int64_t result, std::int64_t wanted);
};

bool is_direct(int fd);

// Blocks of at most block_bytes, one after the other. With O_DIRECT offset, address and block_bytes must be multiples
// of what the disk asks for: 512 bytes or 4 KiB.
ReadResult read_into(int fd, std::int64_t offset, std::byte* to, std::int64_t nbytes, std::int64_t block_bytes);

struct OpenResult {
    int fd;       // -1 if it failed
    bool direct;  // false where the file system knows no O_DIRECT
    int error;
};

// A regular file, to read from. What is none gives EISDIR or EINVAL, and is not waited for.
OpenResult open_direct(const char* path);

// Tells the kernel that the cache need not keep this range. Returns errno, 0 if all went well.
int drop_cached(int fd, std::int64_t offset, std::int64_t nbytes);

}  // namespace penstock
