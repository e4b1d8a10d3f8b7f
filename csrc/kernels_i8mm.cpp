#define PENSTOCK_ISA i8mm
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

const Kernels kI8mmKernels{
    "i8mm",       &i8mm::project,       &i8mm::head,           &i8mm::out,   &i8mm::ffn,    &i8mm::fire_neurons,
    &i8mm::route, &i8mm::experts,       &i8mm::combine,        &i8mm::gate,  &i8mm::qkv,    &i8mm::attend,
    &i8mm::norm,  &i8mm::order,         &i8mm::merge,          &i8mm::embed, &i8mm::gather, &i8mm::predict,
    &i8mm::widen, &i8mm::int8_products, &i8mm::float_products, &i8mm::hash};

}  // namespace penstock
