#define PENSTOCK_ISA avxvnni
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

const Kernels kAvxVnniKernels{"avxvnni",       &avxvnni::project,       &avxvnni::head,
                              &avxvnni::out,   &avxvnni::ffn,           &avxvnni::fire_neurons,
                              &avxvnni::route, &avxvnni::experts,       &avxvnni::combine,
                              &avxvnni::gate,  &avxvnni::qkv,           &avxvnni::attend,
                              &avxvnni::norm,  &avxvnni::order,         &avxvnni::merge,
                              &avxvnni::embed, &avxvnni::gather,        &avxvnni::predict,
                              &avxvnni::widen, &avxvnni::int8_products, &avxvnni::float_products,
                              &avxvnni::hash};

}  // namespace penstock
