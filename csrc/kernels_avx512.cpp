#define PENSTOCK_ISA avx512
// clang-format off: each header uses those before it
#include "simd_avx512.h"
#include "codes_avx512.h"
#include "kernels-inl.h"
#include "fours-inl.h"
#include "neuron-rows-inl.h"
#include "neuron-dots-inl.h"
#include "neuron-sums-inl.h"
#include "neurons-listed-inl.h"
#include "neurons-few-inl.h"
#include "neurons-many-inl.h"
#include "ffn-inl.h"
#include "route-inl.h"
#include "experts-inl.h"
#include "qkv-inl.h"
#include "attend-inl.h"
#include "rows-inl.h"
#include "widen-inl.h"
#include "peak-inl.h"
#include "hash-inl.h"
// clang-format on

namespace penstock {

const Kernels kAvx512Kernels{"avx512",       &avx512::project,       &avx512::head,
                             &avx512::out,   &avx512::ffn,           &avx512::fire_neurons,
                             &avx512::route, &avx512::experts,       &avx512::combine,
                             &avx512::gate,  &avx512::qkv,           &avx512::attend,
                             &avx512::norm,  &avx512::order,         &avx512::merge,
                             &avx512::embed, &avx512::gather,        &avx512::predict,
                             &avx512::widen, &avx512::int8_products, &avx512::float_products,
                             &avx512::hash};

}  // namespace penstock
