// The native ops: their operands as structs of raw pointers, and one table of functions per instruction set.
//
// Letters in shapes: T rows (tokens), D d_model, H heads, K KV heads, G = H / K, E head_dim, N neurons of a granule,
// X experts, A experts that a row goes to. Arrays are float32 where nothing else is said.
//
// Matrices lie in tiles of 16 rows, or neuron by neuron, as spec/format.py draws them. A tile's outputs are the 16
// lanes of a vector, so no sum of them crosses lanes. Every output element is computed by one thread, and its terms are
// added in one order: columns (or groups) upwards, granules upwards (FFNs: see FfnSum). So no bit depends on which rows
// share a call, on the number of threads, or on where units are cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "blocks.h"
#include "threads.h"

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

// ---- operands ------------------------------------------------------------------------------------------------------
//
// The operands of each op by name. graph/ops says which of them are read and written. bind_ops.cpp fills these structs
// from Python field by field, and a test holds their names to the definitions there. `t` is T. Strides count elements,
// but that of granules counts bytes. `exact`: activations are not rounded to int8.

// out [T, rows of all granules] = x [T, cols] · block of each granule. Granule i writes the columns from i * rows on,
// and at most `out_cols` columns are written in all.
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

// As `project`, for logits, which are capped at ±softcap where that is above 0. `best` [T] (null: not wanted) is
// updated to the most likely token over the calls of a pass, which is the lowest id where logits tie. `starts`: this is
// the first of these calls. Column 0 is the token `first_token`.
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

// partial [T, rows] (+)= Σ granules: a [T, granule i's cols] · block. Granule i reads the columns of a from i * cols
// on.
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

// partial [T, D] (+)= Σ granules: down · (act(gate h) * up h), or down · act(up h). h [T, D]. `skips`: what is
// multiplied by act(…) = 0 may be left out, which changes no bit. `fired` uint8 [T, neurons of the layer], rows
// `fired_stride` bytes apart (null: not wanted): whether act(…) of a neuron was not 0. `active` uint8 [T, neurons of
// the layer], rows `active_stride` bytes apart (null: all are): a neuron that is not active in a row counts as if
// act(…) were 0 there. Its weights are not read where that can be helped. `level`: where |act(…)| is below it, it
// counts as 0. `values`: what `FireOp` gave for these granules, of FFNs that lie neuron by neuron and few rows
// (null: it is computed here). With them only the rows of neurons that fire are read of the weights. `biases`: where
// granules with the biases lie, `bias_stride` bytes apart, of few rows whose weights are records alone (0: with the
// weights).
struct FfnOp {
    Granules weights;
    FfnShape shape;
    const float* h;
    int t;
    FfnSum sum;
    bool exact;
    Scratch scratch;
    bool skips = false;
    std::uint8_t* fired = nullptr;
    std::ptrdiff_t fired_stride = 0;
    const std::uint8_t* active = nullptr;
    std::ptrdiff_t active_stride = 0;
    float level = 0;
    const float* values = nullptr;
    std::uintptr_t biases = 0;
    std::size_t bias_stride = 0;

    // Granule g for its biases.
    const std::uint8_t* biased(int g) const {
        if (biases == 0) return weights.data + std::size_t(g) * weights.stride;
        return reinterpret_cast<const std::uint8_t*>(biases + std::size_t(g) * bias_stride);
    }
};

// values [count, t, kGranuleRows] = act(gate h), or act(up h), of each granule: what `FfnOp` takes as `values`. Only
// the matrix that is activated is read, and its bias.
struct FireOp {
    Granules weights;
    FfnShape shape;
    const float* h;
    int t;
    float* values;
    bool exact;
    Scratch scratch;
};

// active uint8 [T, N] = whether neurons · relu(hidden · h + hidden_bias) + neurons_bias is above 0, for h [T, D].
// `weights`: a granule with both matrices, and at byte offsets their biases, float32.
struct PredictOp {
    const std::uint8_t* weights;
    Matrix hidden, neurons;
    std::size_t hidden_bias, neurons_bias;
    const float* h;
    int t;
    std::uint8_t* active;
    bool exact;
    Scratch scratch;
};

// routes = the router's answer for h [T, D]. `weights`: the router's granule.
struct RouteOp {
    const std::uint8_t* weights;
    RouterShape shape;
    const float* h;
    int t;
    Routes routes;
    Scratch scratch;
};

// partial [T, D] (+)= Σ weight · FFN of h [T, D] over some experts, in rising order. With `outputs` [T, A, D] (null:
// none) each expert's FFN is stored there instead, for `combine` to add up, and the experts may come in any order.
// `weights`: the first granule of each expert, which has `per_expert` granules, `stride` bytes apart. `ids`: the
// experts' numbers.
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

// partial [T, D] = partial times the shared expert's weight of each row.
struct GateOp {
    Routes routes;
    int active, t, d;
    float* partial;
};

// q [T, H, E] of h [T, D], for the KV heads of `attention`; k and v go into the cache. q_norm, k_norm: weights [E], or
// of all heads; null: no norm. cos, sin [T, rope_dims / 2].
struct QkvOp {
    Granules weights;
    QkvShape shape;
    AttentionShape attention;
    const float* h;
    int t;
    const float *q_norm, *k_norm, *cos, *sin;
    const Sequence* sequences;
    int sequence_count;
    const std::int32_t* pages;  // of all sequences, numbered as they lie in the pools
    KvCache cache;
    float* q;
    bool exact;
    Scratch scratch;
};

// a [T, H, E] = softmax(scale · q kᵀ, causal and windowed) v, of q [T, H, E]. `sinks` [H] (null: none): a score of each
// head that its softmax counts beside those of the positions, and that has no value. `value_share`: below 1, of the n
// positions that a row sees those ceil(value_share · n) alone count whose scores are the best. `exact`: what multiplies
// codes of the cache is not rounded to 16 bits.
struct AttendOp {
    AttentionShape attention;
    const float* sinks;
    const Sequence* sequences;
    int sequence_count;
    const std::int32_t* pages;  // of all sequences, numbered as they lie in the pools
    KvCache cache;
    const float* q;
    float* a;
    bool exact;
    Scratch scratch;
    double value_share = 1;
};

// h [T, D] = norm of the rows of x that `chosen` int32 [T] names (null: all rows). kNone copies.
struct NormOp {
    Norm norm;
    const float* x;
    const std::int32_t* chosen;
    int t, d;
    float* h;
};

// rows [T, D]: column i becomes what column order[i] was. `order` float32 [D] comes from a file: numbers that are no
// column count as 0.
struct OrderOp {
    const float* order;
    float* rows;
    int t, d;
    Scratch scratch;
};

// x [T, D] += out(Σ partials [T, D] + bias [D]), then x = after(x). With `expert_bias` [X, D] (null: none) the bias of
// a row is Σ weight · that of each of its experts, in the order of `routes`, which has `active` of a row.
struct MergeOp {
    Norm out, after;
    const float *bias, *expert_bias;
    Routes routes;
    int active;
    float* x;
    std::vector<const float*> partials;
    int t, d;
    Scratch scratch;
};

// x [T, D] = embed_scale · rows [T, D].
struct EmbedOp {
    const float* rows;
    float embed_scale;
    int t, d;
    float* x;
};

// rows [T, cols] = the rows `tokens` int32 [T] of a matrix that lies in granules of matrix.rows rows.
struct GatherOp {
    Granules weights;
    Matrix matrix;
    const std::int32_t* tokens;
    int t;
    float* rows;
};

// Integer weights as float32 or float16: the block `matrix` of each granule is written in tiles as the block `wide` of
// granules that are `out_stride` bytes apart. For float16 values must be within its range.
struct WidenOp {
    Granules weights;
    Matrix matrix, wide;
    std::uint8_t* out;
    std::size_t out_stride;
};

// The ops of an instruction set. They return false where the scratch is too small.
struct Kernels {
    const char* isa;
    bool (*project)(Pool&, const ProjectOp&);
    bool (*head)(Pool&, const HeadOp&);
    bool (*out)(Pool&, const OutOp&);
    bool (*ffn)(Pool&, const FfnOp&);
    bool (*fire)(Pool&, const FireOp&);
    bool (*route)(Pool&, const RouteOp&);
    bool (*experts)(Pool&, const ExpertsOp&);
    bool (*combine)(Pool&, const CombineOp&);
    bool (*gate)(Pool&, const GateOp&);
    bool (*qkv)(Pool&, const QkvOp&);
    bool (*attend)(Pool&, const AttendOp&);
    bool (*norm)(Pool&, const NormOp&);
    bool (*order)(Pool&, const OrderOp&);
    bool (*merge)(Pool&, const MergeOp&);
    bool (*embed)(Pool&, const EmbedOp&);
    bool (*gather)(Pool&, const GatherOp&);
    bool (*predict)(Pool&, const PredictOp&);
    bool (*widen)(Pool&, const WidenOp&);
    // `rounds` rounds of products in registers, to measure the peak. They return the number of operations. `sink` [2]
    // is input and output, so that the compiler drops nothing.
    std::int64_t (*int8_products)(std::int64_t rounds, float* sink);
    std::int64_t (*float_products)(std::int64_t rounds, float* sink);
    // The checksum of a granule: XXH3 of 64 bits without a seed. `nbytes` must be more than 240.
    std::uint64_t (*hash)(const std::byte* data, std::size_t nbytes);
    Unit unit = nullptr;  // of 16 rows and more; null: there is none
};

// The table of an instruction set ("avx512", "amx", "avxvnni", "avx2", on ARM "i8mm", "dotprod", "neon", and
// "portable"); null if this build or processor has none of that name.
const Kernels* find_kernels(const char* isa);

// The fastest table that this processor has.
const Kernels* best_kernels();

extern const Kernels kPortableKernels, kAvx2Kernels, kAvxVnniKernels, kAvx512Kernels, kAmxKernels, kAmxModelKernels,
    kNeonKernels, kDotprodKernels, kI8mmKernels;

}  // namespace penstock
