#define PENSTOCK_ISA i8mm
// clang-format off: each header uses those before it
#include "simd_neon.h"
#include "codes_lanes.h"
#include "all-inl.h"
// clang-format on

namespace penstock {

constinit const Kernels kI8mmKernels = i8mm::kernels_named("i8mm");

}  // namespace penstock
