#include "kernels.h"

#include <cstring>

#include "cpu.h"

namespace penstock {

const Kernels* find_kernels(const char* name) {
    const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
    if (is("portable")) return &kPortableKernels;
#ifdef __x86_64__
    const bool avx2 = has_feature("avx2") && has_feature("fma") && has_feature("f16c");
    if (is("avx2") && avx2) return &kAvx2Kernels;
    // PCs since 2021 that lack AVX-512 have its 8-bit dot product for AVX registers.
    if (is("avxvnni") && avx2 && has_feature("avxvnni")) return &kAvxVnniKernels;
    // AVX-512 is built only with VNNI. Processors that have AVX-512 without VNNI (before 2019) run the AVX2 kernels.
    const bool avx512 = avx2 && has_feature("avx512bw") && has_feature("avx512vl") && has_feature("avx512dq") &&
                        has_feature("avx512vnni");
    if (is("avx512") && avx512) return &kAvx512Kernels;
    if (is("amx") && avx512 && has_feature("amx_tile") && has_feature("amx_int8") && may_use_tiles()) {
        return &kAmxKernels;
    }
    if (is("amx-model") && avx512) return &kAmxModelKernels;  // its instructions in plain C++, for tests
#elif defined(__aarch64__)
    if (is("neon") && has_feature("neon")) return &kNeonKernels;
    if (is("dotprod") && has_feature("dotprod")) return &kDotprodKernels;
    if (is("i8mm") && has_feature("dotprod") && has_feature("i8mm")) return &kI8mmKernels;
#endif
    return nullptr;
}

const Kernels* best_kernels() {
    for (const char* isa : {"avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon"}) {
        if (const Kernels* kernels = find_kernels(isa)) return kernels;
    }
    return &kPortableKernels;
}

}  // namespace penstock
