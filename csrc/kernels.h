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
#include <vector>

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
    bool starts_sum, continues, keeps;
};

constexpr int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// The limits of formats; spec/format.py has the same, and a test compares them. Columns of a scale, of weights and of a
// KV cache, are at most so many, for buffers of the kernels are so large, and multiples of so many.
constexpr int kMostGroup = 1024, kWeightGroup = 8, kKvGroup = 32;
constexpr int kPageTokens = 64;  // attention walks blocks of so many positions, each within one page

// The form of a layer's K and V in pages: for every KV head of a page a block, as spec/format.py draws it. `group`:
// columns of a scale, 0 for floats.
struct CacheShape {
    Kind kind = Kind::kFloat32;
    int group = 0, kv_heads = 0, page_tokens = 0, head_dim = 0;

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

struct KvCache : CacheShape {
    std::uint8_t *keys = nullptr, *values = nullptr;
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
    bool norms_all_heads;  // together; then a granule holds all of them
};

// A layer's router: scores of its experts, and the gate of the shared expert (rows == 0: none), blocks of one granule.
// `bias` [X] (null: none) counts where experts are chosen; `groups`: ranges of experts, of which some are kept.
struct RouterShape {
    Matrix scores, gate;
    const float* bias;
    bool softmax, normalised;
    int groups, groups_kept;
    float scale;
    int active;
};

// Which experts rows go to: ids [T, A], upwards in each row; what multiplies their outputs [T, A]; and the shared
// expert's [T].
struct Routes {
    std::uint8_t* data;
    std::int32_t* ids() const { return reinterpret_cast<std::int32_t*>(data); }
    float* weights(int t, int active) const { return reinterpret_cast<float*>(data) + std::ptrdiff_t(t) * active; }
    float* shared(int t, int active) const { return weights(t, active) + std::ptrdiff_t(t) * active; }
};

enum class NormKind : int { kNone, kRms, kLayer };

// RMS: x / sqrt(mean x² + eps) · (weight + offset); layer: of x - mean, plus bias. Null: no such term.
struct Norm {
    NormKind kind = NormKind::kNone;
    float eps = 0, offset = 0;
    const float *weight = nullptr, *bias = nullptr;
};

// The most likely token of a row so far; NaN once a logit was NaN.
struct Best {
    float logit;
    std::int32_t token;
};

// ---- operands ------------------------------------------------------------------------------------------------------
//
// What each op works on, by name; graph/ops says what is read and written. bind_ops.cpp fills these structs from Python
// field by field, and a test holds their names to the definitions there. `t`: T.

// out [T, rows of all granules] = x [T, cols] · block of each granule; `exact`: no int8 activations.
// Granule i writes columns i * rows …; at most `out_cols` columns in all.
struct ProjectOp {
    Granules weights;
    Matrix matrix;
    const float* x;
    std::ptrdiff_t x_stride;
    int t;
    float* out;
    std::ptrdiff_t out_stride;
    int out_cols;
    bool exact;
    Scratch scratch;
};

// The same for logits, capped at ±softcap where that is above 0. `best` [T] (null: not wanted) follows the most
// likely token over the calls of a pass, the lowest id where they tie, from nothing where it `starts`; column 0 is
// `first_token`.
struct HeadOp {
    Granules weights;
    Matrix matrix;
    const float* h;
    std::ptrdiff_t h_stride;
    int t;
    float* logits;
    std::ptrdiff_t out_stride;
    int out_cols;
    float softcap;
    int first_token;
    Best* best;
    bool starts, exact;
    Scratch scratch;
};

// partial [T, rows] (+)= Σ granules: a [T, granule i's cols] · block; granule i reads columns i * cols … of a.
struct OutOp {
    Granules weights;
    Matrix matrix;
    const float* a;
    std::ptrdiff_t a_stride;
    int t;
    float* partial;
    bool starts_sum, exact;
    Scratch scratch;
};

// partial [T, D] (+)= Σ granules: down · (act(gate h) * up h), or down · act(up h).
struct FfnOp {
    Granules weights;
    FfnShape shape;
    const float* h;
    int t;
    FfnSum sum;
    bool exact;
    Scratch scratch;
};

// routes of h [T, D]. `weights`: the router's granule.
struct RouteOp {
    const std::uint8_t* weights;
    RouterShape shape;
    const float* h;
    int t;
    Routes routes;
    Scratch scratch;
};

// partial [T, D] (+)= Σ weight · FFN of h over some experts, upwards. With `outputs` [T, A, D] (null: none) each
// expert's FFN goes there instead, for `combine` to add up, and the experts may come in any order. `weights`: where
// each expert begins; it has `per_expert` granules, `stride` bytes apart.
struct ExpertsOp {
    std::vector<const std::uint8_t*> weights;
    std::vector<int> ids;
    std::size_t stride;
    FfnShape shape;
    int per_expert, active;
    const float* h;
    int t;
    Routes routes;
    float *partial, *outputs;
    bool starts_sum, exact;
    Scratch scratch;
};

// partial [T, D] (+)= Σ weight · outputs [T, A, D], in the order of `routes`.
struct CombineOp {
    Routes routes;
    const float* outputs;
    int active, t, d;
    float* partial;
    bool starts_sum;
};

// partial [T, D] times the shared expert's weights.
struct GateOp {
    Routes routes;
    int active, t, d;
    float* partial;
};

// q [T, H, E], and k and v into the cache, for the KV heads of `attention`, of h [T, D]. cos, sin: float32
// [T, rope_dims / 2].
struct QkvOp {
    Granules weights;
    QkvShape shape;
    AttentionShape attention;
    const float* h;
    int t;
    const float *q_norm, *k_norm, *cos, *sin;
    const Sequence* sequences;
    int sequence_count;
    KvCache cache;
    float* q;
    bool exact;
    Scratch scratch;
};

// a [T, H, E] = softmax(scale · q kᵀ, causal and windowed) v.
struct AttendOp {
    AttentionShape attention;
    const Sequence* sequences;
    int sequence_count;
    KvCache cache;
    const float* q;
    float* a;
    Scratch scratch;
};

// h [T, D] = norm of x's rows, or of those that `chosen` [T] names (null: all); kNone copies.
struct NormOp {
    Norm norm;
    const float* x;
    const std::int32_t* chosen;
    int t, d;
    float* h;
};

// x [T, D] += out(Σ partials + bias), then x = after(x).
struct MergeOp {
    Norm out, after;
    const float* bias;
    float* x;
    std::vector<const float*> partials;
    int t, d;
    Scratch scratch;
};

// x [T, D] = embed_scale · rows.
struct EmbedOp {
    const float* rows;
    float embed_scale;
    int t, d;
    float* x;
};

// rows [T, cols] = those of `tokens` of a matrix that lies in granules of matrix.rows rows.
struct GatherOp {
    Granules weights;
    Matrix matrix;
    const std::int32_t* tokens;
    int t;
    float* rows;
};

// Integer weights as float32 or float16: the block `matrix` of each granule, in the tiles of `wide`, a block of
// granules `out_stride` bytes apart. Values must be within float16's range where that is wanted.
struct WidenOp {
    Granules weights;
    Matrix matrix, wide;
    std::uint8_t* out;
    std::size_t out_stride;
};

// Ops return false where the scratch is too small.
struct Kernels {
    const char* isa;
    bool (*project)(Pool&, const ProjectOp&);
    bool (*head)(Pool&, const HeadOp&);
    bool (*out)(Pool&, const OutOp&);
    bool (*ffn)(Pool&, const FfnOp&);
    bool (*route)(Pool&, const RouteOp&);
    bool (*experts)(Pool&, const ExpertsOp&);
    bool (*combine)(Pool&, const CombineOp&);
    bool (*gate)(Pool&, const GateOp&);
    bool (*qkv)(Pool&, const QkvOp&);
    bool (*attend)(Pool&, const AttendOp&);
    bool (*norm)(Pool&, const NormOp&);
    bool (*merge)(Pool&, const MergeOp&);
    bool (*embed)(Pool&, const EmbedOp&);
    bool (*gather)(Pool&, const GatherOp&);
    bool (*widen)(Pool&, const WidenOp&);
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
