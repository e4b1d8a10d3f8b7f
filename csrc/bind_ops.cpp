// Makes the ops and their shapes callable from Python. Arrays cross as addresses, and the caller keeps them alive.
// `_native.pyi` is the manual.
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
#include <type_traits>

#include "bind.h"
#include "kernels.h"
#include "repack.h"
#include "scratch.h"
#include "threads.h"

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

// The kernels of one instruction set on a pool of threads.
struct Compute {
    Compute(const std::string& isa, int threads) : kernels(find_kernels(isa.c_str())) {
        if (kernels == nullptr) throw nb::value_error(("this processor or build has no " + isa + " kernels").c_str());
        pool = std::make_unique<Pool>(threads);
    }
    const Kernels* kernels;
    std::unique_ptr<Pool> pool;
};

// An op with its operands, ready to run. It returns false where the scratch is too small for one granule.
using Step = std::function<bool(const Compute&)>;

void require(bool scratch_suffices) {
    if (!scratch_suffices) throw nb::value_error("the scratch is too small for one granule");
}

// How many rows, rows with logits and sequences a batch has now.
struct Counts {
    std::int32_t rows, chosen, sequences;
};

// Gives an op that is run again the counts of its batch.
template <class Op>
void resize(Op& op, const Counts& now) {
    if constexpr (requires { op.sequence_count; }) op.sequence_count = now.sequences;
    if constexpr (std::is_same_v<Op, HeadOp>) {
        op.t = now.chosen;
    } else if constexpr (std::is_same_v<Op, NormOp>) {
        op.t = op.chosen != nullptr ? now.chosen : now.rows;
    } else if constexpr (requires { op.t; }) {
        op.t = now.rows;
    }
}

// Ops that run in order, with no Python between them.
struct Program {
    explicit Program(const Compute& on) : compute(&on) {}
    const Compute* compute;
    const Counts* counts = nullptr;  // of the batch of the ops that are recorded next; null: these stay as they are
    std::vector<Step> steps;
    std::shared_ptr<ExpertsOp> placed;  // the operands of the latest call for experts

    // Replaces that call's experts, and where their weights lie.
    void place(const std::vector<std::uintptr_t>& weights, std::vector<int> ids);

    void run() const {
        nb::gil_scoped_release release;
        for (const Step& step : steps) require(step(*compute));
    }
};

CacheShape make_cache(const std::string& kind, int group, int kv_heads, int page_tokens, int head_dim) {
    if (page_tokens < 1) throw nb::value_error("page_tokens must be at least 1");
    if (kind == "int8" || kind == "int4") {
        check_group(group, kKvGroup);
    } else if (group != 0) {
        throw nb::value_error("group must be 0 for floats");
    }
    return {named(kKinds, kind), group, kv_heads, page_tokens, head_dim};
}

// How a field of an op comes from Python. Pointers come as addresses.
template <class Value>
struct Crossing {
    using type = Value;
    static Value of(const Value& value) { return value; }
};
template <>
struct Crossing<Routes> {
    using type = std::uintptr_t;
    static Routes of(std::uintptr_t address) { return {reinterpret_cast<std::uint8_t*>(address)}; }
};
template <class Value>
struct Crossing<Value*> {
    using type = std::uintptr_t;
    static Value* of(std::uintptr_t address) { return reinterpret_cast<Value*>(address); }
};
template <class Value>
struct Crossing<std::vector<Value*>> {
    using type = std::vector<std::uintptr_t>;
    static std::vector<Value*> of(const type& addresses) {
        std::vector<Value*> pointers;
        for (const std::uintptr_t address : addresses) pointers.push_back(Crossing<Value*>::of(address));
        return pointers;
    }
};

Norm make_norm(const std::string& kind, float eps, float offset, std::uintptr_t weight, std::uintptr_t bias) {
    static const std::map<std::string, NormKind> kinds{
        {"none", NormKind::kNone}, {"rms", NormKind::kRms}, {"layer", NormKind::kLayer}};
    return {named(kinds, kind), eps, offset, Crossing<const float*>::of(weight), Crossing<const float*>::of(bias)};
}

// A field of an op: its name, and its place in the op's struct.
template <class Place>
struct Field {
    const char* name;
    Place place;
};
template <class Op, class Place>
using Crosses = Crossing<std::remove_reference_t<std::invoke_result_t<Place, Op&>>>;

void check(const WidenOp& op) {
    if (!op.matrix.quantised() || in_blocks(op.matrix.kind) ||
        (op.wide.kind != Kind::kFloat32 && op.wide.kind != Kind::kFloat16)) {
        throw nb::value_error("integer weights are widened to float32 or float16");
    }
    if (op.matrix.rows != op.wide.rows || op.matrix.cols != op.wide.cols) throw nb::value_error("the shapes differ");
}
void check(const ExpertsOp& op) {
    if (op.ids.size() != op.weights.size()) throw nb::value_error("each expert has weights and an id");
    for (const int id : op.ids) {
        if (id < 0) throw nb::value_error("ids of experts are not negative");
    }
}

void check(const AttendOp& op) {  // rows that are only stored may lie in pages of any size
    if (op.cache.page_tokens % kPageTokens != 0) {
        throw nb::value_error(("page_tokens must be a multiple of " + std::to_string(kPageTokens)).c_str());
    }
}

template <class Op>
void check(const Op&) {}

void Program::place(const std::vector<std::uintptr_t>& weights, std::vector<int> ids) {
    if (placed == nullptr) throw nb::value_error("the program computes no experts");
    ExpertsOp op = *placed;
    op.weights = Crossing<std::vector<const std::uint8_t*>>::of(weights);
    op.ids = std::move(ids);
    check(op);
    *placed = std::move(op);
}

// Defines each op as a method of both classes. Compute runs it at once, and Program appends it. All operands are given
// by name.
struct Ops {
    nb::class_<Compute>& compute;
    nb::class_<Program>& program;
    nb::dict fields;  // op -> names of its operands, in order

    template <class Op, class... Places>
    void def(const char* name, bool (*Kernels::*run)(Pool&, const Op&), Field<Places>... places) {
        const auto make = [=](const typename Crosses<Op, Places>::type&... values) {
            Op op{};
            ((places.place(op) = Crosses<Op, Places>::of(values)), ...);
            check(op);
            return op;
        };
        compute.def(
            name,
            [=](const Compute& self, const typename Crosses<Op, Places>::type&... values) {
                const Op op = make(values...);
                nb::gil_scoped_release release;
                require((self.kernels->*run)(*self.pool, op));
            },
            nb::kw_only(), nb::arg(places.name)...);
        program.def(
            name,
            [=](Program& self, const typename Crosses<Op, Places>::type&... values) {
                const auto op = std::make_shared<Op>(make(values...));
                const Counts* const counts = self.counts;
                self.steps.push_back([=](const Compute& c) {
                    if (counts != nullptr) resize(*op, *counts);
                    return (c.kernels->*run)(*c.pool, *op);
                });
                if constexpr (std::is_same_v<Op, ExpertsOp>) self.placed = op;
            },
            nb::kw_only(), nb::arg(places.name)...);
        fields[name] = nb::make_tuple(places.name...);
    }
};

// Fields of an op's struct by name. WEIGHTS, CACHE and SCRATCH are several fields that ops share.
// clang-format off
#define FIELD(op, name, member) Field{name, [](op& of) -> auto& { return of.member; }}
#define SAME(op, member) FIELD(op, #member, member)
#define WEIGHTS(op) FIELD(op, "weights", weights.data), FIELD(op, "count", weights.count), \
                    FIELD(op, "stride", weights.stride)
#define CACHE(op) Field{"cache", [](op& of) -> CacheShape& { return of.cache; }}, \
                  FIELD(op, "keys", cache.keys), FIELD(op, "values", cache.values)
#define SCRATCH(op) FIELD(op, "scratch", scratch.data), FIELD(op, "scratch_bytes", scratch.nbytes)
// clang-format on

}  // namespace

void bind_ops(nb::module_& m) {
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
    auto compute = nb::class_<Compute>(m, "Compute")
                       .def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a)
                       .def_prop_ro("isa", [](const Compute& self) { return self.kernels->isa; })
                       .def_prop_ro("threads", [](const Compute& self) { return self.pool->threads(); });
    auto program =
        nb::class_<Program>(m, "Program")
            .def(nb::init<const Compute&>(), nb::keep_alive<1, 2>(), "compute"_a)
            .def("__len__", [](const Program& self) { return self.steps.size(); })
            .def("place", &Program::place, "weights"_a, "ids"_a)
            .def(
                "follow",
                [](Program& self, std::uintptr_t counts) { self.counts = Crossing<const Counts*>::of(counts); },
                "counts"_a)
            .def("run", &Program::run);
    // clang-format off
    Ops ops{compute, program, nb::dict()};
    ops.def("project", &Kernels::project,
            WEIGHTS(ProjectOp), SAME(ProjectOp, matrix), SAME(ProjectOp, x), SAME(ProjectOp, x_stride),
            SAME(ProjectOp, t), SAME(ProjectOp, out), SAME(ProjectOp, out_stride), SAME(ProjectOp, out_cols),
            SAME(ProjectOp, exact), SCRATCH(ProjectOp));
    ops.def("head", &Kernels::head,
            WEIGHTS(HeadOp), SAME(HeadOp, matrix), SAME(HeadOp, h), SAME(HeadOp, h_stride), SAME(HeadOp, t),
            SAME(HeadOp, logits), SAME(HeadOp, out_stride), SAME(HeadOp, out_cols), SAME(HeadOp, softcap),
            SAME(HeadOp, first_token), SAME(HeadOp, best), SAME(HeadOp, starts), SAME(HeadOp, exact),
            SCRATCH(HeadOp));
    ops.def("out", &Kernels::out,
            WEIGHTS(OutOp), SAME(OutOp, matrix), SAME(OutOp, a), SAME(OutOp, a_stride), SAME(OutOp, t),
            SAME(OutOp, partial), SAME(OutOp, starts_sum), SAME(OutOp, exact), SCRATCH(OutOp));
    ops.def("ffn", &Kernels::ffn,
            WEIGHTS(FfnOp), SAME(FfnOp, shape), SAME(FfnOp, h), SAME(FfnOp, t), FIELD(FfnOp, "partial", sum.partial),
            FIELD(FfnOp, "pending", sum.pending), FIELD(FfnOp, "granule", sum.granule),
            FIELD(FfnOp, "starts_sum", sum.starts_sum), FIELD(FfnOp, "continues_four", sum.continues),
            FIELD(FfnOp, "leaves_four", sum.keeps), SAME(FfnOp, skips), SAME(FfnOp, fired), SAME(FfnOp, fired_stride),
            SAME(FfnOp, exact), SCRATCH(FfnOp), SAME(FfnOp, active), SAME(FfnOp, active_stride),
            SAME(FfnOp, level), SAME(FfnOp, values), SAME(FfnOp, biases), SAME(FfnOp, bias_stride));
    ops.def("fire", &Kernels::fire,
            WEIGHTS(FireOp), SAME(FireOp, shape), SAME(FireOp, h), SAME(FireOp, t), SAME(FireOp, values),
            SAME(FireOp, exact), SCRATCH(FireOp));
    ops.def("predict", &Kernels::predict,
            SAME(PredictOp, weights), SAME(PredictOp, hidden), SAME(PredictOp, neurons),
            SAME(PredictOp, hidden_bias), SAME(PredictOp, neurons_bias), SAME(PredictOp, h), SAME(PredictOp, t),
            SAME(PredictOp, active), SAME(PredictOp, exact), SCRATCH(PredictOp));
    ops.def("route", &Kernels::route,
            SAME(RouteOp, weights), SAME(RouteOp, shape), SAME(RouteOp, h), SAME(RouteOp, t), SAME(RouteOp, routes),
            SCRATCH(RouteOp));
    ops.def("experts", &Kernels::experts,
            SAME(ExpertsOp, weights), SAME(ExpertsOp, ids), SAME(ExpertsOp, stride), SAME(ExpertsOp, shape),
            SAME(ExpertsOp, per_expert), SAME(ExpertsOp, active), SAME(ExpertsOp, h), SAME(ExpertsOp, t),
            SAME(ExpertsOp, routes), SAME(ExpertsOp, partial), SAME(ExpertsOp, outputs), SAME(ExpertsOp, starts_sum),
            SAME(ExpertsOp, exact), SCRATCH(ExpertsOp));
    ops.def("combine", &Kernels::combine,
            SAME(CombineOp, routes), SAME(CombineOp, outputs), SAME(CombineOp, active), SAME(CombineOp, t),
            SAME(CombineOp, d), SAME(CombineOp, partial), SAME(CombineOp, starts_sum));
    ops.def("gate", &Kernels::gate,
            SAME(GateOp, routes), SAME(GateOp, active), SAME(GateOp, t), SAME(GateOp, d), SAME(GateOp, partial));
    ops.def("qkv", &Kernels::qkv,
            WEIGHTS(QkvOp), SAME(QkvOp, shape), SAME(QkvOp, attention), SAME(QkvOp, h), SAME(QkvOp, t),
            SAME(QkvOp, q_norm), SAME(QkvOp, k_norm), SAME(QkvOp, cos), SAME(QkvOp, sin), SAME(QkvOp, sequences),
            SAME(QkvOp, sequence_count), SAME(QkvOp, pages), SAME(QkvOp, q), CACHE(QkvOp), SAME(QkvOp, exact),
            SCRATCH(QkvOp));
    ops.def("attend", &Kernels::attend,
            SAME(AttendOp, attention), SAME(AttendOp, sinks), SAME(AttendOp, sequences), SAME(AttendOp, sequence_count),
            SAME(AttendOp, pages), SAME(AttendOp, q), CACHE(AttendOp), SAME(AttendOp, a), SCRATCH(AttendOp));
    ops.def("norm", &Kernels::norm,
            SAME(NormOp, norm), SAME(NormOp, x), SAME(NormOp, chosen), SAME(NormOp, t), SAME(NormOp, d),
            SAME(NormOp, h));
    ops.def("order", &Kernels::order,
            SAME(OrderOp, order), SAME(OrderOp, rows), SAME(OrderOp, t), SAME(OrderOp, d), SCRATCH(OrderOp));
    ops.def("merge", &Kernels::merge,
            SAME(MergeOp, out), SAME(MergeOp, after), SAME(MergeOp, bias), SAME(MergeOp, x), SAME(MergeOp, partials),
            SAME(MergeOp, t), SAME(MergeOp, d), SCRATCH(MergeOp), SAME(MergeOp, expert_bias), SAME(MergeOp, routes),
            SAME(MergeOp, active));
    ops.def("embed", &Kernels::embed,
            SAME(EmbedOp, rows), SAME(EmbedOp, embed_scale), SAME(EmbedOp, t), SAME(EmbedOp, d), SAME(EmbedOp, x));
    ops.def("gather", &Kernels::gather,
            WEIGHTS(GatherOp), SAME(GatherOp, matrix), SAME(GatherOp, tokens), SAME(GatherOp, t),
            SAME(GatherOp, rows));
    ops.def("widen", &Kernels::widen,
            WEIGHTS(WidenOp), SAME(WidenOp, matrix), SAME(WidenOp, wide), SAME(WidenOp, out),
            SAME(WidenOp, out_stride));
    m.attr("op_fields") = ops.fields;
    // clang-format on
    m.def("limits", [] {
        return std::map<std::string, int>{{"most_group", kMostGroup},     {"weight_group", kWeightGroup},
                                          {"line_columns", kLineColumns}, {"kv_group", kKvGroup},
                                          {"page_tokens", kPageTokens},   {"sum_granules", kSumGranules},
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
        [](const AttentionShape& a, const CacheShape& cache, int rows) { return attend_scratch(a, cache.kind, rows); },
        "attention"_a, "cache"_a, "rows"_a);
    m.def("merge_scratch", &merge_scratch, "rows"_a, "d"_a);
}
