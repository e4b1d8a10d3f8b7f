#define PENSTOCK_ISA avx2
// clang-format off: each header uses those before it
#include "simd_avx2.h"
#include "codes_avx2.h"
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

const Kernels kAvx2Kernels{
    "avx2",       &avx2::project,       &avx2::head,           &avx2::out,   &avx2::ffn,    &avx2::fire_neurons,
    &avx2::route, &avx2::experts,       &avx2::combine,        &avx2::gate,  &avx2::qkv,    &avx2::attend,
    &avx2::norm,  &avx2::order,         &avx2::merge,          &avx2::embed, &avx2::gather, &avx2::predict,
    &avx2::widen, &avx2::int8_products, &avx2::float_products, &avx2::hash};

}  // namespace penstock
