#define PENSTOCK_ISA neon
// clang-format off: each header uses those before it
#include "simd_neon.h"
#include "codes_lanes.h"
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

const Kernels kNeonKernels{
    "neon",       &neon::project,       &neon::head,           &neon::out,   &neon::ffn,    &neon::fire_neurons,
    &neon::route, &neon::experts,       &neon::combine,        &neon::gate,  &neon::qkv,    &neon::attend,
    &neon::norm,  &neon::order,         &neon::merge,          &neon::embed, &neon::gather, &neon::predict,
    &neon::widen, &neon::int8_products, &neon::float_products, &neon::hash};

}  // namespace penstock
