#define PENSTOCK_ISA neon
// clang-format off: each header uses those before it
#include "simd_neon.h"
#include "codes_lanes.h"
#include "all-inl.h"
// clang-format on

namespace penstock {

constinit const Kernels kNeonKernels = neon::kernels_named("neon");

}  // namespace penstock
