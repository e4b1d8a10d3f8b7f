// Ops and their shapes for Python. Operands cross as addresses, which the caller keeps alive; `_native.pyi` is the
// manual.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "bind.h"
#include "kernels.h"
#include "scratch.h"
#include "threads.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

template <class Value>
Value named(const std::map<std::string, Value>& names, const std::string& name) {
    const auto found = names.find(name);
    if (found == names.end()) throw nb::value_error(("there is no " + name).c_str());
    return found->second;
}

const std::map<std::string, Kind> kKinds{{"float32", Kind::kFloat32},
                                         {"float16", Kind::kFloat16},
                                         {"bfloat16", Kind::kBfloat16},
                                         {"int8", Kind::kInt8},
                                         {"int4", Kind::kInt4}};

void check_group(int group, int multiple) {
    if (group >= multiple && group <= kMostGroup && group % multiple == 0) return;
    const std::string limits = std::to_string(multiple) + ", at most " + std::to_string(kMostGroup);
    throw nb::value_error(("group must be a multiple of " + limits).c_str());
}

Matrix make_matrix(int rows, int cols, const std::string& kind, int group, std::size_t offset) {
    const Matrix m{rows, cols, named(kKinds, kind), group, offset};
    if (rows < 1 || cols < 1) throw nb::value_error("rows and cols must be at least 1");
    if (m.quantised()) check_group(group, kWeightGroup);
    return m;
}

FfnShape make_ffn(std::optional<Matrix> gate, const Matrix& up, const Matrix& down, const std::string& activation,
                  std::size_t gate_bias, std::size_t up_bias) {
    static const std::map<std::string, Activation> activations{
        {"silu", Activation::kSilu},          {"gelu", Activation::kGelu},
        {"gelu_tanh", Activation::kGeluTanh}, {"gelu_quick", Activation::kGeluQuick},
        {"relu", Activation::kRelu},          {"relu2", Activation::kRelu2}};
    // A granule's neurons come in whole tiles, so a tile's outputs never run into its neighbour's.
    if (up.rows % kTileRows != 0 || down.cols != up.rows) throw nb::value_error("neurons must be whole tiles");
    return {gate.value_or(Matrix{}), up, down, gate_bias, up_bias, named(activations, activation)};
}

// The kernels of one instruction set on a pool of threads.
struct Compute {
    Compute(const std::string& isa, int threads) : kernels(find_kernels(isa.c_str())) {
        if (kernels == nullptr) throw nb::value_error(("this processor or build has no " + isa + " kernels").c_str());
        pool = std::make_unique<Pool>(threads);
    }
    const Kernels* kernels;
    std::unique_ptr<Pool> pool;
};

// An op with its operands, ready to run: false where the scratch is too small for one granule.
using Step = std::function<bool(const Compute&)>;

void run_step(const Compute& compute, const Step& step) {
    if (!step(compute)) throw nb::value_error("the scratch is too small for one granule");
}

// Ops in order, with no Python between them.
struct Program {
    explicit Program(const Compute& on) : compute(&on) {}
    const Compute* compute;
    std::vector<Step> steps;

    void run() const {
        nb::gil_scoped_release release;
        for (const Step& step : steps) run_step(*compute, step);
    }
};

template <class Value>
Value* at(std::uintptr_t address) {
    return reinterpret_cast<Value*>(address);
}
Granules granules(std::uintptr_t weights, int count, std::size_t stride) {
    return {at<const std::uint8_t>(weights), count, stride};
}
Scratch scratch_at(std::uintptr_t address, std::size_t nbytes) { return {at<std::uint8_t>(address), nbytes}; }

Step make_project(std::uintptr_t weights, int count, std::size_t stride, const Matrix& m, std::uintptr_t x,
                  std::ptrdiff_t x_stride, int rows, std::uintptr_t out, std::ptrdiff_t out_stride, int out_cols,
                  bool exact, std::uintptr_t scratch, std::size_t scratch_bytes) {
    return [=](const Compute& c) {
        return c.kernels->project(*c.pool, granules(weights, count, stride), m, at<const float>(x), x_stride, rows,
                                  at<float>(out), out_stride, out_cols, exact, scratch_at(scratch, scratch_bytes));
    };
}

Step make_head(std::uintptr_t weights, int count, std::size_t stride, const Matrix& m, std::uintptr_t h,
               std::ptrdiff_t h_stride, int rows, std::uintptr_t logits, std::ptrdiff_t out_stride, int out_cols,
               float softcap, int first_token, std::uintptr_t best, bool start, bool exact, std::uintptr_t scratch,
               std::size_t scratch_bytes) {
    return [=](const Compute& c) {
        auto* const most = at<Best>(best);
        for (int row = 0; start && most != nullptr && row < rows; ++row) most[row] = {-INFINITY, 0};
        return c.kernels->head(*c.pool, granules(weights, count, stride), m, at<const float>(h), h_stride, rows,
                               at<float>(logits), out_stride, out_cols, softcap, first_token, most, exact,
                               scratch_at(scratch, scratch_bytes));
    };
}

Step make_accumulate(std::uintptr_t weights, int count, std::size_t stride, const Matrix& m, std::uintptr_t x,
                     std::ptrdiff_t x_stride, int rows, std::uintptr_t sum, bool first, bool exact,
                     std::uintptr_t scratch, std::size_t scratch_bytes) {
    return [=](const Compute& c) {
        return c.kernels->accumulate(*c.pool, granules(weights, count, stride), m, at<const float>(x), x_stride, rows,
                                     at<float>(sum), first, exact, scratch_at(scratch, scratch_bytes));
    };
}

Step make_ffn(std::uintptr_t weights, int count, std::size_t stride, const FfnShape& shape, std::uintptr_t h, int rows,
              std::uintptr_t partial, std::uintptr_t pending, int granule, bool first, bool continues, bool keeps,
              bool exact, std::uintptr_t scratch, std::size_t scratch_bytes) {
    const FfnSum sum{at<float>(partial), at<float>(pending), granule, first, continues, keeps};
    return [=](const Compute& c) {
        return c.kernels->ffn(*c.pool, granules(weights, count, stride), shape, at<const float>(h), rows, sum, exact,
                              scratch_at(scratch, scratch_bytes));
    };
}

// The cache's form; where it lies comes with each call.
struct CacheShape {
    Kind kind;
    int group, kv_heads, page_tokens, head_dim;
    KvCache cache(std::uintptr_t keys, std::uintptr_t values) const {
        return {at<std::uint8_t>(keys), at<std::uint8_t>(values), kind, group, kv_heads, page_tokens, head_dim};
    }
};

CacheShape make_cache(const std::string& kind, int group, int kv_heads, int page_tokens, int head_dim) {
    if (page_tokens < kPageTokens || page_tokens % kPageTokens != 0) {
        throw nb::value_error(("page_tokens must be a multiple of " + std::to_string(kPageTokens)).c_str());
    }
    if (kind == "int8" || kind == "int4") {
        check_group(group, kKvGroup);
    } else if (group != 0) {
        throw nb::value_error("group must be 0 for floats");
    }
    return {named(kKinds, kind), group, kv_heads, page_tokens, head_dim};
}

Step make_qkv(std::uintptr_t weights, int count, std::size_t stride, const QkvShape& shape, const AttentionShape& a,
              std::uintptr_t h, int rows, std::uintptr_t q_norm, std::uintptr_t k_norm, std::uintptr_t cos,
              std::uintptr_t sin, std::uintptr_t sequences, int sequence_count, const CacheShape& cache,
              std::uintptr_t keys, std::uintptr_t values, std::uintptr_t q, bool exact, std::uintptr_t scratch,
              std::size_t scratch_bytes) {
    return [=](const Compute& c) {
        return c.kernels->qkv(*c.pool, granules(weights, count, stride), shape, a, at<const float>(h), rows,
                              at<const float>(q_norm), at<const float>(k_norm), at<const float>(cos),
                              at<const float>(sin), at<const Sequence>(sequences), sequence_count,
                              cache.cache(keys, values), at<float>(q), exact, scratch_at(scratch, scratch_bytes));
    };
}

Step make_attend(const AttentionShape& a, std::uintptr_t sequences, int sequence_count, const CacheShape& cache,
                 std::uintptr_t keys, std::uintptr_t values, std::uintptr_t q, std::uintptr_t out,
                 std::uintptr_t scratch, std::size_t scratch_bytes) {
    return [=](const Compute& c) {
        return c.kernels->attend(*c.pool, a, at<const Sequence>(sequences), sequence_count, cache.cache(keys, values),
                                 at<const float>(q), at<float>(out), scratch_at(scratch, scratch_bytes));
    };
}

Norm make_norm(const std::string& kind, float eps, float offset, std::uintptr_t weight, std::uintptr_t bias) {
    static const std::map<std::string, NormKind> kinds{
        {"none", NormKind::kNone}, {"rms", NormKind::kRms}, {"layer", NormKind::kLayer}};
    return {named(kinds, kind), eps, offset, at<const float>(weight), at<const float>(bias)};
}

Step make_norm_step(const Norm& norm, std::uintptr_t x, std::uintptr_t chosen, int rows, int d, std::uintptr_t out) {
    return [=](const Compute& c) {
        return c.kernels->norm(*c.pool, norm, at<const float>(x), at<const std::int32_t>(chosen), rows, d,
                               at<float>(out));
    };
}

Step make_merge(const Norm& out, const Norm& after, std::uintptr_t bias, std::uintptr_t x,
                const std::vector<std::uintptr_t>& partials, int rows, int d, std::uintptr_t scratch,
                std::size_t scratch_bytes) {
    std::vector<const float*> from;
    for (const std::uintptr_t partial : partials) from.push_back(at<const float>(partial));
    const Merge shape{out, after, at<const float>(bias)};
    return [=](const Compute& c) {
        return c.kernels->merge(*c.pool, shape, at<float>(x), from.data(), static_cast<int>(from.size()), rows, d,
                                scratch_at(scratch, scratch_bytes));
    };
}

Step make_scale(std::uintptr_t from, float factor, int rows, int d, std::uintptr_t to) {
    return [=](const Compute& c) {
        return c.kernels->scale(*c.pool, at<const float>(from), factor, rows, d, at<float>(to));
    };
}

Step make_gather(std::uintptr_t weights, int count, std::size_t stride, const Matrix& m, std::uintptr_t tokens,
                 int rows, std::uintptr_t out) {
    return [=](const Compute& c) {
        return c.kernels->gather(*c.pool, granules(weights, count, stride), m, at<const std::int32_t>(tokens), rows,
                                 at<float>(out));
    };
}

Step make_widen(std::uintptr_t weights, int count, std::size_t stride, const Matrix& m, const Matrix& wide,
                std::uintptr_t out, std::size_t out_stride) {
    if (!m.quantised() || (wide.kind != Kind::kFloat32 && wide.kind != Kind::kFloat16)) {
        throw nb::value_error("integer weights are widened to float32 or float16");
    }
    if (m.rows != wide.rows || m.cols != wide.cols) throw nb::value_error("the shapes differ");
    return [=](const Compute& c) {
        return c.kernels->widen(*c.pool, granules(weights, count, stride), m, wide, at<std::uint8_t>(out), out_stride);
    };
}

// An op as a method of both: run now, or appended to a program.
template <class... Operands, class... Names>
void def_op(nb::class_<Compute>& compute, nb::class_<Program>& program, const char* name, Step (*make)(Operands...),
            Names... names) {
    compute.def(
        name,
        [make](const Compute& self, Operands... operands) {
            const Step step = make(operands...);
            nb::gil_scoped_release release;
            run_step(self, step);
        },
        names...);
    program.def(
        name, [make](Program& self, Operands... operands) { self.steps.push_back(make(operands...)); }, names...);
}

}  // namespace

void bind_ops(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Matrix>(m, "Matrix")
        .def(
            "__init__",
            [](Matrix* self, int rows, int cols, const std::string& kind, int group, std::size_t offset) {
                new (self) Matrix(make_matrix(rows, cols, kind, group, offset));
            },
            "rows"_a, "cols"_a, "kind"_a, "group"_a, "offset"_a)
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
               std::size_t k_bias, std::size_t v_bias, float norm_eps,
               int rope_dims) { new (self) QkvShape{q, k, v, q_bias, k_bias, v_bias, norm_eps, rope_dims}; },
            "q"_a, "k"_a, "v"_a, "q_bias"_a, "k_bias"_a, "v_bias"_a, "norm_eps"_a, "rope_dims"_a);
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
    auto compute = nb::class_<Compute>(m, "Compute")
                       .def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a)
                       .def_prop_ro("isa", [](const Compute& self) { return self.kernels->isa; })
                       .def_prop_ro("threads", [](const Compute& self) { return self.pool->threads(); });
    auto program = nb::class_<Program>(m, "Program")
                       .def(nb::init<const Compute&>(), nb::keep_alive<1, 2>(), "compute"_a)
                       .def("__len__", [](const Program& self) { return self.steps.size(); })
                       .def("run", &Program::run);
    def_op(compute, program, "project", &make_project, "weights"_a, "count"_a, "stride"_a, "matrix"_a, "x"_a,
           "x_stride"_a, "rows"_a, "out"_a, "out_stride"_a, "out_cols"_a, "exact"_a, "scratch"_a, "scratch_bytes"_a);
    def_op(compute, program, "head", &make_head, "weights"_a, "count"_a, "stride"_a, "matrix"_a, "h"_a, "h_stride"_a,
           "rows"_a, "logits"_a, "out_stride"_a, "out_cols"_a, "softcap"_a, "first_token"_a, "best"_a, "start"_a,
           "exact"_a, "scratch"_a, "scratch_bytes"_a);
    def_op(compute, program, "accumulate", &make_accumulate, "weights"_a, "count"_a, "stride"_a, "matrix"_a, "x"_a,
           "x_stride"_a, "rows"_a, "sum"_a, "first"_a, "exact"_a, "scratch"_a, "scratch_bytes"_a);
    def_op(compute, program, "qkv", &make_qkv, "weights"_a, "count"_a, "stride"_a, "shape"_a, "attention"_a, "h"_a,
           "rows"_a, "q_norm"_a, "k_norm"_a, "cos"_a, "sin"_a, "sequences"_a, "sequence_count"_a, "cache"_a, "keys"_a,
           "values"_a, "q"_a, "exact"_a, "scratch"_a, "scratch_bytes"_a);
    def_op(compute, program, "attend", &make_attend, "attention"_a, "sequences"_a, "sequence_count"_a, "cache"_a,
           "keys"_a, "values"_a, "q"_a, "out"_a, "scratch"_a, "scratch_bytes"_a);
    def_op(compute, program, "ffn", &make_ffn, "weights"_a, "count"_a, "stride"_a, "shape"_a, "h"_a, "rows"_a,
           "partial"_a, "pending"_a, "granule"_a, "first"_a, "continues"_a, "keeps"_a, "exact"_a, "scratch"_a,
           "scratch_bytes"_a);
    def_op(compute, program, "norm", &make_norm_step, "norm"_a, "x"_a, "chosen"_a, "rows"_a, "d"_a, "out"_a);
    def_op(compute, program, "merge", &make_merge, "out"_a, "after"_a, "bias"_a, "x"_a, "partials"_a, "rows"_a, "d"_a,
           "scratch"_a, "scratch_bytes"_a);
    def_op(compute, program, "scale", &make_scale, "source"_a, "factor"_a, "rows"_a, "d"_a, "to"_a);
    def_op(compute, program, "gather", &make_gather, "weights"_a, "count"_a, "stride"_a, "matrix"_a, "tokens"_a,
           "rows"_a, "out"_a);
    def_op(compute, program, "widen", &make_widen, "weights"_a, "count"_a, "stride"_a, "matrix"_a, "wide"_a, "out"_a,
           "out_stride"_a);
    m.def("limits", [] {
        return std::map<std::string, int>{{"most_group", kMostGroup},     {"weight_group", kWeightGroup},
                                          {"kv_group", kKvGroup},         {"page_tokens", kPageTokens},
                                          {"sum_granules", kSumGranules}, {"tile_rows", kTileRows}};
    });
    m.def("project_scratch", &project_scratch, "matrix"_a, "rows"_a);
    m.def("accumulate_scratch", &accumulate_scratch, "matrix"_a, "count"_a, "rows"_a);
    m.def("ffn_scratch", &ffn_scratch, "shape"_a, "count"_a, "rows"_a);
    m.def("qkv_scratch", &qkv_scratch, "shape"_a, "attention"_a, "rows"_a);
    m.def(
        "attend_scratch",
        [](const AttentionShape& a, const CacheShape& cache, int rows) { return attend_scratch(a, cache.kind, rows); },
        "attention"_a, "cache"_a, "rows"_a);
    m.def("merge_scratch", &merge_scratch, "rows"_a, "d"_a);
}
