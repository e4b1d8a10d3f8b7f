#define PENSTOCK_ISA avx512
// clang-format off: each header uses those before it
#include "simd_avx512.h"
#include "codes_avx512.h"
#include "all-inl.h"
// clang-format on

namespace penstock {

constinit const Kernels kAvx512Kernels = avx512::kernels_named("avx512");

}  // namespace penstock
