// What operands of the native ops are made of: matrices, shapes and settings. kernels.h has the ops, and explains the
// letters and how matrices lie.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace penstock {

constexpr int kTileRows = 16;

// One group of a tile of int4 weights: codes, then 16 scales, then 16 minimums. CPU and GPU read the same layout.
template <int kGroup>
struct Int4Tile {
    std::uint8_t codes[kGroup / 8][16][4];  // line i, row r, byte b: columns 8i + b (low nibble) and 8i + 4 + b
    std::uint16_t scales[16];               // float16
    std::uint16_t minimums[16];
};
template <int kGroup>
struct Int8Tile {
    std::uint8_t codes[kGroup / 4][16][4];  // line i, row r, byte b: column 4i + b
    std::uint16_t scales[16];
    std::uint16_t minimums[16];
};
static_assert(sizeof(Int4Tile<64>) == 576, "4.5 bits a weight");
static_assert(sizeof(Int4Tile<32>) == 320, "5 bits a weight");
static_assert(sizeof(Int8Tile<64>) == 1088, "8.5 bits a weight");

constexpr int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr int kLineColumns = 32;  // columns of a neuron's row are padded to a multiple of this (spec/format.py)

// A block of a granule: a matrix [rows, cols] at byte `offset` of the granule. rows == 0: there is no such block. It
// lies in tiles, or where `row_stride` is above 0 row by row, so many bytes apart. Then each row is a neuron's.
struct Matrix {
    int rows = 0, cols = 0;
    Kind kind = Kind::kFloat32;
    int group = 0;
    std::size_t offset = 0, row_stride = 0;

    bool quantised() const { return kind >= Kind::kInt8; }
    bool by_row() const { return row_stride > 0; }
    // Bytes of a neuron's numbers or codes. Scales of all groups follow them, then minimums.
    std::size_t codes_bytes() const {
        const auto padded = std::size_t(up_to(cols, kLineColumns));
        if (quantised()) return kind == Kind::kInt4 ? padded / 2 : padded;
        return padded * (kind == Kind::kFloat32 ? 4 : 2);
    }
    int groups() const { return quantised() ? (cols + group - 1) / group : 0; }
    int tiles() const { return (rows + kTileRows - 1) / kTileRows; }
    std::size_t tile_bytes() const {
        switch (kind) {
            case Kind::kFloat32:
                return std::size_t(cols) * 64;
            case Kind::kFloat16:
                return std::size_t(cols) * 32;
            case Kind::kBfloat16:
                return std::size_t((cols + 1) / 2) * 64;
            case Kind::kInt8:
                return std::size_t(groups()) * (std::size_t(group) * 16 + 64);
            case Kind::kInt4:
                return std::size_t(groups()) * (std::size_t(group) * 8 + 64);
            default: {
                const Blocks blocks = blocks_of(kind);
                const int span = blocks.span(cols);
                return std::size_t(cols / span) * std::size_t(blocks.block_bytes(span));
            }
        }
    }
};

enum class Activation : int { kSilu, kGelu, kGeluTanh, kGeluQuick, kRelu, kRelu2, kSwigluClamped };

// Weights of a unit: `count` granules, `stride` bytes apart.
struct Granules {
    const std::uint8_t* data;
    int count;
    std::size_t stride;
};

// A unit that multiplies 16 rows of rounded activations with two adjacent tiles of integer weights at once (AMX), with
// the same bits as the vectors that it stands for. q [groups][16][group], x_scale and x_sum [groups][16] are one panel;
// tiles lie `next` bytes apart. sums [16 rows][2 tiles][16] += products, group by group. For groups of a multiple
// of 16.
struct UnitProducts {
    Matrix matrix;
    const std::uint8_t* first;
    std::size_t next, stride;  // from a tile to the next, from a granule to the next
    int granules, tiles;       // tiles: 1 or 2
    const std::int8_t* q;
    const float *x_scale, *x_sum;
    float* sums;
};
using Unit = void (*)(const UnitProducts&);
constexpr int kUnitRows = 16;

// Memory for temporaries. scratch.h says how much an op wants. With less, kernels cut their work into smaller pieces,
// as long as one piece fits.
struct Scratch {
    std::uint8_t* data;
    std::size_t nbytes;
    Unit unit = nullptr;  // what a call may use beside its memory
};

struct FfnShape {
    Matrix gate, up, down;
    std::size_t gate_bias = 0, up_bias = 0;  // byte offsets of float32 [N] in a granule; 0: none
    Activation activation = Activation::kSilu;

    int width() const { return down.by_row() ? down.cols : down.rows; }  // D
    const Matrix& first() const { return gate.rows > 0 ? gate : up; }    // what is activated
    // Whether a neuron's record has all of its weights, also the row that is activated.
    bool by_records() const { return first().by_row(); }
    std::size_t first_bias() const { return gate.rows > 0 ? gate_bias : up_bias; }
};

// Where the sums of an FFN go. Granules are summed by fours, counted from the layer's first granule. Then the fours are
// summed. Both sums go upwards. So a thread can take a whole four, whose bytes lie in one run, and neither the number
// of threads nor the cuts of units change a bit. A four has 256 neurons: of wide granules it has two, or one.
constexpr int kSumNeurons = 256;  // SUM_NEURONS of spec/parts.py
constexpr int sum_granules(int neurons) { return std::max(1, kSumNeurons / std::max(64, neurons)); }

struct FfnSum {
    float *partial, *pending;  // [T, D]; `pending` holds the sum of a four that is cut by units
    int granule;               // number of the call's first granule in the layer
    bool starts_sum;           // this call is the first addend of `partial`
    bool continues, keeps;     // the call before left a sum in `pending`; this call leaves one
};

// The limits of formats. spec/format.py has the same limits, and a test compares them.
constexpr int kMostGroup = 1024;                // the most columns of a scale: buffers of the kernels are so large
constexpr int kWeightGroup = 8, kKvGroup = 32;  // columns of a scale are a multiple of this, for weights and for KV
constexpr int kPageTokens = 64;                 // attention walks blocks of so many positions, each within one page

// How a layer's K and V lie in pages. A page has a block for each KV head, as spec/format.py draws it. `group`: columns
// of a scale, 0 for floats.
struct CacheShape {
    Kind kind = Kind::kFloat32;
    int group = 0, kv_heads = 0, page_tokens = 0, head_dim = 0;

    int groups() const { return group > 0 ? (head_dim + group - 1) / group : 0; }
    // Bytes of a token's numbers or codes in one head.
    std::size_t row_bytes() const {
        switch (kind) {
            case Kind::kFloat32:
                return std::size_t(head_dim) * 4;
            case Kind::kInt8:
                return std::size_t(up_to(head_dim, 16));
            case Kind::kInt4:
                return std::size_t(up_to(head_dim, 32)) / 2;
            default:
                return std::size_t(head_dim) * 2;
        }
    }
    // Byte offset of a head's block in the pool. Its rows lie row_bytes() apart.
    std::size_t block_at(int page, int head) const {
        return (std::size_t(page) * std::size_t(kv_heads) + std::size_t(head)) * std::size_t(page_tokens) *
               (row_bytes() + 4 * std::size_t(groups()));
    }
    // Byte offsets in its block of the float16 scale and minimum of a token's group g.
    std::size_t scale_at(int g, int slot) const {
        return std::size_t(page_tokens) * (row_bytes() + 2 * std::size_t(g)) + 2 * std::size_t(slot);
    }
    std::size_t minimum_at(int g, int slot) const { return scale_at(groups() + g, slot); }
};

struct KvCache : CacheShape {
    std::uint8_t *keys = nullptr, *values = nullptr;
};

// Rows of one sequence in a batch: `rows` of them from position `start`. Its pages stand in the batch's list of pages,
// in the order of its positions, from entry `first_page` on.
struct Sequence {
    std::int32_t first_page, start, rows;
};

// The settings of attention, for the KV heads [lo, hi). window 0: all positions. softcap 0: none.
struct AttentionShape {
    int heads, kv_heads, head_dim, lo, hi;
    float scale, softcap;
    int window;
};

// The matrices of q, k and v, and what is done to their products: biases are added (byte offsets in a granule, 0:
// none), each head of q and k is normed (RMS) where the op has weights for that, and its first `rope_dims` dimensions
// are rotated.
struct QkvShape {
    Matrix q, k, v;
    std::size_t q_bias, k_bias, v_bias;
    float norm_eps;
    int rope_dims;
    bool norms_all_heads;  // one norm over all heads together; then a granule holds all heads
};

// A layer's router. `scores` and `gate` (of the shared expert; rows == 0: none) are blocks of one granule. `bias` [X]
// (null: none) is added to scores for the choice of experts only, or with `bias_scored` to the router's outputs before
// they become scores. `groups`: ranges of experts, of which `groups_kept` may be chosen from.
struct RouterShape {
    Matrix scores, gate;
    const float* bias;
    bool bias_scored;
    bool softmax, normalised;
    int groups, groups_kept;
    float scale;
    int active;
};

// A router's answer, one array after the other: ids int32 [T, A] of the experts of each row in rising order, weights
// [T, A] that multiply their outputs, and weights [T] that multiply the shared expert's output.
struct Routes {
    std::uint8_t* data;
    std::int32_t* ids() const { return reinterpret_cast<std::int32_t*>(data); }
    float* weights(int t, int active) const { return reinterpret_cast<float*>(data) + std::ptrdiff_t(t) * active; }
    float* shared(int t, int active) const { return weights(t, active) + std::ptrdiff_t(t) * active; }
};

enum class NormKind : int { kNone, kRms, kLayer };

// RMS: x / sqrt(mean x² + eps) · (weight + offset). Layer: the same of x - mean, plus bias. weight, bias [D]; null:
// there is no such term.
struct Norm {
    NormKind kind = NormKind::kNone;
    float eps = 0, offset = 0;
    const float *weight = nullptr, *bias = nullptr;
};

// The most likely token of a row so far. `logit` is NaN once a logit was NaN.
struct Best {
    float logit;
    std::int32_t token;
};

}  // namespace penstock
