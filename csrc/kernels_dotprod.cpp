#define PENSTOCK_ISA dotprod
// clang-format off: each header uses those before it
#include "simd_neon.h"
#include "codes_lanes.h"
#include "all-inl.h"
// clang-format on

namespace penstock {

constinit const Kernels kDotprodKernels = dotprod::kernels_named("dotprod");

}  // namespace penstock
