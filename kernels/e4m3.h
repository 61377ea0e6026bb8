// Converts 8-bit floats to and from the types that kernels compute in. e4m3 has a sign, 4 bits of exponent biased by 7,
// 3 of mantissa, no infinity, and NaN if all 7 are set. Widening is exact; narrowing rounds to nearest, ties to even.
#pragma once

#include "simd.h"

namespace simd {

typedef uint8_t vb16 __attribute__((vector_size(16)));
typedef uint8_t vb32 __attribute__((vector_size(32)));
typedef uint16_t vh32 __attribute__((vector_size(64)));

struct e4m3 {
    uint8_t bits;
};

constexpr float E4M3_MAX = 448.0f;

// Sixteen as fp32. An addition changes the bias of the exponent. Below 2^-6 (code 8) a number is its code x 2^-9. These
// and NaN are looked up by their code plus one, if there is an instruction for it.
static inline vf load(const e4m3* p) {
    vb16 bytes;
    std::memcpy(&bytes, p, sizeof bytes);
#if defined(__AVX512F__)
    const __m512i code = _mm512_cvtepi8_epi32((__m128i)bytes);
    const __m512i sign_and_magnitude = _mm512_and_si512(_mm512_slli_epi32(code, 20), _mm512_set1_epi32(0x87f00000));
    const __m512i normal = _mm512_add_epi32(sign_and_magnitude, _mm512_set1_epi32(120 << 23));
    const __m512i place = _mm512_and_si512(_mm512_add_epi32(code, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7f));
    const __mmask16 is_special = _mm512_cmple_epu32_mask(place, _mm512_set1_epi32(8));
    const vf special = {__builtin_nanf(""), 0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f};
    const __m512i found = _mm512_permutexvar_epi32(place, (__m512i)special);
    // (normal & sign) | found
    return (vf)_mm512_mask_ternarylogic_epi32(normal, is_special, found, _mm512_set1_epi32(0x80000000), 0xec);
#elif defined(__F16C__)
    // float16's bias is 8 larger, so the same bits read as float16 are the number / 2^8.
    const __m256i code = _mm256_cvtepi8_epi16((__m128i)bytes), magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
    const __m256i number = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(int16_t(0xbf80)));
    const __m256i half = _mm256_or_si256(number, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7c00)));
    float wide[LANES];
    _mm256_storeu_ps(wide, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_set1_ps(256.0f)));
    _mm256_storeu_ps(wide + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), _mm256_set1_ps(256.0f)));
    return load(wide);
#else
    const vu code = __builtin_convertvector(bytes, vu);
    const vi magnitude = (vi)(code & 0x7f);
    const vf small = __builtin_convertvector(magnitude, vf) * 0x1p-9f;
    const vi normal = (magnitude << 20) + (120 << 23);
    vi bits = magnitude < 8 ? (vi)small : normal;
    bits = magnitude == 0x7f ? splat_i(0x7fc00000) : bits;
    return (vf)(bits | (vi)((code & 0x80) << 24));
#endif
}

// 32 as bfloat16, two in each 32-bit lane, in the same way.
static inline vi load_pairs(const e4m3* p) {
    vb32 bytes;
    std::memcpy(&bytes, p, sizeof bytes);
#if defined(__AVX512BW__)
    const __m512i code = _mm512_cvtepi8_epi16((__m256i)bytes);
    const __m512i sign_and_magnitude = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(int16_t(0x87f0)));
    const __m512i normal = _mm512_add_epi16(sign_and_magnitude, _mm512_set1_epi16(120 << 7));
    const __m512i place = _mm512_and_si512(_mm512_add_epi16(code, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7f));
    const __mmask32 is_special = _mm512_cmple_epu16_mask(place, _mm512_set1_epi16(8));
    const vh32 special = {0x7fc0, 0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i found = _mm512_permutexvar_epi16(place, (__m512i)special);
    // (normal & 0x8000) | found
    return (vi)_mm512_mask_blend_epi16(
        is_special, normal, _mm512_ternarylogic_epi32(normal, found, _mm512_set1_epi16(int16_t(0x8000)), 0xec));
#else
    const vh32 code = __builtin_convertvector(bytes, vh32), magnitude = code & 0x7f, zero = {};
    // Below 2^-6 numbers are multiples of 2^-9. From 2^-7, 2^-8 and 2^-9 on that is a quarter, a half and the whole of
    // these.
    vh32 bits = magnitude < 2 ? magnitude * 0x3b00 : 0x3b80 + ((magnitude - 2) << 6);
    bits = magnitude < 4 ? bits : 0x3c00 + ((magnitude - 4) << 5);
    bits = magnitude < 8 ? bits : (magnitude << 4) + (120 << 7);
    bits = magnitude == 0x7f ? zero + 0x7fc0 : bits;
    return (vi)(bits | ((code & 0x80) << 8));
#endif
}

static inline float to_float(e4m3 x) {
    const e4m3 padded[LANES] = {x};
    return load(padded)[0];
}
static inline uint16_t to_bf16_bits(e4m3 x) {
    uint32_t bits;
    const float wide = to_float(x);
    std::memcpy(&bits, &wide, sizeof bits);
    return uint16_t(bits >> 16);
}

// Larger numbers become +-448; NaN stays NaN.
static inline void store(e4m3* p, vf v) {
    const vi all = (vi)v, magnitude = all & 0x7fffffff;
    const vi bounded = magnitude < (vi)splat(E4M3_MAX) ? magnitude : (vi)splat(E4M3_MAX);
    const vi normal = ((bounded + 0x7ffff + ((bounded >> 20) & 1)) >> 20) - (120 << 3);
    const vf shifted = (vf)bounded + 16384.0f;  // its last bit is 2^-9
    const vi small = (vi)shifted - (vi)splat(16384.0f);
    vi code = (vf)bounded < 0x1p-6f ? small : normal;
    code = magnitude > 0x7f800000 ? splat_i(0x7f) : code;
    const vb16 bytes = __builtin_convertvector((vu)(code | ((all >> 24) & 0x80)), vb16);
    std::memcpy(p, &bytes, sizeof bytes);
}

}  // namespace simd
