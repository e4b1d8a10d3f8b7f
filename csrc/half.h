// Conversion of float16 where no instruction of the processor does it.
#pragma once

#include <cstdint>
#include <cstring>

namespace penstock {

inline float from_half(std::uint16_t h) {
    const std::uint32_t sign = std::uint32_t(h & 0x8000U) << 16, magnitude = h & 0x7fffU;
    std::uint32_t bits;
    if (magnitude >= 0x7c00U) {
        bits = 0x7f800000U | (magnitude & 0x3ffU) << 13;
    } else if (magnitude >= 0x400U) {
        bits = (magnitude << 13) + 0x38000000U;
    } else {  // zero and subnormals: count in units of 2^-24
        const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8F;
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounds to nearest even. The caller has clamped to ±65504.
inline std::uint16_t to_half(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint32_t sign = bits >> 16 & 0x8000U;
    bits &= 0x7fffffffU;
    if (bits > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
    if (bits < 0x38800000U) {  // below 2^-14: adding 1/2 shifts the mantissa into place and rounds it
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5F;
        std::memcpy(&bits, &magnitude, 4);
        return static_cast<std::uint16_t>(sign | (bits - 0x3f000000U));
    }
    bits += 0xc8000fffU + (bits >> 13 & 1U);
    return static_cast<std::uint16_t>(sign | bits >> 13);
}

}  // namespace penstock
