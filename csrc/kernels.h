// The native ops: their operands as structs of raw pointers, and one table of functions per instruction set. What
// operands are made of is in shapes.h.
//
// Letters in shapes: T rows (tokens), D d_model, H heads, K KV heads, G = H / K, E head_dim, N neurons of a granule,
// X experts, A experts that a row goes to. Arrays are float32 where nothing else is said.
//
// Matrices lie in tiles of 16 rows, or neuron by neuron, as spec/format.py draws them. A tile's outputs are the 16
// lanes of a vector, so no sum of them crosses lanes. Every output element is computed by one thread, and its terms are
// added in one order: columns (or groups) upwards, granules upwards (FFNs: see FfnSum). So no bit depends on which rows
// share a call, on the number of threads, or on where units are cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shapes.h"
#include "threads.h"

namespace penstock {

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
