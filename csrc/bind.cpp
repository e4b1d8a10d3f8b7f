// The only file that sees Python. Arrays cross as addresses, which the caller keeps alive; `_native.pyi` is the manual.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>

#include "cpu.h"
#include "file.h"
#include "kernels.h"
#include "memory.h"
#include "probe.h"
#include "threads.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

[[noreturn]] void raise_errno(int error, PyObject* path = nullptr) {
    errno = error;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    throw nb::python_error();
}

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

// A mapping that cannot go while somebody looks at it. `users` is guarded by the GIL.
struct Memory {
    Mapping mapping;
    Py_ssize_t users = 0;  // exported buffers, and calls under way without the GIL

    Mapping& open() {
        if (mapping.data() == nullptr) throw nb::value_error("the memory is closed");
        return mapping;
    }

    void populate() {
        Mapping& m = open();
        ++users;
        {
            nb::gil_scoped_release release;
            m.populate();
        }
        --users;
    }

    void close() {
        if (users > 0) throw nb::buffer_error("the memory is in use: a view of it still exists");
        mapping.close();
    }
};

void init_memory(Memory* self, std::int64_t nbytes, bool huge) {
    if (nbytes < 1) throw nb::value_error("nbytes must be at least 1");
    try {
        new (self) Memory{.mapping{static_cast<std::size_t>(nbytes), huge}};
    } catch (const std::bad_alloc&) {
        PyErr_Format(PyExc_MemoryError, "cannot map %lld bytes: %s", static_cast<long long>(nbytes), strerror(errno));
        throw nb::python_error();
    }
}

int get_buffer(PyObject* object, Py_buffer* view, int flags) {
    auto* self = nb::inst_ptr<Memory>(object);
    if (self->mapping.data() == nullptr) {
        view->obj = nullptr;
        PyErr_SetString(PyExc_BufferError, "the memory is closed");
        return -1;
    }
    const auto nbytes = static_cast<Py_ssize_t>(self->mapping.nbytes());
    if (PyBuffer_FillInfo(view, object, self->mapping.data(), nbytes, /*readonly=*/0, flags) != 0) return -1;
    ++self->users;
    return 0;
}

void release_buffer(PyObject* object, Py_buffer*) { --nb::inst_ptr<Memory>(object)->users; }

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                              {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
                              {0, nullptr}};

std::int64_t py_read_into(int fd, std::int64_t offset, std::uintptr_t address, std::int64_t nbytes,
                          std::int64_t block_bytes) {
    if (nbytes < 0) throw nb::value_error("nbytes must not be negative");
    if (block_bytes < 1) throw nb::value_error("block_bytes must be at least 1");
    ReadResult result;
    {
        nb::gil_scoped_release release;
        result = read_into(fd, offset, pointer(address), nbytes, block_bytes);
    }
    if (result.error != 0) raise_errno(result.error);
    return result.nbytes;
}

nb::tuple py_open_direct(nb::object path) {
    PyObject* converted = nullptr;  // bytes, by the file system's encoding: any name that the disk holds will do
    if (!PyUnicode_FSConverter(path.ptr(), &converted)) throw nb::python_error();
    const nb::object name = nb::steal(converted);
    OpenResult result;
    {
        nb::gil_scoped_release release;
        result = open_direct(PyBytes_AsString(name.ptr()));
    }
    if (result.fd < 0) raise_errno(result.error, path.ptr());
    return nb::make_tuple(result.fd, result.direct);
}

void py_drop_cached(int fd, std::int64_t offset, std::int64_t nbytes) {
    int error;
    {
        nb::gil_scoped_release release;
        error = drop_cached(fd, offset, nbytes);
    }
    if (error != 0) raise_errno(error);
}

double py_ram_read_s(std::uintptr_t address, std::size_t nbytes, int threads, int repeats) {
    nb::gil_scoped_release release;
    return ram_read_s(pointer(address), nbytes, threads, repeats);  // std::invalid_argument becomes ValueError
}

double py_peak_per_s(const std::string& kind, int threads) {
    if (kind != "int8" && kind != "float32") throw nb::value_error(("there is no peak of " + kind).c_str());
    nb::gil_scoped_release release;
    return peak_per_s(kind == "int8", threads);
}

// ---- kernels -------------------------------------------------------------------------------------------------------

template <class Value>
Value named(const std::map<std::string, Value>& names, const std::string& name) {
    const auto found = names.find(name);
    if (found == names.end()) throw nb::value_error(("there is no " + name).c_str());
    return found->second;
}

Matrix make_matrix(int rows, int cols, const std::string& kind, int group, std::size_t offset) {
    static const std::map<std::string, Kind> kinds{{"float32", Kind::kFloat32},
                                                   {"float16", Kind::kFloat16},
                                                   {"bfloat16", Kind::kBfloat16},
                                                   {"int8", Kind::kInt8},
                                                   {"int4", Kind::kInt4}};
    const Matrix m{rows, cols, named(kinds, kind), group, offset};
    if (rows < 1 || cols < 1) throw nb::value_error("rows and cols must be at least 1");
    if (m.quantised() && (group < 8 || group > 1024 || group % 8 != 0)) {
        throw nb::value_error("group must be a multiple of 8, at most 1024");
    }
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
    int kv_heads, page_tokens, head_dim;
    KvCache cache(std::uintptr_t keys, std::uintptr_t values) const {
        return {at<std::uint8_t>(keys), at<std::uint8_t>(values), kind, kv_heads, page_tokens, head_dim};
    }
};

CacheShape make_cache(const std::string& kind, int kv_heads, int page_tokens, int head_dim) {
    static const std::map<std::string, Kind> kinds{
        {"float32", Kind::kFloat32}, {"float16", Kind::kFloat16}, {"bfloat16", Kind::kBfloat16}};
    // Attention walks blocks of 64 positions, each within one page.
    if (page_tokens < 64 || page_tokens % 64 != 0) throw nb::value_error("page_tokens must be a multiple of 64");
    return {named(kinds, kind), kv_heads, page_tokens, head_dim};
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

NB_MODULE(_native, m) {
    using namespace nb::literals;
    // Arenas may live until the interpreter ends, under numpy views that nobody dropped: no leak worth a page of text.
    nb::set_leak_warnings(false);

    m.def("cpu_features", &cpu_features);

    nb::class_<Memory>(m, "Memory", nb::type_slots(memory_slots), nb::is_final())
        .def("__init__", &init_memory, "nbytes"_a, "huge"_a = true)
        .def_prop_ro("address", [](Memory& self) { return reinterpret_cast<std::uintptr_t>(self.open().data()); })
        .def_prop_ro("nbytes", [](Memory& self) { return self.mapping.nbytes(); })
        .def_prop_ro("huge", [](Memory& self) { return self.mapping.huge(); })
        .def("populate", &Memory::populate)
        .def("close", &Memory::close);

    m.def("read_into", &py_read_into, "fd"_a, "offset"_a, "address"_a, "nbytes"_a, "block_bytes"_a);
    m.def("open_direct", &py_open_direct, "path"_a);
    m.def("drop_cached", &py_drop_cached, "fd"_a, "offset"_a, "nbytes"_a);
    m.def("ram_read_s", &py_ram_read_s, "address"_a, "nbytes"_a, "threads"_a, "repeats"_a);
    m.def("peak_per_s", &py_peak_per_s, "kind"_a, "threads"_a);

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
            [](CacheShape* self, const std::string& kind, int kv_heads, int page_tokens, int head_dim) {
                new (self) CacheShape(make_cache(kind, kv_heads, page_tokens, head_dim));
            },
            "kind"_a, "kv_heads"_a, "page_tokens"_a, "head_dim"_a);
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
}
