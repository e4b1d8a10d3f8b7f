// Makes the shapes of ops callable from Python, and what is known of them: how much scratch ops want, which formats are
// repacked. `_native.pyi` is the manual.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <map>
#include <optional>
#include <string>

#include "bind_types.h"
#include "kernels.h"
#include "repack.h"
#include "scratch.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

template <class Value>
Value named(const std::map<std::string, Value>& names, const std::string& name) {
    const auto entry = names.find(name);
    if (entry == names.end()) throw nb::value_error(("there is no " + name).c_str());
    return entry->second;
}

const std::map<std::string, Kind> kKinds{{"float32", Kind::kFloat32},    {"float16", Kind::kFloat16},
                                         {"bfloat16", Kind::kBfloat16},  {"int8", Kind::kInt8},
                                         {"int4", Kind::kInt4},          {"q4_0", Kind::kQ4_0},
                                         {"q5_0", Kind::kQ5_0},          {"q5_1", Kind::kQ5_1},
                                         {"q8_0", Kind::kQ8_0},          {"iq4_nl", Kind::kIq4Nl},
                                         {"mxfp4", Kind::kMxfp4},        {"q2_k", Kind::kQ2K},
                                         {"q3_k", Kind::kQ3K},           {"q4_k", Kind::kQ4K},
                                         {"q5_k", Kind::kQ5K},           {"q6_k", Kind::kQ6K},
                                         {"iq4_xs", Kind::kIq4Xs},       {"uint4_g32", Kind::kUint4G32},
                                         {"uint4_g64", Kind::kUint4G64}, {"uint4_g128", Kind::kUint4G128},
                                         {"uint8_g32", Kind::kUint8G32}, {"uint8_g128", Kind::kUint8G128},
                                         {"float8", Kind::kFloat8}};

void check_group(int group, int multiple) {
    if (group >= multiple && group <= kMostGroup && group % multiple == 0) return;
    const std::string limits = std::to_string(multiple) + ", at most " + std::to_string(kMostGroup);
    throw nb::value_error(("group must be a multiple of " + limits).c_str());
}

Matrix make_matrix(int rows, int cols, const std::string& kind, int group, std::size_t offset, std::size_t row_stride) {
    const Matrix m{rows, cols, named(kKinds, kind), group, offset, row_stride};
    if (rows < 1 || cols < 1) throw nb::value_error("rows and cols must be at least 1");
    if (m.quantised()) check_group(group, m.by_row() ? kLineColumns : kWeightGroup);
    if (in_blocks(m.kind) && (group != kBlockGroup || cols % kBlockGroup != 0 || m.by_row())) {
        throw nb::value_error((kind + " has whole groups of 32 columns, and lies in tiles").c_str());
    }
    if (m.by_row() && row_stride < m.codes_bytes() + 4 * std::size_t(m.groups())) {
        throw nb::value_error("row_stride must be at least a row");
    }
    return m;
}

bool py_repack(const std::string& kind, std::uintptr_t from, std::size_t row_bytes, int rows, int blocks,
               int first_column, int cols, int slices, std::uintptr_t to, std::size_t slice_bytes) {
    const Repack op{named(kKinds, kind),
                    reinterpret_cast<const std::uint8_t*>(from),
                    row_bytes,
                    rows,
                    blocks,
                    first_column,
                    cols,
                    slices,
                    reinterpret_cast<std::uint8_t*>(to),
                    slice_bytes};
    if (!can_repack(op)) throw nb::value_error(("such slices of " + kind + " do not lie in tiles").c_str());
    const nb::gil_scoped_release release;
    return repack(op);
}

FfnShape make_ffn(std::optional<Matrix> gate, const Matrix& up, const Matrix& down, const std::string& activation,
                  std::size_t gate_bias, std::size_t up_bias) {
    static const std::map<std::string, Activation> activations{{"silu", Activation::kSilu},
                                                               {"gelu", Activation::kGelu},
                                                               {"gelu_tanh", Activation::kGeluTanh},
                                                               {"gelu_quick", Activation::kGeluQuick},
                                                               {"relu", Activation::kRelu},
                                                               {"relu2", Activation::kRelu2},
                                                               {"swiglu_clamped", Activation::kSwigluClamped}};
    // A granule's neurons come in whole tiles, so that a tile's outputs never reach into its neighbour's.
    const int neurons = down.by_row() ? down.rows : down.cols;
    if (up.rows % kTileRows != 0 || neurons != up.rows) throw nb::value_error("neurons must be whole tiles");
    // Of `gate` (or `up`, where there is none) and what follows, those that lie by neurons are the last ones.
    if ((gate && gate->by_row() && !up.by_row()) || (up.by_row() && !down.by_row()) ||
        (gate && down.by_row() && !up.by_row())) {
        throw nb::value_error("where a matrix lies by neurons, so does what its activation multiplies");
    }
    if (down.by_row() && (up.cols != down.cols || (gate && gate->cols != down.cols)))
        throw nb::value_error("`up` and `down` must be equally wide");
    const Activation kind = named(activations, activation);
    if (kind == Activation::kSwigluClamped && (!gate || down.by_row())) {
        throw nb::value_error("swiglu_clamped needs a gate, and a layout in tiles");
    }
    return {gate.value_or(Matrix{}), up, down, gate_bias, up_bias, kind};
}

CacheShape make_cache(const std::string& kind, int group, int kv_heads, int page_tokens, int head_dim) {
    if (page_tokens < 1) throw nb::value_error("page_tokens must be at least 1");
    if (kind == "int8" || kind == "int4") {
        check_group(group, kKvGroup);
    } else if (group != 0) {
        throw nb::value_error("group must be 0 for floats");
    }
    return {named(kKinds, kind), group, kv_heads, page_tokens, head_dim};
}

Norm make_norm(const std::string& kind, float eps, float offset, std::uintptr_t weight, std::uintptr_t bias) {
    static const std::map<std::string, NormKind> kinds{
        {"none", NormKind::kNone}, {"rms", NormKind::kRms}, {"layer", NormKind::kLayer}};
    return {named(kinds, kind), eps, offset, Crossing<const float*>::of(weight), Crossing<const float*>::of(bias)};
}

}  // namespace

void bind_shapes(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Matrix>(m, "Matrix")
        .def(
            "__init__",
            [](Matrix* self, int rows, int cols, const std::string& kind, int group, std::size_t offset,
               std::size_t row_stride) { new (self) Matrix(make_matrix(rows, cols, kind, group, offset, row_stride)); },
            "rows"_a, "cols"_a, "kind"_a, "group"_a, "offset"_a, "row_stride"_a = 0)
        .def_prop_ro("tile_bytes", &Matrix::tile_bytes)
        .def_prop_ro("tiles", &Matrix::tiles);
    nb::class_<FfnShape>(m, "FfnShape")
        .def(
            "__init__",
            [](FfnShape* self, std::optional<Matrix> gate, const Matrix& up, const Matrix& down,
               const std::string& activation, std::size_t gate_bias,
               std::size_t up_bias) { new (self) FfnShape(make_ffn(gate, up, down, activation, gate_bias, up_bias)); },
            "gate"_a.none(), "up"_a, "down"_a, "activation"_a, "gate_bias"_a, "up_bias"_a);
    nb::class_<QkvShape>(m, "QkvShape")
        .def(
            "__init__",
            [](QkvShape* self, const Matrix& q, const Matrix& k, const Matrix& v, std::size_t q_bias,
               std::size_t k_bias, std::size_t v_bias, float norm_eps, int rope_dims, bool norms_all_heads) {
                new (self) QkvShape{q, k, v, q_bias, k_bias, v_bias, norm_eps, rope_dims, norms_all_heads};
            },
            "q"_a, "k"_a, "v"_a, "q_bias"_a, "k_bias"_a, "v_bias"_a, "norm_eps"_a, "rope_dims"_a, "norms_all_heads"_a);
    nb::class_<RouterShape>(m, "RouterShape")
        .def(
            "__init__",
            [](RouterShape* self, const Matrix& scores, std::optional<Matrix> gate, std::uintptr_t bias,
               bool bias_scored, bool softmax, bool normalised, int groups, int groups_kept, float scale, int active) {
                if (bias_scored && bias == 0) throw nb::value_error("bias_scored without a bias");
                new (self) RouterShape{scores,
                                       gate.value_or(Matrix{}),
                                       Crossing<const float*>::of(bias),
                                       bias_scored,
                                       softmax,
                                       normalised,
                                       groups,
                                       groups_kept,
                                       scale,
                                       active};
            },
            "scores"_a, "gate"_a.none(), "bias"_a, "bias_scored"_a, "softmax"_a, "normalised"_a, "groups"_a,
            "groups_kept"_a, "scale"_a, "active"_a);
    nb::class_<AttentionShape>(m, "AttentionShape")
        .def(
            "__init__",
            [](AttentionShape* self, int heads, int kv_heads, int head_dim, int lo, int hi, float scale, float softcap,
               int window) { new (self) AttentionShape{heads, kv_heads, head_dim, lo, hi, scale, softcap, window}; },
            "heads"_a, "kv_heads"_a, "head_dim"_a, "lo"_a, "hi"_a, "scale"_a, "softcap"_a, "window"_a);
    nb::class_<CacheShape>(m, "CacheShape")
        .def(
            "__init__",
            [](CacheShape* self, const std::string& kind, int group, int kv_heads, int page_tokens, int head_dim) {
                new (self) CacheShape(make_cache(kind, group, kv_heads, page_tokens, head_dim));
            },
            "kind"_a, "group"_a, "kv_heads"_a, "page_tokens"_a, "head_dim"_a);
    nb::class_<Norm>(m, "Norm").def(
        "__init__",
        [](Norm* self, const std::string& kind, float eps, float offset, std::uintptr_t weight, std::uintptr_t bias) {
            new (self) Norm(make_norm(kind, eps, offset, weight, bias));
        },
        "kind"_a, "eps"_a, "offset"_a, "weight"_a, "bias"_a);
    m.def("limits", [] {
        return std::map<std::string, int>{{"most_group", kMostGroup},     {"weight_group", kWeightGroup},
                                          {"line_columns", kLineColumns}, {"kv_group", kKvGroup},
                                          {"page_tokens", kPageTokens},   {"sum_neurons", kSumNeurons},
                                          {"tile_rows", kTileRows}};
    });
    m.def("repack", &py_repack, "kind"_a, "from_address"_a, "row_bytes"_a, "rows"_a, "blocks"_a, "first_column"_a,
          "cols"_a, "slices"_a, "to_address"_a, "slice_bytes"_a);
    m.def("project_scratch", &project_scratch, "matrix"_a, "rows"_a);
    m.def("out_scratch", &out_scratch, "matrix"_a, "count"_a, "rows"_a);
    m.def("ffn_scratch", &ffn_scratch, "shape"_a, "count"_a, "rows"_a);
    m.def("predict_scratch", &predict_scratch, "hidden"_a, "neurons"_a, "rows"_a);
    m.def("route_scratch", &route_scratch, "shape"_a, "rows"_a);
    m.def("experts_scratch", &experts_scratch, "shape"_a, "per_expert"_a, "active"_a, "rows"_a);
    m.def("qkv_scratch", &qkv_scratch, "shape"_a, "attention"_a, "rows"_a);
    m.def(
        "attend_scratch",
        [](const AttentionShape& a, const CacheShape& cache, int rows, int chosen) {
            return attend_scratch(a, cache.kind, rows, chosen);
        },
        "attention"_a, "cache"_a, "rows"_a, "chosen"_a = 0);
    m.def("merge_scratch", &merge_scratch, "rows"_a, "d"_a);
}
