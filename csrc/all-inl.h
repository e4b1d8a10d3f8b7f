// All kernels for one instruction set, and the table of them. Included last by kernels_*.cpp, after the simd and codes
// headers of the instruction set, whose name is PENSTOCK_ISA.
#pragma once

// clang-format off: each header uses those before it
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

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr Kernels kernels_named(const char* isa) {
    return {
        .isa = isa,
        .project = project,
        .head = head,
        .out = out,
        .ffn = ffn,
        .fire = fire_neurons,
        .route = route,
        .experts = experts,
        .combine = combine,
        .gate = gate,
        .qkv = qkv,
        .attend = attend,
        .norm = norm,
        .order = order,
        .merge = merge,
        .embed = embed,
        .gather = gather,
        .predict = predict,
        .widen = widen,
        .int8_products = int8_products,
        .float_products = float_products,
        .hash = hash,
    };
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
