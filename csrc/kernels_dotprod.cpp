#define PENSTOCK_ISA dotprod
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

const Kernels kDotprodKernels{"dotprod",       &dotprod::project,       &dotprod::head,
                              &dotprod::out,   &dotprod::ffn,           &dotprod::fire_neurons,
                              &dotprod::route, &dotprod::experts,       &dotprod::combine,
                              &dotprod::gate,  &dotprod::qkv,           &dotprod::attend,
                              &dotprod::norm,  &dotprod::order,         &dotprod::merge,
                              &dotprod::embed, &dotprod::gather,        &dotprod::predict,
                              &dotprod::widen, &dotprod::int8_products, &dotprod::float_products,
                              &dotprod::hash};

}  // namespace penstock
