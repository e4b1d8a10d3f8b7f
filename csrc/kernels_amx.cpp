// AMX: the AVX-512 kernels, whose products of 16 rows and more with integer weights go through tile registers. It has
// never run on a processor with AMX. Tests run the same code over a model of the instructions in plain C++.
#define PENSTOCK_ISA amx
// clang-format off: each header uses those before it
#include <algorithm>
#include <cstring>
#include "kernels.h"
#include "simd_avx512.h"
// clang-format on

namespace penstock {
namespace amx {
namespace {

constexpr std::size_t kLineBytes = 64;

// Registers 0 and 1 hold sums of two tiles of weights [16 rows][16 outputs], 2 the activations [16][columns], 3 and 4
// the codes [columns / 4][16 outputs][4].
struct alignas(64) Config {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_of_row[16] = {};
    std::uint8_t rows[16] = {};

    explicit Config(int columns) {
        for (int i = 0; i < 5; ++i) {
            bytes_of_row[i] = i == 2 ? static_cast<std::uint16_t>(columns) : std::uint16_t{64};
            rows[i] = i < 3 ? std::uint8_t{16} : static_cast<std::uint8_t>(columns / 4);
        }
    }
};
static_assert(sizeof(Config) == 64);

// The instructions are written out, since GCC's intrinsics do not say that they read memory.
struct Registers {
    explicit Registers(const Config& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
    ~Registers() { asm volatile("tilerelease"); }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;

    template <int to>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(to));
    }
    template <int to>
    void load(const void* from, std::size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(to) : "memory");
    }
    template <int from>
    void store(void* to, std::size_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(from) : "memory");
    }
    // to += signed bytes of x · unsigned bytes of w.
    template <int to, int x, int w>
    void dot() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(to), "i"(x), "i"(w));
    }
};

// The same instructions as Intel's manual defines them.
struct Model {
    Config config;
    std::uint8_t tiles[8][16][64] = {};
    explicit Model(const Config& c) : config(c) {}

    template <int to>
    void zero() {
        std::memset(tiles[to], 0, sizeof tiles[to]);
    }
    template <int to>
    void load(const void* from, std::size_t stride) {
        zero<to>();
        for (std::size_t row = 0; row < config.rows[to]; ++row) {
            std::memcpy(tiles[to][row], static_cast<const std::uint8_t*>(from) + row * stride, config.bytes_of_row[to]);
        }
    }
    template <int from>
    void store(void* to, std::size_t stride) {
        for (std::size_t row = 0; row < config.rows[from]; ++row) {
            std::memcpy(static_cast<std::uint8_t*>(to) + row * stride, tiles[from][row], config.bytes_of_row[from]);
        }
    }
    template <int to, int x, int w>
    void dot() {
        for (int m = 0; m < config.rows[to]; ++m) {
            for (int k = 0; k < config.bytes_of_row[x] / 4; ++k) {
                for (int n = 0; n < config.bytes_of_row[to] / 4; ++n) {
                    std::int32_t sum;
                    std::memcpy(&sum, tiles[to][m] + 4 * n, 4);
                    for (int i = 0; i < 4; ++i) {
                        sum += static_cast<std::int8_t>(tiles[x][m][4 * k + i]) * tiles[w][k][4 * n + i];
                    }
                    std::memcpy(tiles[to][m] + 4 * n, &sum, 4);
                }
            }
        }
    }
};

// Columns that a register of activations takes: as many as divide a group.
int columns_at_once(int group) { return group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 16; }

// Loads the codes of so many columns as register `to`. `lines`: room for 16 lines.
template <int to, class Unit>
void load_codes(Unit& unit, bool nibbles, const std::uint8_t* p, int columns, std::uint8_t* lines) {
    if (!nibbles) return unit.template load<to>(p, kLineBytes);
    for (int l = 0; l < columns / 8; ++l) {
        const Line w = line(p + 64 * l);
        l_store(lines + 128 * l, low_nibbles(w));
        l_store(lines + 128 * l + 64, high_nibbles(w));
    }
    unit.template load<to>(lines, kLineBytes);
}

// The terms of each sum are added as `add_group` of wide-inl.h adds them, so the bits are the same.
template <class Unit>
void products(const UnitProducts& op) {
    const Matrix& m = op.matrix;
    const bool nibbles = m.kind == Kind::kInt4;
    const int group = m.group, columns = columns_at_once(group), groups = m.groups();
    const std::size_t code_bytes = 64 * std::size_t(group / (nibbles ? 8 : 4)), group_bytes = code_bytes + 64;
    alignas(64) std::uint8_t lines[2][16 * 64];
    alignas(64) std::int32_t totals[2][kUnitRows][kTileRows];
    Unit unit{Config(columns)};
    const std::int8_t* q = op.q;
    const float *x_scale = op.x_scale, *x_sum = op.x_sum;
    for (int granule = 0; granule < op.granules; ++granule) {
        const std::uint8_t* p = op.first + std::size_t(granule) * op.stride;
        for (int j = 0; j < groups; ++j, p += group_bytes, q += group * kUnitRows) {
            unit.template zero<0>();
            unit.template zero<1>();
            for (int c = 0; c < group; c += columns) {
                const std::uint8_t* const codes = p + 64 * std::size_t(c / (nibbles ? 8 : 4));
                unit.template load<2>(q + c, std::size_t(group));
                load_codes<3>(unit, nibbles, codes, columns, lines[0]);
                unit.template dot<0, 2, 3>();
                if (op.tiles == 1) continue;
                load_codes<4>(unit, nibbles, codes + op.next, columns, lines[1]);
                unit.template dot<1, 2, 4>();
            }
            unit.template store<0>(totals[0], kLineBytes);
            if (op.tiles == 2) unit.template store<1>(totals[1], kLineBytes);
            for (int i = 0; i < op.tiles; ++i) {
                const std::uint8_t* const at = p + code_bytes + std::size_t(i) * op.next;
                const F scale = f_half(at), minimum = f_half(at + 32);
                for (int r = 0; r < kUnitRows; ++r) {
                    float* const to = op.sums + (2 * r + i) * kTileRows;
                    F sum = f_fma(f_from(_mm512_load_si512(totals[i][r])), f_mul(scale, f_set(x_scale[r])), f_load(to));
                    sum = f_fma(minimum, f_set(x_sum[r]), sum);
                    f_store(to, sum);
                }
            }
            x_scale += kUnitRows, x_sum += kUnitRows;
        }
    }
}

// As int8_products of peak-inl.h, in tile registers.
std::int64_t int8_products(std::int64_t rounds, float* sink) {
    constexpr int kAgain = 64;
    alignas(64) std::int8_t bytes[16 * 64];
    alignas(64) std::int32_t totals[16][16];
    std::fill_n(bytes, sizeof bytes, static_cast<std::int8_t>(sink[0]));
    Registers unit{Config(64)};
    unit.load<2>(bytes, 64);
    unit.load<3>(bytes, 64);
    unit.load<4>(bytes, 64);
    for (std::int64_t i = 0; i < rounds; ++i) {
        unit.zero<0>();
        unit.zero<1>();
        for (int again = 0; again < kAgain; ++again) {
            unit.dot<0, 2, 3>();
            unit.dot<1, 2, 4>();
        }
    }
    unit.store<0>(totals, 64);
    sink[0] = static_cast<float>(totals[0][0]);
    return rounds * kAgain * 2 * 16 * 16 * 64 * 2;
}

Kernels with_unit(const char* isa, Unit unit) {
    Kernels kernels = kAvx512Kernels;
    kernels.isa = isa, kernels.unit = unit;
    return kernels;
}

Kernels real() {
    Kernels kernels = with_unit("amx", products<Registers>);
    kernels.int8_products = int8_products;
    return kernels;
}

}  // namespace
}  // namespace amx

const Kernels kAmxKernels = amx::real(), kAmxModelKernels = amx::with_unit("amx-model", amx::products<amx::Model>);

}  // namespace penstock
