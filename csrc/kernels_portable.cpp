#define PENSTOCK_ISA portable
// clang-format off: each header uses those before it
#include "simd_portable.h"
#include "codes_lanes.h"
#include "all-inl.h"
// clang-format on

namespace penstock {

constinit const Kernels kPortableKernels = portable::kernels_named("portable");

}  // namespace penstock
