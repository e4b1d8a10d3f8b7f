// The experts of one layer that its router asks for, in a pass that runs without Python. `Demand` takes the router's
// answer, begins to read experts that the cache misses, and computes experts as they come. graph/demand.py emits the
// same as tasks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "expert_cache.h"
#include "kernels.h"
#include "read_ahead.h"
#include "reads.h"

namespace penstock {

// Where an expert lies on a disk.
struct ExpertHome {
    std::shared_ptr<Reads> reads;
    int fd;
    std::int64_t offset;
    std::int64_t first_sum;  // the number of its first granule among the model's checksums
};

// A load that brought too little or wrong bytes. `error`: errno, or 0. `damaged`: the granule of the expert whose
// checksum is wrong.
struct LoadFailed : std::runtime_error {
    LoadFailed(int in_layer, int of, const Load& load)
        : std::runtime_error("a load of an expert failed"),
          layer(in_layer),
          expert(of),
          error(load.error),
          good(load.good),
          damaged(load.damaged) {}
    int layer, expert, error;
    std::int64_t good;
    std::optional<std::int64_t> damaged;
};

// A call or a load of a pass, for timelines. Seconds are those of the steady clock. `experts`: how many experts a call
// computed, or which expert was loaded.
struct Stamp {
    double start_s, end_s;
    int experts;
};

class Demand {
  public:
    using Wait = std::function<void(Reads&, const Load&)>;  // returns when the load is done
    using Compute = std::function<void(const ExpertsOp&)>;

    // `op`: all operands of the layer's call for experts, except which experts they are and where these lie. `slots`:
    // the addresses of the cache's slots in RAM. `sums`: the model's checksums, null if loads are not compared.
    // `ahead`: what may be read while somebody waits for these experts. `poisoned`: slots are filled with NaN before
    // each load.
    Demand(int layer, std::shared_ptr<ExpertCache> cache, ExpertsOp op, std::vector<std::byte*> slots,
           std::vector<ExpertHome> homes, std::shared_ptr<Sums> sums, ReadAhead ahead, bool poisoned);

    // Takes the router's answer, and begins to read the experts that are missing.
    void ask();
    // Begins to read experts that the layer's router is likely to ask for. `routes`: its answer to the input of the
    // layer before. Of each row at most `guesses` missing experts are read, those with the largest weights.
    void guess(const Routes& routes, int guesses);
    // Computes the experts that were asked for: first those in the cache, then the others as their loads end.
    void compute(const Compute& compute, const Wait& wait);
    // Waits for all reads, also for those that only a guess began. Throws LoadFailed.
    void finish(const Wait& wait);
    // The same after an error. Throws nothing.
    void abandon() noexcept;

    // Answers that the next pass takes in place of the router's: `experts` [T, A]. Of a guess each row has at most A.
    // Empty: the router's own answer counts. Throws std::invalid_argument if the layer has no such expert.
    void give(std::vector<int> experts);
    void give_guess(std::vector<std::vector<int>> experts);

    const std::vector<std::int32_t>& said() const { return said_; }  // [T, A], of the latest pass
    const std::vector<std::vector<int>>& guessed() const { return guessed_; }
    int active() const { return op_.active; }
    ReadAhead& ahead() { return ahead_; }
    std::int64_t loaded_bytes() const { return loaded_bytes_; }       // in the latest pass
    const std::vector<Stamp>& computed() const { return computed_; }  // of the latest pass, for timelines
    const std::vector<Stamp>& loaded() const { return loaded_; }
    void begin();  // a pass begins

  private:
    struct Coming {
        int expert;
        std::byte* to;
        std::shared_ptr<Reads> reads;
        LoadPtr load;
    };

    void check(int expert) const;
    void load(int expert, int slot);
    void note(const Coming& coming);
    void compute_placed(const Compute& compute);

    int layer_;
    std::shared_ptr<ExpertCache> cache_;
    ExpertsOp op_;
    std::vector<std::byte*> slots_;
    std::vector<ExpertHome> homes_;
    std::shared_ptr<Sums> sums_;
    ReadAhead ahead_;
    bool poisoned_;
    std::int64_t expert_bytes_;

    std::vector<int> given_;
    std::vector<std::vector<int>> given_guess_;
    std::vector<std::int32_t> said_;
    std::vector<std::vector<int>> guessed_;
    std::vector<int> present_;    // experts that were asked for and were in the cache
    std::vector<Coming> coming_;  // their loads, in the order in which they began
    std::vector<Coming> wrong_;   // loads that a guess began and nobody asked for
    std::int64_t loaded_bytes_ = 0;
    std::vector<Stamp> computed_, loaded_;
};

}  // namespace penstock
