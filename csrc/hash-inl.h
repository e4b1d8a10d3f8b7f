// The checksum of a granule: XXH3 of 64 bits without a seed, written from its public specification
// (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Description (for large inputs)"). XXH3 hashes inputs
// of less than 241 bytes in other ways. They do not occur here: a granule has at least 4096 bytes. Every instruction
// set gives the same number. Included after kernels-inl.h.
//
// There are eight sums of 64 bits. A stripe is 64 bytes, a word for each sum. For each stripe a sum adds two numbers:
// the product of the two halves of (its word XOR a word of the secret), and the word of its neighbour. A block is
// sixteen stripes, each with the secret 8 bytes further on. At the end of a block the sums are scrambled. The input's
// last 64 bytes are always a stripe of their own.
#pragma once

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr std::uint64_t kPrime32[3] = {0x9E3779B1U, 0x85EBCA77U, 0xC2B2AE3DU};
constexpr std::uint64_t kPrime64[5] = {0x9E3779B185EBCA87U, 0xC2B2AE3D27D4EB4FU, 0x165667B19E3779F9U,
                                       0x85EBCA77C2B2AE63U, 0x27D4EB2F165667C5U};
constexpr std::size_t kSums = 8, kStripe = 64, kSecretBytes = 192;
constexpr std::size_t kBlockStripes = (kSecretBytes - kStripe) / 8;

// clang-format off
alignas(64) constexpr std::uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
// clang-format on

// W: as many 64-bit words as a register holds, little-endian, as they lie in memory. w_swap exchanges the words of each
// pair. w_low_product multiplies the low halves of two words.
#if defined(__AVX512F__)
using W = __m512i;
inline W w_load(const void* p) { return _mm512_loadu_si512(p); }
inline void w_store(void* p, W x) { _mm512_storeu_si512(p, x); }
inline W w_add(W a, W b) { return _mm512_add_epi64(a, b); }
inline W w_xor(W a, W b) { return _mm512_xor_si512(a, b); }
template <int kBits>
W w_right(W x) {
    return _mm512_srli_epi64(x, kBits);
}
inline W w_left32(W x) { return _mm512_slli_epi64(x, 32); }
inline W w_swap(W x) { return _mm512_shuffle_epi32(x, _MM_PERM_BADC); }
inline W w_low_product(W a, W b) { return _mm512_mul_epu32(a, b); }
inline W w_set(std::uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
#elif defined(__AVX2__)
using W = __m256i;
inline W w_load(const void* p) { return _mm256_loadu_si256(static_cast<const W*>(p)); }
inline void w_store(void* p, W x) { _mm256_storeu_si256(static_cast<W*>(p), x); }
inline W w_add(W a, W b) { return _mm256_add_epi64(a, b); }
inline W w_xor(W a, W b) { return _mm256_xor_si256(a, b); }
template <int kBits>
W w_right(W x) {
    return _mm256_srli_epi64(x, kBits);
}
inline W w_left32(W x) { return _mm256_slli_epi64(x, 32); }
inline W w_swap(W x) { return _mm256_shuffle_epi32(x, 0x4e); }
inline W w_low_product(W a, W b) { return _mm256_mul_epu32(a, b); }
inline W w_set(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
#else
struct W {
    std::uint64_t v[2];
};
inline W w_load(const void* p) {
    W r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void w_store(void* p, W x) { std::memcpy(p, x.v, sizeof x.v); }
inline W w_add(W a, W b) { return {{a.v[0] + b.v[0], a.v[1] + b.v[1]}}; }
inline W w_xor(W a, W b) { return {{a.v[0] ^ b.v[0], a.v[1] ^ b.v[1]}}; }
template <int kBits>
W w_right(W x) {
    return {{x.v[0] >> kBits, x.v[1] >> kBits}};
}
inline W w_left32(W x) { return {{x.v[0] << 32, x.v[1] << 32}}; }
inline W w_swap(W x) { return {{x.v[1], x.v[0]}}; }
inline W w_low_product(W a, W b) {
    return {{(a.v[0] & 0xffffffff) * (b.v[0] & 0xffffffff), (a.v[1] & 0xffffffff) * (b.v[1] & 0xffffffff)}};
}
inline W w_set(std::uint64_t x) { return {{x, x}}; }
#endif

constexpr std::size_t kWords = sizeof(W) / 8;

inline void hash_stripe(W* sums, const std::byte* stripe, const std::uint8_t* secret) {
    for (std::size_t i = 0; i < kSums / kWords; ++i) {
        const W words = w_load(stripe + i * sizeof(W)), keyed = w_xor(words, w_load(secret + i * sizeof(W)));
        sums[i] = w_add(w_add(sums[i], w_swap(words)), w_low_product(keyed, w_right<32>(keyed)));
    }
}

inline void hash_scramble(W* sums) {
    const W prime = w_set(kPrime32[0]);
    for (std::size_t i = 0; i < kSums / kWords; ++i) {
        const W secret = w_load(kSecret + kSecretBytes - kStripe + i * sizeof(W));
        const W mixed = w_xor(w_xor(sums[i], w_right<47>(sums[i])), secret);
        // A product of 64 and 32 bits: that of the low half, and that of the high half 32 bits further up.
        sums[i] = w_add(w_low_product(mixed, prime), w_left32(w_low_product(w_right<32>(mixed), prime)));
    }
}

std::uint64_t hash(const std::byte* data, std::size_t nbytes) {
    alignas(64) std::uint64_t words[kSums] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                                              kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
    W sums[kSums / kWords];
    for (std::size_t i = 0; i < kSums / kWords; ++i) sums[i] = w_load(words + i * kWords);
    const std::byte* p = data;
    for (std::size_t blocks = (nbytes - 1) / (kBlockStripes * kStripe); blocks > 0; --blocks) {
        for (std::size_t n = 0; n < kBlockStripes; ++n, p += kStripe) hash_stripe(sums, p, kSecret + 8 * n);
        hash_scramble(sums);
    }
    const std::size_t left = static_cast<std::size_t>(data + nbytes - p);  // 1 to 1024 bytes
    for (std::size_t n = 0; n < (left - 1) / kStripe; ++n, p += kStripe) hash_stripe(sums, p, kSecret + 8 * n);
    hash_stripe(sums, data + nbytes - kStripe, kSecret + kSecretBytes - kStripe - 7);
    for (std::size_t i = 0; i < kSums / kWords; ++i) w_store(words + i * kWords, sums[i]);

    std::uint64_t result = nbytes * kPrime64[0], secret[kSums];
    std::memcpy(secret, kSecret + 11, sizeof secret);
    for (std::size_t i = 0; i < kSums; i += 2) {
        __extension__ using Wide = unsigned __int128;
        const Wide product = Wide{words[i] ^ secret[i]} * (words[i + 1] ^ secret[i + 1]);
        result += static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    }
    result = (result ^ (result >> 37)) * 0x165667919E3779F9U;
    return result ^ (result >> 32);
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
