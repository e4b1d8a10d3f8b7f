// The classes that the files of the Python module share: readers and their checksums, and programs of ops.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "demand.h"
#include "kernels.h"
#include "reads.h"
#include "sums.h"
#include "threads.h"

// Checksums that several readers may share.
struct Checksums {
    std::shared_ptr<penstock::Sums> sums;
};

// A load that was begun, for Python to wait for.
struct Begun {
    std::shared_ptr<penstock::Reads> reads;
    penstock::LoadPtr load;

    bool done() const { return load->done.load(std::memory_order_acquire); }
    std::int64_t wait() const;
};

struct Reader {
    std::shared_ptr<penstock::Reads> reads;

    Begun start(int fd, std::int64_t offset, std::uintptr_t address, std::int64_t nbytes, const Checksums* sums,
                std::int64_t first, std::int64_t stride) const;
    // `runs`: (offset, address, bytes), in rising order of addresses.
    Begun start_runs(int fd, const std::vector<std::tuple<std::int64_t, std::uintptr_t, std::int64_t>>& runs) const;
    std::int64_t read(int fd, std::int64_t offset, std::uintptr_t address, std::int64_t nbytes, const Checksums* sums,
                      std::int64_t first, std::int64_t stride) const;
    void close() const;
};

// The kernels of one instruction set on a pool of threads.
struct Compute {
    Compute(const std::string& isa, int threads);
    const penstock::Kernels* kernels;
    std::unique_ptr<penstock::Pool> pool;
};

// An op with its operands, ready to run. It returns false where the scratch is too small for one granule.
using Step = std::function<bool(const Compute&)>;

void require(bool scratch_suffices);

// How many rows, rows with logits and sequences a batch has now.
struct Counts {
    std::int32_t rows, chosen, sequences;
};

// Ops that run in order, with no Python between them.
struct Program {
    explicit Program(const Compute& on) : compute(&on) {}
    const Compute* compute;
    const Counts* counts = nullptr;  // of the batch of the ops that are recorded next; null: these stay as they are
    std::vector<Step> steps;
    std::shared_ptr<penstock::ExpertsOp> placed;             // the operands of the latest call for experts
    std::vector<std::shared_ptr<penstock::Demand>> demands;  // that its steps ask
    std::vector<std::size_t> edges;                          // steps that are a demand's
    std::vector<std::pair<double, double>> spans;            // of the latest run: when the ops between those ran

    // Replaces that call's experts, and where their weights lie.
    void place(const std::vector<std::uintptr_t>& weights, std::vector<int> ids);
    void run();
};

// How a field of an op comes from Python. Pointers come as addresses.
template <class Value>
struct Crossing {
    using type = Value;
    static Value of(const Value& value) { return value; }
};
template <>
struct Crossing<penstock::Routes> {
    using type = std::uintptr_t;
    static penstock::Routes of(std::uintptr_t address) { return {reinterpret_cast<std::uint8_t*>(address)}; }
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

// Waits for a load, and lets Python take signals meanwhile. Called without the GIL.
void wait_for(penstock::Reads& reads, const penstock::Load& load);

// Adds the shapes of ops.
void bind_shapes(nanobind::module_& m);

// Adds caches of experts and what asks for them, and the steps of programs that do so.
void bind_demand(nanobind::module_& m, nanobind::class_<Program>& program);
