// Blocks of a GGUF file, put into tiles of 16 rows bit by bit (spec/blocks.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace penstock {

// Rows of a GGUF tensor, and where their tiles go. A row has `blocks` blocks; rows lie `row_bytes` apart. Slice i of
// `slices` is the columns first_column + i · cols … of all rows. Its tiles go to `to` + i · slice_bytes. Beyond the
// file's rows and columns a block of zero bytes stands for what is not there.
struct Repack {
    Kind kind;  // kInt4 stands for Q4_1, which is int4 in groups of 32
    const std::uint8_t* from;
    std::size_t row_bytes;
    int rows, blocks, first_column, cols, slices;
    std::uint8_t* to;
    std::size_t slice_bytes;
};

// Writes the tiles. Returns false where a block's float16 numbers are NaN or infinite.
bool repack(const Repack& op);

// Whether `repack` takes these numbers: whole groups, and slices that begin where a tile's block may.
bool can_repack(const Repack& op);

}  // namespace penstock
