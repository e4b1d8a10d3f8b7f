#define PENSTOCK_ISA portable
#include "simd_portable.h"
// After the lanes that it is written in.
#include "kernels-inl.h"
#include "attention-inl.h"

namespace penstock {

const Kernels kPortableKernels{"portable", &portable::project, &portable::accumulate, &portable::ffn, &portable::qkv, &portable::attend};

}  // namespace penstock
