// Makes the ops callable from Python, one by one and as programs. Arrays cross as addresses, and the caller keeps them
// alive.
// `_native.pyi` is the manual.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include "bind.h"
#include "bind_types.h"
#include "kernels.h"
#include "threads.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

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
    if (!(op.value_share > 0)) throw nb::value_error("value_share must be above 0");
}

template <class Op>
void check(const Op&) {}

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

// Defines each op as a method of both classes. Compute runs it at once, and Program appends it. All operands are given
// by name.
struct Ops {
    nb::class_<Compute>& compute;
    nb::class_<Program>& program;
    nb::dict fields;  // op -> names of its operands, in order

    // Kernels' unit goes to the op with its scratch.
    template <class Op>
    static void lend(const Compute& c, Op& op) {
        if constexpr (requires { op.scratch.unit; }) op.scratch.unit = c.kernels->unit;
    }

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
                Op op = make(values...);
                lend(self, op);
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
                    lend(c, *op);
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

Compute::Compute(const std::string& isa, int threads) : kernels(find_kernels(isa.c_str())) {
    if (kernels == nullptr) throw nb::value_error(("this processor or build has no " + isa + " kernels").c_str());
    pool = std::make_unique<Pool>(threads);
}

void require(bool scratch_suffices) {
    if (!scratch_suffices) throw nb::value_error("the scratch is too small for one granule");
}

void Program::place(const std::vector<std::uintptr_t>& weights, std::vector<int> ids) {
    if (placed == nullptr) throw nb::value_error("the program computes no experts");
    ExpertsOp op = *placed;
    op.weights = Crossing<std::vector<const std::uint8_t*>>::of(weights);
    op.ids = std::move(ids);
    check(op);
    *placed = std::move(op);
}

void bind_ops(nb::module_& m) {
    using namespace nb::literals;
    bind_shapes(m);
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
    bind_demand(m, program);
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
            SAME(AttendOp, pages), SAME(AttendOp, q), CACHE(AttendOp), SAME(AttendOp, a), SAME(AttendOp, exact),
            SCRATCH(AttendOp), SAME(AttendOp, value_share));
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
}
