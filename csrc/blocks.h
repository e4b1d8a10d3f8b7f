// Formats that others quantise to, as spec/blocks.py draws them: sizes of their blocks in tiles of 16 rows.
#pragma once

#include <cstddef>
#include <numeric>

namespace penstock {

enum class Kind : int {
    kFloat32,
    kFloat16,
    kBfloat16,
    kInt8,
    kInt4,
    // In blocks, in the order of kBlocks.
    kQ4_0,
    kQ5_0,
    kQ5_1,
    kQ8_0,
    kIq4Nl,
    kMxfp4,
    kQ2K,
    kQ3K,
    kQ4K,
    kQ5K,
    kQ6K,
    kIq4Xs,
    kUint4G32,
    kUint4G64,
    kUint4G128,
    kUint8G32,
    kUint8G128,
    kFloat8
};

constexpr int kBlockGroup = 32;  // columns of a group of these formats

// A row of spec.blocks.BLOCKS, whose fields have the same names.
struct Blocks {
    int columns, nbytes, low, high, scaled, halves, offset, integers;
    int word = 0;

    // S: columns of a block in a tile of a matrix with so many columns.
    constexpr int span(int cols) const { return std::gcd(cols, columns == kBlockGroup ? 64 : columns); }
    // Bytes of a row's integer scales and minimums in the header of such a block.
    constexpr int scale_bytes(int span) const {
        if (word > 0) return 4 * (span > scaled ? span / scaled : 1);
        if (columns == kBlockGroup) return halves > 0 ? 0 : span / kBlockGroup;
        if (span == columns) return nbytes - 2 * halves - columns * (low + high) / 8;
        return (integers * (span / scaled) + 3) / 4 * 4;
    }
    // Bytes of 16 rows in that header, and in the whole block.
    constexpr int header_bytes(int span) const {
        return 16 * (scale_bytes(span) + 2 * halves * (columns == kBlockGroup ? span / kBlockGroup : 1));
    }
    constexpr int block_bytes(int span) const { return header_bytes(span) + 2 * span * (low + high); }
    constexpr bool has_minimum() const { return integers == 2 || (halves == 2 && offset == 0) || word == 2; }
    // Number of the scale, in a block, of its columns from `column` on.
    constexpr int scale_of(int column) const { return column / scaled; }
};

constexpr Blocks kBlocks[] = {
    {32, 18, 4, 0, 32, 1, 8, 1},        // q4_0
    {32, 22, 4, 1, 32, 1, 16, 1},       // q5_0
    {32, 24, 4, 1, 32, 2, 0, 1},        // q5_1
    {32, 34, 8, 0, 32, 1, 128, 1},      // q8_0
    {32, 18, 4, 0, 32, 1, 128, 1},      // iq4_nl
    {32, 17, 4, 0, 32, 0, 12, 1},       // mxfp4
    {256, 84, 2, 0, 16, 2, 0, 1},       // q2_k
    {256, 110, 2, 1, 16, 1, 4, 1},      // q3_k
    {256, 144, 4, 0, 32, 2, 0, 2},      // q4_k
    {256, 176, 4, 1, 32, 2, 0, 2},      // q5_k
    {256, 210, 4, 2, 16, 1, 32, 1},     // q6_k
    {256, 136, 4, 0, 32, 1, 128, 1},    // iq4_xs
    {128, 80, 4, 0, 32, 0, 0, 1, 2},    // uint4_g32
    {128, 72, 4, 0, 64, 0, 0, 1, 2},    // uint4_g64
    {128, 68, 4, 0, 128, 0, 0, 1, 2},   // uint4_g128
    {128, 144, 8, 0, 32, 0, 0, 1, 2},   // uint8_g32
    {128, 132, 8, 0, 128, 0, 0, 1, 2},  // uint8_g128
    {128, 132, 8, 0, 128, 0, 0, 1, 1}   // float8
};

constexpr bool in_blocks(Kind kind) { return kind >= Kind::kQ4_0; }
// Whether codes can be multiplied by rounded activations as integers. Others want exact activations.
constexpr bool multiplies_codes(Kind kind) { return kind != Kind::kFloat8; }
constexpr Blocks blocks_of(Kind kind) { return kBlocks[static_cast<int>(kind) - static_cast<int>(Kind::kQ4_0)]; }
// The largest code that is multiplied: what a table has, where there is one.
constexpr int most_code(Kind kind) {
    if (kind == Kind::kMxfp4) return 24;
    if (kind == Kind::kIq4Nl || kind == Kind::kIq4Xs) return 255;
    return (1 << (blocks_of(kind).low + blocks_of(kind).high)) - 1;
}
static_assert(blocks_of(Kind::kUint4G128).block_bytes(64) == 64 + 8 * 64, "4.5 bits a weight in `down`");
static_assert(blocks_of(Kind::kQ4K).block_bytes(256) == 16 * 144 && blocks_of(Kind::kQ6K).block_bytes(256) == 16 * 210);

// Calls run.operator()<kind>() for a matrix in blocks.
template <class Run>
void by_blocks(Kind kind, const Run& run) {
    switch (kind) {
        case Kind::kQ4_0:
            return run.template operator()<Kind::kQ4_0>();
        case Kind::kQ5_0:
            return run.template operator()<Kind::kQ5_0>();
        case Kind::kQ5_1:
            return run.template operator()<Kind::kQ5_1>();
        case Kind::kQ8_0:
            return run.template operator()<Kind::kQ8_0>();
        case Kind::kIq4Nl:
            return run.template operator()<Kind::kIq4Nl>();
        case Kind::kMxfp4:
            return run.template operator()<Kind::kMxfp4>();
        case Kind::kQ2K:
            return run.template operator()<Kind::kQ2K>();
        case Kind::kQ3K:
            return run.template operator()<Kind::kQ3K>();
        case Kind::kQ4K:
            return run.template operator()<Kind::kQ4K>();
        case Kind::kQ5K:
            return run.template operator()<Kind::kQ5K>();
        case Kind::kQ6K:
            return run.template operator()<Kind::kQ6K>();
        case Kind::kIq4Xs:
            return run.template operator()<Kind::kIq4Xs>();
        case Kind::kUint4G32:
            return run.template operator()<Kind::kUint4G32>();
        case Kind::kUint4G64:
            return run.template operator()<Kind::kUint4G64>();
        case Kind::kUint4G128:
            return run.template operator()<Kind::kUint4G128>();
        case Kind::kUint8G32:
            return run.template operator()<Kind::kUint8G32>();
        case Kind::kUint8G128:
            return run.template operator()<Kind::kUint8G128>();
        case Kind::kFloat8:
            return run.template operator()<Kind::kFloat8>();
        default:
            return;
    }
}

}  // namespace penstock
