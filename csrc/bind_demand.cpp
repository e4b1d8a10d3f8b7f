// Makes caches of experts callable from Python, and programs that ask routers and read what is missing by themselves.
// `_native.pyi` is the manual.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_types.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

constexpr int kMostExperts = 1 << 16;
constexpr double kAwake_s = 0.002;
constexpr double kStir_s = 0.0001;  // less than the time after which a worker sleeps

int checked(int expert) {
    if (expert < 0 || expert >= kMostExperts) throw nb::value_error("there is no such expert");
    return expert;
}

// Experts of any Python collection; None is left out.
std::vector<int> experts_of(const nb::iterable& collection) {
    std::vector<int> experts;
    for (const nb::handle each : collection) {
        if (!each.is_none()) experts.push_back(checked(nb::cast<int>(each)));
    }
    return experts;
}

nb::object slot_or_none(int slot) { return slot < 0 ? nb::object(nb::none()) : nb::object(nb::int_(slot)); }

// Readers of one model share a queue for each disk.
std::shared_ptr<Demand> make_demand(
    int layer, std::shared_ptr<ExpertCache> cache, const Program& experts, const std::vector<std::uintptr_t>& slots,
    const std::vector<std::tuple<const Reader*, int, std::int64_t, std::int64_t>>& homes, const Checksums* sums,
    const std::vector<std::pair<std::uintptr_t, std::size_t>>& ahead, bool poisoned) {
    if (experts.placed == nullptr) throw nb::value_error("the program computes no experts");
    const ExpertsOp& op = *experts.placed;
    if (op.outputs == nullptr) throw nb::value_error("experts come in any order, so their outputs are kept apart");
    if (slots.size() != std::size_t(cache->slots())) throw nb::value_error("each slot of the cache has a place");
    std::vector<std::byte*> places;
    for (const std::uintptr_t slot : slots) places.push_back(reinterpret_cast<std::byte*>(slot));
    std::vector<ExpertHome> at;
    for (const auto& [reader, fd, offset, first_sum] : homes) {
        if (reader == nullptr || offset < 0) throw nb::value_error("each expert is on a disk");
        if (sums != nullptr && (std::int64_t(op.stride) < kLeastHashed || first_sum < 0 ||
                                first_sum > sums->sums->count() - op.per_expert)) {
            throw nb::value_error("there are no such checksums");
        }
        at.push_back({reader->reads, fd, offset, first_sum});
    }
    std::vector<std::pair<const std::byte*, std::size_t>> next;
    for (const auto& [from, nbytes] : ahead) next.emplace_back(reinterpret_cast<const std::byte*>(from), nbytes);
    return std::make_shared<Demand>(layer, std::move(cache), op, std::move(places), std::move(at),
                                    sums != nullptr ? sums->sums : nullptr, ReadAhead(next), poisoned);
}

// Adds a step of a demand to a program.
template <class Action>
void step(Program& program, const std::shared_ptr<Demand>& demand, const Action& action) {
    if (std::find(program.demands.begin(), program.demands.end(), demand) == program.demands.end()) {
        program.demands.push_back(demand);
    }
    program.edges.push_back(program.steps.size());
    program.steps.push_back([=](const Compute& on) {
        action(*demand, on);
        return true;
    });
}

// Waits for a load without sleep at first: sleeping threads wake some 50 µs late, and an expert takes 700. Meanwhile
// the pool reads what the next ops want into the caches, 2 to 3 times as fast there as in RAM. When that is done, an
// empty job now and then keeps its workers from sleeping, unless the disk is slow.
void wait_awake(ReadAhead& ahead, Pool& pool, Reads& reads, const Load& load) {
    const double until_s = now_s() + kAwake_s;
    double next_job_s = now_s() + kStir_s;
    for (reads.progress(); !load.done.load(std::memory_order_acquire); reads.progress()) {
        if (ahead.some(pool)) continue;
        const double time_s = now_s();
        if (time_s > until_s) break;
        if (time_s > next_job_s) {
            pool.run(kByAll, [](const Team&) {});
            next_job_s = time_s + kStir_s;
        }
    }
    wait_for(reads, load);
}

void compute_asked(Demand& demand, const Compute& on) {
    demand.compute([&](const ExpertsOp& op) { require(on.kernels->experts(*on.pool, op)); },
                   [&](Reads& reads, const Load& load) { wait_awake(demand.ahead(), *on.pool, reads, load); });
}

std::vector<std::tuple<double, double, int>> tuples(const std::vector<Stamp>& stamps) {
    std::vector<std::tuple<double, double, int>> found;
    for (const Stamp& stamp : stamps) found.emplace_back(stamp.start_s, stamp.end_s, stamp.experts);
    return found;
}

PyObject* load_failed = nullptr;  // the exception _native.LoadFailed; never freed

}  // namespace

void Program::run() {
    nb::gil_scoped_release release;
    spans.clear();
    for (const auto& demand : demands) demand->begin();
    std::size_t edge = 0;
    double start_s = now_s();
    try {
        for (std::size_t i = 0; i < steps.size(); ++i) {
            const bool at_edge = edge < edges.size() && edges[edge] == i;
            if (at_edge) spans.emplace_back(start_s, now_s());
            require(steps[i](*compute));
            if (at_edge) start_s = now_s(), ++edge;
        }
        spans.emplace_back(start_s, now_s());
        for (const auto& demand : demands) demand->finish(wait_for);
    } catch (...) {  // nothing may write to memory that is given back
        for (const auto& demand : demands) demand->abandon();
        throw;
    }
}

void bind_demand(nb::module_& m, nb::class_<Program>& program) {
    using namespace nb::literals;
    load_failed = PyErr_NewException("penstock._native.LoadFailed", nullptr, nullptr);
    m.attr("LoadFailed") = nb::borrow(load_failed);
    nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
        try {
            std::rethrow_exception(raised);
        } catch (const LoadFailed& failed) {
            const nb::object damaged = failed.damaged ? nb::object(nb::int_(*failed.damaged)) : nb::object(nb::none());
            const nb::object what = nb::make_tuple(failed.layer, failed.expert, failed.error, failed.good, damaged);
            PyErr_SetObject(load_failed, what.ptr());
        }
    });

    nb::class_<ExpertCache>(m, "ExpertCache")
        .def(
            "__init__",
            [](ExpertCache* self, int slots, const std::string& policy) {
                if (slots < 1 || slots > kMostExperts) throw nb::value_error("a cache has slots");
                if (policy != "lfu" && policy != "lru") throw nb::value_error(("there is no policy " + policy).c_str());
                new (self) ExpertCache(slots, policy == "lfu");
            },
            "slots"_a, "policy"_a)
        .def_prop_ro("slots", &ExpertCache::slots)
        .def_prop_ro("policy", [](const ExpertCache& self) { return self.least_used() ? "lfu" : "lru"; })
        .def_prop_ro("held",
                     [](const ExpertCache& self) {
                         nb::list held;
                         for (const int expert : self.held()) held.append(slot_or_none(expert));
                         return nb::tuple(held);
                     })
        .def(
            "slot", [](const ExpertCache& self, int expert) { return slot_or_none(self.slot(checked(expert))); },
            "expert"_a)
        .def(
            "missing",
            [](const ExpertCache& self, const nb::iterable& experts) {
                std::vector<int> missing;
                for (const int expert : experts_of(experts)) {
                    if (self.slot(expert) < 0) missing.push_back(expert);
                }
                return missing;
            },
            "experts"_a)
        .def(
            "ask", [](ExpertCache& self, const nb::iterable& experts) { self.ask(experts_of(experts)); }, "experts"_a)
        .def(
            "admit",
            [](ExpertCache& self, int expert, const nb::iterable& keep, const nb::iterable& first) {
                return slot_or_none(self.admit(checked(expert), experts_of(keep), experts_of(first)));
            },
            "expert"_a, "keep"_a, "first"_a = nb::tuple())
        .def(
            "guess",
            [](ExpertCache& self, int expert, const nb::iterable& keep) {
                return slot_or_none(self.guess(checked(expert), experts_of(keep)));
            },
            "expert"_a, "keep"_a);

    nb::class_<Demand>(m, "Demand")
        .def(nb::new_(&make_demand), "layer"_a, "cache"_a, "experts"_a, "slots"_a, "homes"_a, "sums"_a.none(),
             "ahead"_a, "poisoned"_a)
        .def_prop_ro("said",
                     [](const Demand& self) {
                         std::vector<std::vector<int>> rows;
                         const auto& said = self.said();
                         for (auto at = said.begin(); at < said.end(); at += self.active()) {
                             rows.emplace_back(at, at + self.active());
                         }
                         return rows;
                     })
        .def_prop_ro("guessed", &Demand::guessed)
        .def_prop_ro("loaded_bytes", &Demand::loaded_bytes)
        .def_prop_ro("loaded", [](const Demand& self) { return tuples(self.loaded()); })
        .def_prop_ro("computed", [](const Demand& self) { return tuples(self.computed()); })
        .def(
            "give",
            [](Demand& self, const std::vector<std::vector<int>>& rows) {
                std::vector<int> flat;
                for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
                self.give(std::move(flat));
            },
            "rows"_a)
        .def("give_guess", &Demand::give_guess, "rows"_a);

    program
        .def(
            "ask",
            [](Program& self, const std::shared_ptr<Demand>& demand) {
                step(self, demand, [](Demand& of, const Compute&) { of.ask(); });
            },
            "demand"_a)
        .def(
            "guess",
            [](Program& self, const std::shared_ptr<Demand>& demand, std::uintptr_t routes, int guesses) {
                if (guesses < 1) throw nb::value_error("guesses must be at least 1");
                const Routes at{reinterpret_cast<std::uint8_t*>(routes)};
                step(self, demand, [=](Demand& of, const Compute&) { of.guess(at, guesses); });
            },
            "demand"_a, "routes"_a, "guesses"_a)
        .def(
            "compute_asked",
            [](Program& self, const std::shared_ptr<Demand>& demand) { step(self, demand, compute_asked); }, "demand"_a)
        .def_prop_ro("spans", [](const Program& self) { return self.spans; });
}
