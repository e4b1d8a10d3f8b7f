#define PENSTOCK_ISA avx2
// clang-format off: each header uses those before it
#include "simd_avx2.h"
#include "codes_avx2.h"
#include "all-inl.h"
// clang-format on

namespace penstock {

constinit const Kernels kAvx2Kernels = avx2::kernels_named("avx2");

}  // namespace penstock
