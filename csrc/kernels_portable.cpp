#define PENSTOCK_ISA portable
// clang-format off: each header uses those before it
#include "simd_portable.h"
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

const Kernels kPortableKernels{"portable",       &portable::project,       &portable::head,
                               &portable::out,   &portable::ffn,           &portable::fire_neurons,
                               &portable::route, &portable::experts,       &portable::combine,
                               &portable::gate,  &portable::qkv,           &portable::attend,
                               &portable::norm,  &portable::order,         &portable::merge,
                               &portable::embed, &portable::gather,        &portable::predict,
                               &portable::widen, &portable::int8_products, &portable::float_products,
                               &portable::hash};

}  // namespace penstock
