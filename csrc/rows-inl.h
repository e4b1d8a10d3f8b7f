// Ops that walk over rows [T, D] and multiply no matrix: norm, merge, embed, gather. Included after kernels-inl.h.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

// Calls f(first column, columns left) for every 16 of d columns. The last call may have fewer than 16 left.
template <class Function>
inline void each16(int d, const Function& f) {
    for (int i = 0; i < d; i += kTileRows) f(i, d - i);
}

// out [d] = norm(x [d]). `out` may be x itself. Sums are added up in 16 lanes, and then across lanes (f_sum).
void norm_row(const Norm& norm, const float* x, int d, float* out) {
    float mean = 0;
    if (norm.kind == NormKind::kLayer) {
        F total = f_zero();
        each16(d, [&](int i, int left) { total = f_add(total, load_some(x + i, left)); });
        mean = f_sum(total) / static_cast<float>(d);
    }
    F squares = f_zero();
    const F shift = f_set(-mean);
    each16(d, [&](int i, int left) {
        F v = load_some(x + i, left);
        if (mean != 0) {  // lanes beyond the last column must stay 0
            v = f_add(v, shift);
            if (left < kTileRows) {
                float lanes[kTileRows];
                f_store(lanes, v);
                v = load_some(lanes, left);
            }
        }
        squares = f_fma(v, v, squares);
    });
    const F scale = f_set(1.0F / std::sqrt(f_sum(squares) / static_cast<float>(d) + norm.eps));
    each16(d, [&](int i, int left) {
        F v = f_mul(f_add(load_some(x + i, left), shift), scale);
        if (norm.weight != nullptr) v = f_mul(v, f_add(load_some(norm.weight + i, left), f_set(norm.offset)));
        if (norm.bias != nullptr) v = f_add(v, load_some(norm.bias + i, left));
        store_some(out + i, v, left);
    });
}

// Calls f(row) for t rows, shared out to threads. The cost of a row is taken as 8 bytes for each of its d floats.
template <class Function>
void each_row(Pool& pool, int t, int d, const Function& f) {
    pool.run(std::size_t(t) * std::size_t(d) * 8, [&](const Team& team) {
        const auto [lo, hi] = team.share(t);
        for (int row = lo; row < hi; ++row) f(row);
    });
}

bool norm(Pool& pool, const NormOp& op) {
    each_row(pool, op.t, op.d, [&](int row) {
        const float* from = op.x + std::ptrdiff_t(op.chosen != nullptr ? op.chosen[row] : row) * op.d;
        float* to = op.h + std::ptrdiff_t(row) * op.d;
        if (op.norm.kind == NormKind::kNone) {
            std::memcpy(to, from, std::size_t(op.d) * 4);
        } else {
            norm_row(op.norm, from, op.d, to);
        }
    });
    return true;
}

bool order(Pool& pool, const OrderOp& op) {
    Scratch scratch = op.scratch;
    auto* const columns = take<std::int32_t>(scratch, std::size_t(op.d));
    auto* const memory = take<float>(scratch, std::size_t(op.t) * std::size_t(op.d));
    if (columns == nullptr || memory == nullptr) return false;
    for (int i = 0; i < op.d; ++i) {
        const float number = op.order[i];
        columns[i] = number >= 0 && number < static_cast<float>(op.d) ? static_cast<std::int32_t>(number) : 0;
    }
    each_row(pool, op.t, op.d, [&](int row) {
        float* const to = op.rows + std::ptrdiff_t(row) * op.d;
        float* const before = memory + std::ptrdiff_t(row) * op.d;
        std::memcpy(before, to, std::size_t(op.d) * 4);
        for (int i = 0; i < op.d; ++i) to[i] = before[columns[i]];
    });
    return true;
}

bool merge(Pool& pool, const MergeOp& op) {
    const int t = op.t, d = op.d;
    const auto& partials = op.partials;
    Scratch scratch = op.scratch;
    const bool through = op.out.kind != NormKind::kNone;  // the sum is normed first, so it needs memory of its own
    float* memory = through ? take<float>(scratch, std::size_t(t) * std::size_t(d)) : nullptr;
    if (through && memory == nullptr) return false;
    const std::int32_t* const ids = op.routes.ids();
    const float* const weights = op.routes.weights(t, op.active);
    each_row(pool, t, d, [&](int row) {
        const std::ptrdiff_t first = std::ptrdiff_t(row) * op.active;
        float* const to = op.x + std::ptrdiff_t(row) * d;
        float* const sum = through ? memory + std::ptrdiff_t(row) * d : to;
        each16(d, [&](int i, int left) {
            F y = load_some(partials[0] + std::ptrdiff_t(row) * d + i, left);
            for (std::size_t p = 1; p < partials.size(); ++p) {
                y = f_add(y, load_some(partials[p] + std::ptrdiff_t(row) * d + i, left));
            }
            if (op.bias != nullptr) y = f_add(y, load_some(op.bias + i, left));
            for (std::ptrdiff_t a = first; op.expert_bias != nullptr && a < first + op.active; ++a) {
                const float* const bias = op.expert_bias + std::ptrdiff_t(ids[a]) * d + i;
                y = f_add(y, f_mul(load_some(bias, left), f_set(weights[a])));
            }
            store_some(sum + i, through ? y : f_add(load_some(to + i, left), y), left);
        });
        if (through) {
            norm_row(op.out, sum, d, sum);
            each16(d, [&](int i, int left) {
                store_some(to + i, f_add(load_some(to + i, left), load_some(sum + i, left)), left);
            });
        }
        if (op.after.kind != NormKind::kNone) norm_row(op.after, to, d, to);
    });
    return true;
}

bool embed(Pool& pool, const EmbedOp& op) {
    each_row(pool, op.t, op.d, [&](int row) {
        const std::ptrdiff_t first = std::ptrdiff_t(row) * op.d;
        each16(op.d, [&](int i, int left) {
            store_some(op.x + first + i, f_mul(load_some(op.rows + first + i, left), f_set(op.embed_scale)), left);
        });
    });
    return true;
}

// Row r of a tile as float32 [cols], column by column from the words of 16 rows. A token's row is a few KB, so nothing
// here needs to be fast.
void tile_row(const Matrix& m, const std::uint8_t* tile, int r, float* out) {
    const auto number = [](const std::uint8_t* p, auto value) {
        std::memcpy(&value, p, sizeof value);
        return value;
    };
    const auto half = [&](const std::uint8_t* p) {
        alignas(64) std::uint16_t halves[16] = {number(p, std::uint16_t{0})};
        float lanes[16];
        f_store(lanes, f_half(halves));
        return lanes[0];
    };
    const std::size_t row = std::size_t(r);
    if (in_blocks(m.kind)) {
        by_blocks(m.kind, [&]<Kind kind>() {
            widen_blocks<kind>(m, tile, 0, false, [&](int column, F w0, F w1, F w2, F w3) {
                const F four[4] = {w0, w1, w2, w3};
                for (int i = 0; i < 4; ++i) {
                    alignas(64) float lanes[16];
                    f_store(lanes, four[i]);
                    out[column + i] = lanes[r];
                }
            });
        });
        return;
    }
    if (m.quantised()) {
        const int per_line = m.kind == Kind::kInt4 ? 8 : 4;
        const std::size_t codes = std::size_t(m.group / per_line) * 64, group_bytes = codes + 64;
        for (int j = 0; j < m.groups(); ++j) {
            const std::uint8_t* p = tile + std::size_t(j) * group_bytes;
            const float factor = half(p + codes + 2 * row), minimum = half(p + codes + 32 + 2 * row);
            for (int i = 0; i < std::min(m.group, m.cols - j * m.group); ++i) {
                const std::uint8_t byte = p[std::size_t(i / per_line) * 64 + 4 * row + std::size_t(i % 4)];
                const int code = m.kind == Kind::kInt8 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
                out[j * m.group + i] = static_cast<float>(code) * factor + minimum;
            }
        }
        return;
    }
    for (int c = 0; c < m.cols; ++c) {
        const std::size_t at = std::size_t(c);
        if (m.kind == Kind::kFloat32) {
            out[c] = number(tile + at * 64 + 4 * row, 0.0F);
        } else if (m.kind == Kind::kFloat16) {
            out[c] = half(tile + at * 32 + 2 * row);
        } else {
            const std::uint32_t bits = number(tile + at / 2 * 64 + 4 * row + at % 2 * 2, std::uint16_t{0});
            const std::uint32_t wide = bits << 16;
            std::memcpy(out + c, &wide, 4);
        }
    }
}

bool gather(Pool& pool, const GatherOp& op) {
    const Matrix& m = op.matrix;
    each_row(pool, op.t, m.cols * 4, [&](int row) {
        const int granule = op.tokens[row] / m.rows, inside = op.tokens[row] % m.rows;
        const std::uint8_t* tile = op.weights.data + std::size_t(granule) * op.weights.stride + m.offset +
                                   std::size_t(inside / kTileRows) * m.tile_bytes();
        tile_row(m, tile, inside % kTileRows, op.rows + std::ptrdiff_t(row) * m.cols);
    });
    return true;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
