// The Python module: memory, files and measurements. The ops are in bind_ops.cpp. No other file sees Python. Arrays
// cross as addresses, and the caller keeps them alive. `_native.pyi` is the manual.
#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <tuple>

#include "bind_types.h"
#include "cpu.h"
#include "file.h"
#include "kernels.h"
#include "memory.h"
#include "probe.h"
#include "reads.h"
#include "sums.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

[[noreturn]] void raise_errno(int error, PyObject* path = nullptr) {
    errno = error;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    throw nb::python_error();
}

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

// A mapping that cannot be closed while it is in use. `users` is guarded by the GIL.
struct Memory {
    Mapping mapping;
    Py_ssize_t users = 0;  // exported buffers and calls that run without the GIL

    Mapping& open() {
        if (mapping.data() == nullptr) throw nb::value_error("the memory is closed");
        return mapping;
    }

    void populate(int threads, std::size_t lo, std::optional<std::size_t> hi) {
        Mapping& m = open();
        if (lo % 4096 != 0 || lo > m.nbytes())
            throw std::invalid_argument("lo should be a multiple of 4096 inside the memory");
        ++users;
        {
            nb::gil_scoped_release release;
            m.populate(lo, hi.value_or(m.nbytes()), threads);
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
    PyObject* converted = nullptr;  // bytes, in the file system's encoding, so that it may be any name on the disk
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

void check_read(std::int64_t offset, std::int64_t nbytes) {
    if (offset < 0 || nbytes < 0) throw nb::value_error("offset and nbytes must not be negative");
}

Checksums make_checksums(const nb::bytes& content) {
    if (content.size() % 8 != 0) throw nb::value_error("checksums have 8 bytes each");
    return {std::make_shared<Sums>(static_cast<const std::byte*>(content.data()), content.size() / 8)};
}

Expected make_expected(const Checksums* checksums, std::int64_t first, std::int64_t stride, std::int64_t nbytes) {
    if (checksums == nullptr) return {};
    if (stride < kLeastHashed || nbytes % stride != 0) throw nb::value_error("nbytes must be whole granules");
    if (first < 0 || first > checksums->sums->count() - nbytes / stride) {
        throw nb::value_error("there are no such checksums");
    }
    return {checksums->sums, first, stride};
}

// The kernels of this name; none: the best ones.
const Kernels& kernels_of(const std::optional<std::string>& isa) {
    const Kernels* const kernels = isa ? find_kernels(isa->c_str()) : best_kernels();
    if (kernels == nullptr) throw nb::value_error(("this processor or build has no " + *isa + " kernels").c_str());
    return *kernels;
}

nb::bytes py_granule_sums(std::uintptr_t address, std::int64_t count, std::int64_t stride,
                          const std::optional<std::string>& isa) {
    if (count < 0 || stride < kLeastHashed) throw nb::value_error("a granule has more than 240 bytes");
    const Kernels& kernels = kernels_of(isa);
    std::vector<std::uint64_t> hashes(static_cast<std::size_t>(count));
    {
        nb::gil_scoped_release release;
        for (std::int64_t i = 0; i < count; ++i) {
            hashes[static_cast<std::size_t>(i)] =
                kernels.hash(pointer(address) + i * stride, static_cast<std::size_t>(stride));
        }
    }
    return nb::bytes(hashes.data(), hashes.size() * sizeof(std::uint64_t));
}

PyObject* damaged_type = nullptr;  // the exception _native.Damaged; never freed

[[noreturn]] void raise_damaged(std::int64_t granule) {
    const nb::object value = nb::int_(granule);
    PyErr_SetObject(damaged_type, value.ptr());
    throw nb::python_error();
}

std::shared_ptr<Reads> make_reads(const std::string& engine, int depth, std::int64_t block_bytes) {
    if (depth < 1 || depth > 256) throw nb::value_error("depth must be from 1 to 256");
    if (block_bytes < 1 || block_bytes > std::int64_t{1} << 30) {
        throw nb::value_error("block_bytes must be from 1 to 2**30");
    }
    if (engine == "threads") return std::make_shared<ThreadReads>(depth, block_bytes);
    if (engine != "io_uring") throw nb::value_error(("there is no engine " + engine).c_str());
    auto reads = uring_reads(depth, block_bytes);
    if (reads == nullptr) raise_errno(errno);
    return reads;
}

Begun begun(const Reader& reader, LoadPtr load) {
    if (load == nullptr) throw nb::value_error("the reader is closed");
    return {reader.reads, std::move(load)};
}

double py_ram_read_s(std::uintptr_t address, std::size_t nbytes, int threads, int repeats) {
    nb::gil_scoped_release release;
    return ram_read_s(pointer(address), nbytes, threads, repeats);  // std::invalid_argument becomes ValueError
}

double py_peak_per_s(const std::string& kind, int threads, const std::optional<std::string>& isa) {
    if (kind != "int8" && kind != "float32") throw nb::value_error(("there is no peak of " + kind).c_str());
    const Kernels& kernels = kernels_of(isa);
    nb::gil_scoped_release release;
    return peak_per_s(kernels, kind == "int8", threads);
}

}  // namespace

void wait_for(Reads& reads, const Load& load) {
    while (!load.done.load(std::memory_order_acquire) && !reads.wait(load, 0.1)) {
        const nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

std::int64_t Begun::wait() const {
    if (!done()) {
        nb::gil_scoped_release release;
        wait_for(*reads, *load);
    }
    if (load->error != 0) raise_errno(load->error);
    if (load->damaged) raise_damaged(*load->damaged);
    return load->good;
}

Begun Reader::start(int fd, std::int64_t offset, std::uintptr_t address, std::int64_t nbytes, const Checksums* sums,
                    std::int64_t first, std::int64_t stride) const {
    check_read(offset, nbytes);
    const Expected expected = make_expected(sums, first, stride, nbytes);
    return begun(*this, reads->start(fd, {Run{offset, pointer(address), nbytes}}, expected));
}

Begun Reader::start_runs(int fd,
                         const std::vector<std::tuple<std::int64_t, std::uintptr_t, std::int64_t>>& runs) const {
    if (runs.empty()) throw nb::value_error("there are no runs to read");
    std::vector<Run> wanted;
    wanted.reserve(runs.size());
    for (const auto& [offset, address, nbytes] : runs) {
        check_read(offset, nbytes);
        std::byte* const to = pointer(address);
        if (nbytes == 0) throw nb::value_error("a run of no bytes");
        if (!wanted.empty() && to < wanted.back().to + wanted.back().nbytes) {
            throw nb::value_error("runs should come in rising order of addresses, and not overlap");
        }
        wanted.push_back({offset, to, nbytes});
    }
    return begun(*this, reads->start(fd, std::move(wanted)));
}

void Reader::close() const {
    nb::gil_scoped_release release;
    reads->close();
}

std::int64_t Reader::read(int fd, std::int64_t offset, std::uintptr_t address, std::int64_t nbytes,
                          const Checksums* sums, std::int64_t first, std::int64_t stride) const {
    check_read(offset, nbytes);
    const Expected expected = make_expected(sums, first, stride, nbytes);
    CheckedRead result;
    {
        nb::gil_scoped_release release;
        result = reads->read(fd, offset, pointer(address), nbytes, expected);
    }
    if (result.read.error != 0) raise_errno(result.read.error);
    if (result.damaged) raise_damaged(*result.damaged);
    return result.read.nbytes;
}

NB_MODULE(_native, m) {
    using namespace nb::literals;
    // Arenas may live until the interpreter ends, under numpy views that nobody dropped. Such a leak is not worth the
    // page of warnings that nanobind would print.
    nb::set_leak_warnings(false);

    m.def("cpu_features", &cpu_features);

    nb::class_<Memory>(m, "Memory", nb::type_slots(memory_slots), nb::is_final())
        .def("__init__", &init_memory, "nbytes"_a, "huge"_a = true)
        .def_prop_ro("address", [](Memory& self) { return reinterpret_cast<std::uintptr_t>(self.open().data()); })
        .def_prop_ro("nbytes", [](Memory& self) { return self.mapping.nbytes(); })
        .def_prop_ro("huge", [](Memory& self) { return self.mapping.huge(); })
        .def("populate", &Memory::populate, "threads"_a = 1, "lo"_a = 0, "hi"_a = nb::none())
        .def("close", &Memory::close);

    m.def("read_into", &py_read_into, "fd"_a, "offset"_a, "address"_a, "nbytes"_a, "block_bytes"_a);
    m.def("open_direct", &py_open_direct, "path"_a);
    damaged_type = PyErr_NewException("penstock._native.Damaged", nullptr, nullptr);
    m.attr("Damaged") = nb::borrow(damaged_type);
    m.def("granule_sums", &py_granule_sums, "address"_a, "count"_a, "stride"_a, "isa"_a = nb::none());
    nb::class_<Checksums>(m, "Sums")
        .def(
            "__init__",
            [](Checksums* self, const nb::bytes& content) { new (self) Checksums(make_checksums(content)); },
            "content"_a)
        .def("__len__", [](const Checksums& self) { return self.sums->count(); })
        .def(
            "checked",
            [](const Checksums& self, std::int64_t first, std::int64_t count) {
                if (first < 0 || count < 0 || first > self.sums->count() - count) {
                    throw nb::value_error("there are no such checksums");
                }
                return self.sums->checked(first, count);
            },
            "first"_a, "count"_a);
    nb::class_<Begun>(m, "Begun")
        .def_prop_ro("done", &Begun::done)
        .def_prop_ro("arrived", [](const Begun& self) { return self.done() ? self.load->good : 0; })
        .def_prop_ro("span_s",
                     [](const Begun& self) {
                         if (!self.done()) throw nb::value_error("it is under way");
                         return std::make_pair(self.load->start_s, self.load->end_s);
                     })
        .def("wait", &Begun::wait);
    nb::class_<Reader>(m, "Reader")
        .def(
            "__init__",
            [](Reader* self, const std::string& engine, int depth, std::int64_t block_bytes) {
                new (self) Reader{make_reads(engine, depth, block_bytes)};
            },
            "engine"_a, "depth"_a, "block_bytes"_a)
        .def_prop_ro("engine", [](const Reader& self) { return self.reads->engine(); })
        .def_prop_ro("depth", [](const Reader& self) { return self.reads->depth(); })
        .def_prop_ro("block_bytes", [](const Reader& self) { return self.reads->block_bytes(); })
        .def_prop_ro("bytes_read", [](const Reader& self) { return self.reads->bytes_read(); })
        .def("start", &Reader::start, "fd"_a, "offset"_a, "address"_a, "nbytes"_a, "sums"_a = nb::none(), "first"_a = 0,
             "stride"_a = 0)
        .def("start_runs", &Reader::start_runs, "fd"_a, "runs"_a)
        .def("read", &Reader::read, "fd"_a, "offset"_a, "address"_a, "nbytes"_a, "sums"_a = nb::none(), "first"_a = 0,
             "stride"_a = 0)
        .def("close", &Reader::close)
        .def(
            "inject",
            [](Reader& self, std::int64_t at, int error, std::int64_t most_bytes, bool forever) {
                self.reads->inject(Fault{at, error, most_bytes, forever});
            },
            "at"_a, "error"_a = 0, "most_bytes"_a = 0, "forever"_a = true);
    m.def("drop_cached", &py_drop_cached, "fd"_a, "offset"_a, "nbytes"_a);
    m.def("ram_read_s", &py_ram_read_s, "address"_a, "nbytes"_a, "threads"_a, "repeats"_a);
    m.def("peak_per_s", &py_peak_per_s, "kind"_a, "threads"_a, "isa"_a = nb::none());

    bind_ops(m);
}
