#define PENSTOCK_ISA portable
// clang-format off: each is written in terms of the one before
#include "simd_portable.h"
#include "kernels-inl.h"
#include "qkv-inl.h"
#include "attention-inl.h"
// clang-format on

namespace penstock {

const Kernels kPortableKernels{"portable",     &portable::project, &portable::accumulate,
                               &portable::ffn, &portable::qkv,     &portable::attend};

}  // namespace penstock
