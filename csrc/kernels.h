// The native ops: raw pointers in, raw pointers out, one table of functions per instruction set.
//
// Letters: T rows (tokens), D d_model, H heads, K KV heads, G = H / K, E head_dim, N neurons of a granule.
//
// Matrices lie in tiles of 16 rows, as spec/format.py draws them; a tile's outputs are the 16 lanes of a vector, so
// no sum ever crosses lanes. Every output element is computed by one thread, its terms added in one order: columns (or
// groups) upwards, granules upwards (FFNs: see FfnSum). Which rows share a call, how many threads there are and where
// units are cut changes no bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "threads.h"

namespace penstock {

enum class Kind : int { kFloat32, kFloat16, kBfloat16, kInt8, kInt4 };

constexpr int kTileRows = 16;

// A tile and group of int4 weights: codes, then 16 scales, then 16 minimums. The one layout for CPU and GPU.
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

// A block of a granule: a matrix [rows, cols] at `offset` of it. rows == 0: there is none.
struct Matrix {
    int rows = 0, cols = 0;
    Kind kind = Kind::kFloat32;
    int group = 0;
    std::size_t offset = 0;

    bool quantised() const { return kind == Kind::kInt8 || kind == Kind::kInt4; }
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
        }
        return 0;
    }
};

enum class Activation : int { kSilu, kGelu, kGeluTanh, kGeluQuick, kRelu, kRelu2 };

// Weights of a unit: n granules, `stride` bytes apart.
struct Granules {
    const std::uint8_t* data;
    int count;
    std::size_t stride;
};

// Temporaries. scratch.h says how much an op wants; with less, kernels cut their work so that it fits while it can.
struct Scratch {
    std::uint8_t* data;
    std::size_t nbytes;
};

struct FfnShape {
    Matrix gate, up, down;
    std::size_t gate_bias = 0, up_bias = 0;  // offsets of float32 [N]; 0: none
    Activation activation = Activation::kSilu;
};

// Where the sums of an FFN go. Granules are summed by fours, counted from the layer's first, and then the fours, both
// in their order. So a thread can take a whole four, whose bytes lie in one run, and neither the number of threads nor
// the cuts of units change a bit. `pending` [T, D] holds the sum of a four that is cut: the call before left it
// (`continues`), or this one leaves it (`keeps`).
constexpr int kSumGranules = 4;  // SUM_GRANULES of spec/parts.py

struct FfnSum {
    float *partial, *pending;
    int granule;  // of the layer: the call's first
    bool first, continues, keeps;
};

constexpr int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// The limits of formats; spec/format.py has the same, and a test compares them. Columns of a scale, of weights and of a
// KV cache, are at most so many, for buffers of the kernels are so large, and multiples of so many.
constexpr int kMostGroup = 1024, kWeightGroup = 8, kKvGroup = 32;
constexpr int kPageTokens = 64;  // attention walks blocks of so many positions, each within one page

// A layer's K and V in pages: for every KV head of a page a block, as spec/format.py draws it. `group`: columns of a
// scale, 0 for floats.
struct KvCache {
    std::uint8_t *keys, *values;
    Kind kind;
    int group, kv_heads, page_tokens, head_dim;

    int groups() const { return group > 0 ? (head_dim + group - 1) / group : 0; }
    // A token's numbers or codes in one head.
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
    // Where a head's block begins; its rows lie row_bytes() apart.
    std::size_t block_at(int page, int head) const {
        return (std::size_t(page) * std::size_t(kv_heads) + std::size_t(head)) * std::size_t(page_tokens) *
               (row_bytes() + 4 * std::size_t(groups()));
    }
    // In its block, the float16 scale of a token's group, and its minimum.
    std::size_t scale_at(int g, int slot) const {
        return std::size_t(page_tokens) * (row_bytes() + 2 * std::size_t(g)) + 2 * std::size_t(slot);
    }
    std::size_t minimum_at(int g, int slot) const { return scale_at(groups() + g, slot); }
};

// Rows of one sequence in a batch: `rows` of them from position `start`; its pages are consecutive from `first_page`.
struct Sequence {
    std::int32_t first_page, start, rows;
};

// What attention does, and for which KV heads [lo, hi). window 0: all positions; softcap 0: none.
struct AttentionShape {
    int heads, kv_heads, head_dim, lo, hi;
    float scale, softcap;
    int window;
};

// What becomes of projected q, k and v: biases (per granule, byte offsets, 0: none), RMS norm of each head (null:
// none), rotation of the first `rope_dims`.
struct QkvShape {
    Matrix q, k, v;
    std::size_t q_bias, k_bias, v_bias;
    float norm_eps;
    int rope_dims;
};

enum class NormKind : int { kNone, kRms, kLayer };

// RMS: x / sqrt(mean x² + eps) · (weight + offset); layer: of x - mean, plus bias. Null: no such term.
struct Norm {
    NormKind kind = NormKind::kNone;
    float eps = 0, offset = 0;
    const float *weight = nullptr, *bias = nullptr;
};

// x += out(Σ partials + bias), then x = after(x).
struct Merge {
    Norm out, after;
    const float* bias = nullptr;
};

// The most likely token of a row so far; NaN once a logit was NaN.
struct Best {
    float logit;
    std::int32_t token;
};

struct Kernels {
    const char* isa;
    // out [T, rows of all granules] = x [T, cols] · block of each granule; `exact`: no int8 activations.
    // Granule i writes columns i * rows …; at most `out_cols` columns in all. Returns false if scratch is too small.
    bool (*project)(Pool&, const Granules&, const Matrix&, const float* x, std::ptrdiff_t x_stride, int t, float* out,
                    std::ptrdiff_t out_stride, int out_cols, bool exact, Scratch);
    // The same for logits, capped at ±softcap where that is above 0. `best` [T] (null: not wanted) follows the most
    // likely token over the calls of a pass, the lowest id where they tie; column 0 is `first_token`.
    bool (*head)(Pool&, const Granules&, const Matrix&, const float* h, std::ptrdiff_t h_stride, int t, float* logits,
                 std::ptrdiff_t stride, int out_cols, float softcap, int first_token, Best* best, bool exact, Scratch);
    // sum [T, rows] (+)= Σ granules: x [T, granule i's cols] · block; granule i reads columns i * cols … of x.
    bool (*accumulate)(Pool&, const Granules&, const Matrix&, const float* x, std::ptrdiff_t x_stride, int t,
                       float* sum, bool first, bool exact, Scratch);
    // partial [T, D] (+)= Σ granules: down · (act(gate h) * up h), or down · act(up h).
    bool (*ffn)(Pool&, const Granules&, const FfnShape&, const float* h, int t, const FfnSum&, bool exact, Scratch);
    // q [T, H, E], and k and v into the cache, for KV heads [lo, hi) of h [T, D]. cos, sin: float32 [T, rope_dims / 2].
    bool (*qkv)(Pool&, const Granules&, const QkvShape&, const AttentionShape&, const float* h, int t,
                const float* q_norm, const float* k_norm, const float* cos, const float* sin, const Sequence*,
                int sequences, const KvCache&, float* q, bool exact, Scratch);
    // out [T, H, E] = softmax(scale · q kᵀ, causal and windowed) v.
    bool (*attend)(Pool&, const AttentionShape&, const Sequence*, int sequences, const KvCache&, const float* q,
                   float* out, Scratch);
    // out [T, D] = norm of x's rows, or of those that `rows` [T] names (null: all); kNone copies.
    bool (*norm)(Pool&, const Norm&, const float* x, const std::int32_t* rows, int t, int d, float* out);
    // x [T, D] += …: see Merge. `count` partials [T, D].
    bool (*merge)(Pool&, const Merge&, float* x, const float* const* partials, int count, int t, int d, Scratch);
    // to [T, D] = factor · from.
    bool (*scale)(Pool&, const float* from, float factor, int t, int d, float* to);
    // out [T, cols] = rows `tokens` of a matrix that lies in granules of m.rows rows.
    bool (*gather)(Pool&, const Granules&, const Matrix&, const std::int32_t* tokens, int t, float* out);
    // Integer weights as float32 or float16: the block `m` of each granule, in the tiles of `wide`, a block of granules
    // `out_stride` bytes apart. Values must be within float16's range where that is wanted.
    bool (*widen)(Pool&, const Granules&, const Matrix& m, const Matrix& wide, std::uint8_t* out,
                  std::size_t out_stride);
    // `rounds` of products in registers, for the peak; return the operations done. `sink` [2] keeps compilers honest.
    std::int64_t (*int8_products)(std::int64_t rounds, float* sink);
    std::int64_t (*float_products)(std::int64_t rounds, float* sink);
    // XXH3 of 64 bits without a seed, of more than 240 bytes: the checksum of a granule.
    std::uint64_t (*hash)(const std::byte* data, std::size_t nbytes);
};

// The table of an instruction set ("avx512", "avxvnni", "avx2", "portable"); null if this build or processor has none
// of that name.
const Kernels* find_kernels(const char* isa);

// The fastest table that this processor has.
const Kernels* best_kernels();

extern const Kernels kPortableKernels, kAvx2Kernels, kAvxVnniKernels, kAvx512Kernels;

}  // namespace penstock
