// Widens integer weights to floats, in the tiles of a float format. An engine that multiplies only floats does this
// first (PIPO §3.4). No op of the table needs it: benches compare it with multiplying from the codes. Included after
// kernels-inl.h.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

// Widens one tile. A code times a 16-bit scale is exact in float32, so a fused multiply-add gives the same number.
template <bool int4, bool half>
void widen_tile(const Matrix& m, const std::uint8_t* p, std::uint8_t* out) {
    const int lines = m.group / (int4 ? 8 : 4);
    for (int j = 0, left = m.cols; j < m.groups(); ++j, left -= m.group) {
        const std::uint8_t* const ends = p + std::size_t(lines) * 64;
        const F scale = f_half(ends), minimum = f_half(ends + 32);
        int columns = std::min(m.group, left);
        const auto put = [&](F code) {
            if (columns-- <= 0) return;  // padding of the last group
            const F value = f_fma(code, scale, minimum);
            if constexpr (half) {
                f_store_half(out, value);
            } else {
                f_store(reinterpret_cast<float*>(out), value);
            }
            out += half ? 32 : 64;
        };
        const auto four = [&](Line w) { put(f_byte<0>(w)), put(f_byte<1>(w)), put(f_byte<2>(w)), put(f_byte<3>(w)); };
        for (int l = 0; l < lines; ++l, p += 64) {
            prefetch(p + kAhead, false);
            const Line w = line(p);
            four(int4 ? low_nibbles(w) : w);
            if constexpr (int4) four(high_nibbles(w));
        }
        p += 64;
    }
}

bool widen(Pool& pool, const WidenOp& op) {
    const Granules& weights = op.weights;
    const Matrix &m = op.matrix, &wide = op.wide;
    const bool int4 = m.kind == Kind::kInt4, half = wide.kind == Kind::kFloat16;
    const auto tile = int4   ? half ? &widen_tile<true, true> : &widen_tile<true, false>
                      : half ? &widen_tile<false, true>
                             : &widen_tile<false, false>;
    pool.run(std::size_t(weights.count) * std::size_t(m.tiles()) * wide.tile_bytes(), [&](const Team& team) {
        const auto [first, last] = team.share(weights.count * m.tiles());
        for (int i = first; i < last; ++i) {
            const std::size_t granule = std::size_t(i / m.tiles()), number = std::size_t(i % m.tiles());
            tile(m, weights.data + granule * weights.stride + m.offset + number * m.tile_bytes(),
                 op.out + granule * op.out_stride + wide.offset + number * wide.tile_bytes());
        }
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
