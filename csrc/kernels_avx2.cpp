#define PENSTOCK_ISA avx2
#include "simd_avx2.h"
// After the lanes that it is written in.
#include "kernels-inl.h"
#include "attention-inl.h"

namespace penstock {

const Kernels kAvx2Kernels{"avx2", &avx2::project, &avx2::accumulate, &avx2::ffn, &avx2::qkv, &avx2::attend};

}  // namespace penstock
