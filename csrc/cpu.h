// The instruction sets that this processor has and that the operating system lets us use.
#pragma once

#include <string>
#include <vector>

namespace penstock {

// Names such as "avx2" or "avx512vnni", in a fixed order. Instruction sets whose registers the system does not save are
// left out.
std::vector<std::string> cpu_features();

bool has_feature(const char* name);

}  // namespace penstock
