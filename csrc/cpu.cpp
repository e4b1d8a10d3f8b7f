#include "cpu.h"

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1UL << 13)  // since Linux 5.10; older headers do not name it
#endif
#endif

namespace penstock {
namespace {

#if defined(__x86_64__)

struct Registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // leaves zeros where the leaf does not exist
    return r;
}

// XCR0: the register files that the operating system saves on a context switch. It is read by an instruction written
// out, because the intrinsic _xgetbv would need this file compiled with -mxsave.
uint64_t saved_state() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t{high} << 32) | low;
}

bool is_amd() {
    const Registers name = cpuid(0, 0);  // "AuthenticAMD", in the order ebx, edx, ecx
    return name.ebx == 0x68747541 && name.edx == 0x69746e65 && name.ecx == 0x444d4163;
}

std::vector<std::string> detect() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
    const bool osxsave = one.ecx >> 27 & 1;
    const uint64_t saved = osxsave ? saved_state() : 0;
    const auto saves = [&](uint64_t mask) { return (saved & mask) == mask; };
    const bool ymm = saves(0x6);          // SSE and AVX
    const bool zmm = ymm && saves(0xe0);  // opmask, upper halves of zmm0-15, zmm16-31
    const bool tiles = saves(0x60000);    // TILECFG, TILEDATA
    const struct {
        const char* name;
        bool usable;
        unsigned word;
        int bit;
    } known[] = {
        {"avx2", ymm, seven.ebx, 5},           {"fma", ymm, one.ecx, 12},          {"f16c", ymm, one.ecx, 29},
        {"avxvnni", ymm, seven_one.eax, 4},    {"avx512f", zmm, seven.ebx, 16},    {"avx512bw", zmm, seven.ebx, 30},
        {"avx512vl", zmm, seven.ebx, 31},      {"avx512dq", zmm, seven.ebx, 17},   {"avx512vnni", zmm, seven.ecx, 11},
        {"avx512bf16", zmm, seven_one.eax, 5}, {"avx512vbmi", zmm, seven.ecx, 1},  {"amx_tile", tiles, seven.edx, 24},
        {"amx_int8", tiles, seven.edx, 25},    {"amx_bf16", tiles, seven.edx, 22},
    };
    std::vector<std::string> names;
    for (const auto& f : known) {
        if (f.usable && (f.word >> f.bit & 1)) names.emplace_back(f.name);
    }
    return names;
}

#elif defined(__aarch64__) && defined(__linux__)

std::vector<std::string> detect() {
    std::vector<std::string> names{"neon"};  // part of the base architecture
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) names.emplace_back("dotprod");
    if (getauxval(AT_HWCAP2) & HWCAP2_I8MM) names.emplace_back("i8mm");
    return names;
}

#else

std::vector<std::string> detect() { return {}; }

#endif

const std::vector<std::string>& features() {
    static const std::vector<std::string> names = detect();  // kept: cpuid traps under a hypervisor, microseconds each
    return names;
}

}  // namespace

std::vector<std::string> cpu_features() { return features(); }

std::vector<int> allowed_cpus() {
    // 8192 is NR_CPUS of the distributions' kernels. The fixed cpu_set_t ends at 1024 and fails on bigger machines.
    constexpr int kMost = 8192;
    std::vector<int> cpus;
    cpu_set_t* set = CPU_ALLOC(kMost);
    const std::size_t size = CPU_ALLOC_SIZE(kMost);
    CPU_ZERO_S(size, set);
    if (sched_getaffinity(0, size, set) == 0) {
        for (int cpu = 0; cpu < kMost; ++cpu) {
            if (CPU_ISSET_S(static_cast<std::size_t>(cpu), size, set)) cpus.push_back(cpu);
        }
    }
    CPU_FREE(set);
    return cpus;
}

void run_on(const std::vector<int>& cpus) {
    if (cpus.empty()) return;
    const int most = *std::max_element(cpus.begin(), cpus.end()) + 1;
    const std::size_t size = CPU_ALLOC_SIZE(static_cast<std::size_t>(most));
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(most));
    CPU_ZERO_S(size, set);
    for (const int cpu : cpus) CPU_SET_S(static_cast<std::size_t>(cpu), size, set);
    sched_setaffinity(0, size, set);
    CPU_FREE(set);
}

bool fetches_past_l2() {
#if defined(__x86_64__)
    static const bool past = is_amd();
    return past;
#else
    return true;
#endif
}

bool fetches_rows_into_l2() {
#if defined(__x86_64__)
    static const bool into = is_amd();
    return into;
#else
    return false;
#endif
}

bool may_use_tiles() {
#if defined(__x86_64__)
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h, since Linux 5.16
    static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}

bool has_feature(const char* name) {
    const auto& names = features();
    return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace penstock
