// The instruction sets that this processor has and that the operating system lets us use.
#pragma once

#include <string>
#include <vector>

namespace penstock {

// Names such as "avx2" or "avx512vnni", in a fixed order. Instruction sets whose registers the system does not save are
// left out.
std::vector<std::string> cpu_features();

bool has_feature(const char* name);

// Asks the system once for the use of AMX's tile registers, which it grants to whole processes. False where it refuses.
bool may_use_tiles();

// The CPUs of the calling thread's affinity mask, in rising order; none where the system does not say.
std::vector<int> allowed_cpus();

// Sets the calling thread's affinity mask. A refusal costs speed only, so nobody is told.
void run_on(const std::vector<int>& cpus);

// Whether this processor reads weights faster where what is fetched ahead bypasses its L2 cache. AMD's do (Zen 4, four
// rows: 0.86 of the RAM's speed, 0.81 without). Intel's do not: such a fetch holds one of the few line buffers beside
// the L1 cache until the RAM has answered (Ice Lake, one row: 0.55 of the RAM's speed, 0.97 without).
bool fetches_past_l2();

// Whether this processor reads rows of a KV cache faster where they are fetched ahead into its L2 cache. AMD's do (Zen
// 4, one row over 8,192 positions: 28 GB/s in place of 17), but not weights, of which four rows took 1.1 times as long.
bool fetches_rows_into_l2();

}  // namespace penstock
