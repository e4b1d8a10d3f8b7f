#define PENSTOCK_ISA avxvnni
// clang-format off: each header uses those before it
#include "simd_avx2.h"
#include "codes_avx2.h"
#include "all-inl.h"
// clang-format on

namespace penstock {

constinit const Kernels kAvxVnniKernels = avxvnni::kernels_named("avxvnni");

}  // namespace penstock
