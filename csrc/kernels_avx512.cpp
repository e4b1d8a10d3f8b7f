#define PENSTOCK_ISA avx512
#include "simd_avx512.h"
// After the lanes that it is written in.
#include "kernels-inl.h"
#include "attention-inl.h"

namespace penstock {

const Kernels kAvx512Kernels{"avx512", &avx512::project, &avx512::accumulate, &avx512::ffn, &avx512::qkv, &avx512::attend};

}  // namespace penstock
