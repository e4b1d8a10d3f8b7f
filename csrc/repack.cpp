// One build for all processors: what takes the time is to load bytes and to store words, and wider registers do neither
// faster here.
#include "repack.h"

#include <cstring>

namespace penstock {

namespace {

constexpr int kRows = 16;       // of a tile
constexpr int kLineBytes = 64;  // a word of each of them

constexpr std::uint8_t kZeros[256] = {};

// Where the fields of a file's block begin, in bytes. `high`: of the high bits of codes. `integers`: of packed scales.
// `halves`: of the float16 numbers.
struct Fields {
    int codes, high, integers, halves[2];
};

constexpr Blocks layout_of(Kind kind) {
    return kind == Kind::kInt4 ? Blocks{32, 20, 4, 0, 32, 2, 0, 1} : blocks_of(kind);
}

constexpr Fields fields_of(Kind kind) {
    switch (kind) {
        case Kind::kQ2K:
            return {16, 0, 0, {80, 82}};
        case Kind::kQ3K:
            return {32, 0, 96, {108, 0}};
        case Kind::kQ4K:
            return {16, 0, 4, {0, 2}};
        case Kind::kQ5K:
            return {48, 16, 4, {0, 2}};
        case Kind::kQ6K:
            return {0, 128, 192, {208, 0}};
        case Kind::kIq4Xs:
            return {8, 0, 4, {0, 0}};
        default: {  // blocks of 32: float16 numbers (mxfp4: one byte), high bits, codes
            const Blocks b = layout_of(kind);
            const int begin = b.halves > 0 ? 2 * b.halves : 1;
            return {begin + 4 * b.high, begin, 0, {0, 2}};
        }
    }
}

inline std::uint32_t word_at(const std::uint8_t* p) {
    std::uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}
inline std::uint16_t half_at(const std::uint8_t* p) {
    std::uint16_t half;
    std::memcpy(&half, p, 2);
    return half;
}
inline void put_word(std::uint8_t* to, std::uint32_t word) { std::memcpy(to, &word, 4); }

// The low bits of columns 4l … 4l + 3 of group g of a block, as four bytes.
template <Kind kind>
inline std::uint32_t low_bits(const std::uint8_t* block, int g, int l) {
    constexpr Blocks kLayout = layout_of(kind);
    const std::uint8_t* const p = block + fields_of(kind).codes;
    if constexpr (kLayout.low == 8) {
        return word_at(p + 4 * l) ^ 0x80808080U;  // signed bytes, plus 128
    } else if constexpr (kLayout.low == 2) {
        return word_at(p + 32 * (g / 4) + 4 * l) >> 2 * (g % 4) & 0x03030303U;
    } else if constexpr (kLayout.columns == kBlockGroup || kind == Kind::kIq4Xs) {  // 16 bytes, low nibbles first
        return word_at(p + 16 * g + 4 * (l % 4)) >> 4 * (l / 4) & 0x0f0f0f0fU;
    } else if constexpr (kind == Kind::kQ6K) {  // 64 bytes have columns 0 … 63 in their low nibbles
        return word_at(p + 64 * (g / 4) + 32 * (g % 2) + 4 * l) >> 4 * (g / 2 % 2) & 0x0f0f0f0fU;
    } else {  // 32 bytes have columns 0 … 31 in their low nibbles
        return word_at(p + 32 * (g / 2) + 4 * l) >> 4 * (g % 2) & 0x0f0f0f0fU;
    }
}

// Their high bits, as four bytes.
template <Kind kind>
inline std::uint32_t high_bits(const std::uint8_t* block, int g, int l) {
    constexpr Blocks kLayout = layout_of(kind);
    const std::uint8_t* const p = block + fields_of(kind).high;
    if constexpr (kLayout.high == 2) {
        return word_at(p + 32 * (g / 4) + 4 * l) >> 2 * (g % 4) & 0x03030303U;
    } else if constexpr (kLayout.columns == kBlockGroup) {  // bit i of a word is column i's
        // The product puts bit b of four bits at bit 8b; other bits of it lie between and are masked out.
        return (word_at(p) >> 4 * l & 15U) * 0x00204081U & 0x01010101U;
    } else {
        return word_at(p + 4 * l) >> g & 0x01010101U;
    }
}

// The lines of group g of a block, for one row.
template <Kind kind>
inline void put_lines(const std::uint8_t* block, int g, std::uint8_t* to) {
    constexpr Blocks kLayout = layout_of(kind);
    constexpr int kLow = 8 / kLayout.low;
#pragma GCC unroll 8
    for (int line = 0; line < kLayout.low; ++line) {
        std::uint32_t word = 0;
#pragma GCC unroll 4
        for (int i = 0; i < kLow; ++i) word |= low_bits<kind>(block, g, kLow * line + i) << kLayout.low * i;
        put_word(to + kLineBytes * line, word);
    }
    if constexpr (kLayout.high > 0) {
        constexpr int kHigh = 8 / kLayout.high;
#pragma GCC unroll 2
        for (int line = 0; line < kLayout.high; ++line) {
            std::uint32_t word = 0;
#pragma GCC unroll 8
            for (int i = 0; i < kHigh; ++i) word |= high_bits<kind>(block, g, kHigh * line + i) << kLayout.high * i;
            put_word(to + kLineBytes * (kLayout.low + line), word);
        }
    }
}

// Integer scale i of a block of 256 columns, as a byte that stands in for it, and integer minimum i.
template <Kind kind>
inline std::uint8_t scale_at(const std::uint8_t* block, int i) {
    const std::uint8_t* const p = block + fields_of(kind).integers;
    if constexpr (kind == Kind::kQ4K || kind == Kind::kQ5K) {
        return static_cast<std::uint8_t>(i < 4 ? p[i] & 63 : (p[4 + i] & 15) | (p[i - 4] >> 2 & 48));
    } else if constexpr (kind == Kind::kQ3K) {
        return static_cast<std::uint8_t>((p[i % 8] >> 4 * (i / 8) & 15) | (p[8 + i % 4] >> 2 * (i / 4) & 3) << 4);
    } else if constexpr (kind == Kind::kIq4Xs) {
        return static_cast<std::uint8_t>((p[i / 2] >> 4 * (i % 2) & 15) | (half_at(p - 2) >> 2 * i & 3) << 4);
    } else {
        return p[i];
    }
}
inline std::uint8_t minimum_of_q4_k(const std::uint8_t* integers, int i) {
    const std::uint8_t* const p = integers;
    return static_cast<std::uint8_t>(i < 4 ? p[4 + i] & 63 : (p[4 + i] >> 4) | (p[i] >> 2 & 48));
}

// The integer scales of `span` columns from `first` on of a block of 256, for one row. Returns the bytes of 16 rows.
template <Kind kind>
inline int put_integers(const std::uint8_t* block, int first, int span, int row, std::uint8_t* to) {
    constexpr Blocks kLayout = layout_of(kind);
    const int nbytes = kLayout.scale_bytes(span);
    if (span == kLayout.columns) {
        const std::uint8_t* const p = block + fields_of(kind).integers;
        for (int i = 0; i < nbytes / 4; ++i) put_word(to + kLineBytes * i + 4 * row, word_at(p + 4 * i));
        if constexpr (kind == Kind::kIq4Xs) std::memcpy(to + kLineBytes + 2 * row, p - 2, 2);
        return kRows * nbytes;
    }
    std::uint8_t bytes[16] = {};
    const int count = span / kLayout.scaled, begin = first / kLayout.scaled;
    for (int i = 0; i < count; ++i) {
        bytes[i] = scale_at<kind>(block, begin + i);
        if constexpr (kLayout.integers == 2) {
            bytes[count + i] = minimum_of_q4_k(block + fields_of(kind).integers, begin + i);
        }
    }
    for (int i = 0; i < nbytes / 4; ++i) put_word(to + kLineBytes * i + 4 * row, word_at(bytes + 4 * i));
    return kRows * nbytes;
}

// A tile's block of `span` columns from `column` on. Returns false for NaN or infinite float16 numbers.
template <Kind kind>
inline bool put_block(const Repack& op, int tile, int column, int span, std::uint8_t* to) {
    constexpr Blocks kLayout = layout_of(kind);
    constexpr Fields kFields = fields_of(kind);
    constexpr int kGroupBytes = kLineBytes * (kLayout.low + kLayout.high);
    bool finite = true;
    const auto put_halves = [&](const std::uint8_t* block, int row, std::uint8_t* into) {
        for (int i = 0; i < kLayout.halves; ++i) {
            const std::uint16_t half = half_at(block + kFields.halves[i]);
            finite &= (half & 0x7c00) != 0x7c00;
            std::memcpy(into + 2 * kRows * i + 2 * row, &half, 2);
        }
    };
    for (int row = 0; row < kRows; ++row) {
        const int nth = kRows * tile + row;
        const auto block_at = [&](int block) {
            if (nth >= op.rows || block >= op.blocks) return kZeros;
            return op.from + std::size_t(nth) * op.row_bytes + std::size_t(block) * std::size_t(kLayout.nbytes);
        };
        if constexpr (kind == Kind::kInt4) {  // scales and minimums lie behind each group's codes
            for (int g = 0; g < span / kBlockGroup; ++g) {
                const std::uint8_t* const block = block_at(column / kBlockGroup + g);
                std::uint8_t* const group = to + g * (kGroupBytes + kLineBytes);
                put_lines<kind>(block, 0, group + 4 * row);
                put_halves(block, row, group + kGroupBytes);
            }
        } else if constexpr (kLayout.columns == kBlockGroup) {
            std::uint8_t* const codes = to + kLayout.header_bytes(span) + 4 * row;
            for (int g = 0; g < span / kBlockGroup; ++g) {
                const std::uint8_t* const block = block_at(column / kBlockGroup + g);
                if constexpr (kLayout.halves == 0) to[kRows * g + row] = block[0];
                put_halves(block, row, to + 2 * kRows * kLayout.halves * g);
                put_lines<kind>(block, 0, codes + g * kGroupBytes);
            }
        } else {
            const std::uint8_t* const block = block_at(column / kLayout.columns);
            const int first = column % kLayout.columns;
            put_halves(block, row, to + put_integers<kind>(block, first, span, row, to));
            std::uint8_t* const codes = to + kLayout.header_bytes(span) + 4 * row;
            for (int g = 0; g < span / kBlockGroup; ++g) {
                put_lines<kind>(block, first / kBlockGroup + g, codes + g * kGroupBytes);
            }
        }
    }
    return finite;
}

// As put_block, of a format of folders: a file's block is header words, then words of codes as lines have them. Returns
// false also for codes of float8 that are NaN.
template <Kind kind>
inline bool put_words(const Repack& op, int tile, int column, int span, std::uint8_t* to) {
    constexpr Blocks kLayout = layout_of(kind);
    constexpr int kHeader = kLayout.nbytes - kLayout.columns * kLayout.low / 8;
    const int first = column % kLayout.columns, headers = kLayout.scale_bytes(span) / 4,
              lines = span * kLayout.low / 32;
    bool finite = true;
    for (int row = 0; row < kRows; ++row) {
        const int nth = kRows * tile + row, number = column / kLayout.columns;
        const bool there = nth < op.rows && number < op.blocks;
        const std::uint8_t* const block =
            there ? op.from + std::size_t(nth) * op.row_bytes + std::size_t(number) * std::size_t(kLayout.nbytes)
                  : kZeros;
        for (int i = 0; i < headers; ++i) {
            const std::uint32_t word = word_at(block + 4 * (kLayout.scale_of(first) + i));
            finite &= (word & 0x7f800000U) != 0x7f800000U;
            put_word(to + kLineBytes * i + 4 * row, word);
        }
        std::uint8_t* const codes = to + kLayout.header_bytes(span) + 4 * row;
        for (int i = 0; i < lines; ++i) {
            const std::uint32_t word = word_at(block + kHeader + first * kLayout.low / 8 + 4 * i);
            if constexpr (kind == Kind::kFloat8) {  // a byte of 127 becomes 128, and no other one does
                finite &= ((((word & 0x7f7f7f7fU) + 0x01010101U) & 0x80808080U)) == 0;
            }
            put_word(codes + kLineBytes * i, word);
        }
    }
    return finite;
}

template <Kind kind>
bool repack_as(const Repack& op) {
    constexpr Blocks kLayout = layout_of(kind);
    const int span = kind == Kind::kInt4 ? kBlockGroup : kLayout.span(op.cols);
    const int block_bytes = kind == Kind::kInt4 ? 5 * kLineBytes : kLayout.block_bytes(span);
    const std::size_t tile_bytes = std::size_t(op.cols / span) * std::size_t(block_bytes);
    bool finite = true;
    // Slices are inside, so that a block of the file which several slices share is read once.
    for (int tile = 0; tile < (op.rows + kRows - 1) / kRows; ++tile) {
        for (int slice = 0; slice < op.slices; ++slice) {
            std::uint8_t* to = op.to + std::size_t(slice) * op.slice_bytes + std::size_t(tile) * tile_bytes;
            const int first = op.first_column + slice * op.cols;
            for (int column = first; column < first + op.cols; column += span, to += block_bytes) {
                if constexpr (kLayout.word > 0) {
                    finite &= put_words<kind>(op, tile, column, span, to);
                } else {
                    finite &= put_block<kind>(op, tile, column, span, to);
                }
            }
        }
    }
    return finite;
}

}  // namespace

bool can_repack(const Repack& op) {
    if (op.kind != Kind::kInt4 && !in_blocks(op.kind)) return false;
    if (op.rows < 0 || op.blocks < 0 || op.slices < 0 || op.cols < 1 || op.cols % kBlockGroup != 0) return false;
    return op.first_column >= 0 && op.first_column % layout_of(op.kind).span(op.cols) == 0;
}

bool repack(const Repack& op) {
    switch (op.kind) {
        case Kind::kInt4:
            return repack_as<Kind::kInt4>(op);
        case Kind::kQ4_0:
            return repack_as<Kind::kQ4_0>(op);
        case Kind::kQ5_0:
            return repack_as<Kind::kQ5_0>(op);
        case Kind::kQ5_1:
            return repack_as<Kind::kQ5_1>(op);
        case Kind::kQ8_0:
            return repack_as<Kind::kQ8_0>(op);
        case Kind::kIq4Nl:
            return repack_as<Kind::kIq4Nl>(op);
        case Kind::kMxfp4:
            return repack_as<Kind::kMxfp4>(op);
        case Kind::kQ2K:
            return repack_as<Kind::kQ2K>(op);
        case Kind::kQ3K:
            return repack_as<Kind::kQ3K>(op);
        case Kind::kQ4K:
            return repack_as<Kind::kQ4K>(op);
        case Kind::kQ5K:
            return repack_as<Kind::kQ5K>(op);
        case Kind::kQ6K:
            return repack_as<Kind::kQ6K>(op);
        case Kind::kIq4Xs:
            return repack_as<Kind::kIq4Xs>(op);
        case Kind::kUint4G32:
            return repack_as<Kind::kUint4G32>(op);
        case Kind::kUint4G64:
            return repack_as<Kind::kUint4G64>(op);
        case Kind::kUint4G128:
            return repack_as<Kind::kUint4G128>(op);
        case Kind::kUint8G32:
            return repack_as<Kind::kUint8G32>(op);
        case Kind::kUint8G128:
            return repack_as<Kind::kUint8G128>(op);
        case Kind::kFloat8:
            return repack_as<Kind::kFloat8>(op);
        default:
            return false;
    }
}

}  // namespace penstock
