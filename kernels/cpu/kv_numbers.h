// Numbers of 8 bits in a KV pool. A group of consecutive elements of a head has a scale in bfloat16. An element is its
// number times the scale of its group, which float32 holds exactly.
//
// A format is a struct with the largest magnitude of its numbers; `dequantize`, which makes sixteen of them elements in
// fp32; and `store`, which rounds sixteen to nearest, ties to even. Only finite numbers are stored: if an element is not
// finite, the scale of its group is NaN, and every element of the group becomes NaN.
#pragma once

#include <algorithm>

#include "cpu/simd.h"

namespace simd {

constexpr int64_t KV_GROUP = 32;  // elements that share a scale; a multiple of LANES

static inline int64_t num_kv_groups(int64_t head_dim) { return (head_dim + KV_GROUP - 1) / KV_GROUP; }

typedef int8_t vc16 __attribute__((vector_size(16)));

// Integers from -127 to 127.
struct int8 {
    int8_t bits;
    static constexpr float MOST = 127.0f;

    static void dequantize(const int8* p, float scale, float* place) {
        vc16 bytes;
        std::memcpy(&bytes, p, sizeof bytes);
#if defined(__AVX512F__)
        const __m512i wide = _mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)bytes);  // GCC would widen by quarters
        simd::store(place, __builtin_convertvector((vi)wide, vf) * scale);
#elif defined(__AVX2__)
        const __m256i first = _mm256_cvtepi8_epi32((__m128i)bytes);
        const __m256i second = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)bytes, (__m128i)bytes));
        _mm256_storeu_ps(place, _mm256_cvtepi32_ps(first) * scale);
        _mm256_storeu_ps(place + 8, _mm256_cvtepi32_ps(second) * scale);
#else
        simd::store(place, __builtin_convertvector(__builtin_convertvector(bytes, vi), vf) * scale);
#endif
    }

    // Magnitudes are below MOST + 0.5.
    static void store(int8* p, vf v) {
        const vi shifted = (vi)(v + 12582912.0f);  // 1.5 * 2^23: the low bits are the rounded integer
        const vc16 bytes = __builtin_convertvector(shifted, vc16);
        std::memcpy(p, &bytes, sizeof bytes);
    }
};

// 8-bit floats: a sign, 4 bits of exponent biased by 7, 3 of mantissa, no infinity. If all 7 bits are set, it is NaN,
// which is not stored.
struct e4m3 {
    uint8_t bits;
    static constexpr float MOST = 448.0f;

    static void dequantize(const e4m3* p, float scale, float* place) {
        vc16 bytes;
        std::memcpy(&bytes, p, sizeof bytes);
#if defined(__F16C__)
        // float16's bias is 8 larger, so the same bits read as float16 are the number / 2^8.
        const __m256i number = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)bytes), 7);
        const __m256i half = _mm256_and_si256(number, _mm256_set1_epi16(int16_t(0xbf80)));
#if defined(__AVX512F__)
        simd::store(place, (vf)_mm512_maskz_cvtph_ps(0xffff, half) * (scale * 256.0f));
#else
        _mm256_storeu_ps(place, _mm256_cvtph_ps(_mm256_castsi256_si128(half)) * (scale * 256.0f));
        _mm256_storeu_ps(place + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) * (scale * 256.0f));
#endif
#else
        const vi code = __builtin_convertvector(bytes, vi), magnitude = code & 0x7f;
        const vf small = __builtin_convertvector(magnitude, vf) * 0x1p-9f;
        const vi normal = (magnitude << 20) + (120 << 23);
        const vi number = magnitude < 8 ? (vi)small : normal;
        simd::store(place, (vf)(number | (code & int32_t(0x80000000))) * scale);
#endif
    }

    // Magnitudes are below 464.
    static void store(e4m3* p, vf v) {
        const vi all = (vi)v, magnitude = all & 0x7fffffff;
        const vi normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
        const vf shifted = (vf)magnitude + 16384.0f;  // its last bit is 2^-9
        const vi small = (vi)shifted - (vi)splat(16384.0f);
        const vi code = (vf)magnitude < 0x1p-6f ? small : normal;
        const vc16 bytes = __builtin_convertvector(code | ((all >> 24) & 0x80), vc16);
        std::memcpy(p, &bytes, sizeof bytes);
    }
};

// Sixteen numbers times `scale`.
template <class S>
static inline void dequantize(const S* numbers, float scale, float* place) {
    S::dequantize(numbers, scale, place);
}
template <class S>
static inline void dequantize(const S* numbers, float scale, bf16* place) {
    float wide[LANES];
    S::dequantize(numbers, scale, wide);
    store(place, load(wide));
}

// `num_heads` consecutive heads in 8 bits, with the scales of their groups, as T.
template <class S, class T>
void dequantize_heads(const void* data, const bf16* scales, T* place, int64_t num_heads, int64_t head_dim) {
    const S* numbers = static_cast<const S*>(data);
    for (int64_t i = 0; i < num_heads; i++) {
        int64_t d = 0;
        for (; d + LANES <= head_dim; d += LANES) dequantize(numbers + d, to_float(scales[uint64_t(d) / KV_GROUP]), place + d);
        if (d < head_dim) {
            S part[LANES] = {};
            T wide[LANES];
            std::memcpy(part, numbers + d, (head_dim - d) * sizeof(S));
            dequantize(part, to_float(scales[uint64_t(d) / KV_GROUP]), wide);
            std::memcpy(place + d, wide, (head_dim - d) * sizeof(T));
        }
        numbers += head_dim, scales += num_kv_groups(head_dim), place += head_dim;
    }
}

// Bits of the largest magnitude. Magnitudes are ordered like their bits, with infinity and then NaN on top.
static inline int32_t largest_magnitude(const vf* vectors, int num) {
    vi largest = {};
    for (int i = 0; i < num; i++) {
        const vi bits = (vi)vectors[i] & splat_i(0x7fffffff);
        largest = bits > largest ? bits : largest;
    }
    int32_t most = 0;
    for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
    return most;
}

// A head as numbers of 8 bits and the scales of its groups. A scale is the largest magnitude of its group divided by the
// largest number, rounded. It is at least 2^-100, so that its inverse is finite, and NaN instead of more than 2^100.
template <class S>
void quantize_head(const float* head, void* data, bf16* scales, int64_t head_dim) {
    constexpr int NUM = KV_GROUP / LANES;
    S* numbers = static_cast<S*>(data);
    for (int64_t first = 0; first < head_dim; first += KV_GROUP) {
        vf group[NUM] = {};
        const int64_t size = std::min(KV_GROUP, head_dim - first);
        std::memcpy(group, head + first, size * sizeof(float));
        const int32_t bits = largest_magnitude(group, NUM);
        float scale;
        std::memcpy(&scale, &bits, sizeof scale);
        scale = std::max(scale * (1.0f / S::MOST), 0x1p-100f);
        const vh rounded = narrow(splat(scale <= 0x1p100f ? scale : __builtin_nanf("")));
        std::memcpy(scales, &rounded, sizeof *scales);
        const vf inverse = splat(1.0f / to_float(*scales++));
        S part[KV_GROUP];
        for (int i = 0; i < NUM; i++) S::store(part + i * LANES, group[i] * inverse);
        std::memcpy(numbers + first, part, size * sizeof(S));
    }
}

// The formats by their numbers in kernels/ops/kv_format.py.
template <class T>
using Dequantize = void(const void* data, const bf16* scales, T* place, int64_t num_heads, int64_t head_dim);
template <class T>
constexpr Dequantize<T>* DEQUANTIZE[] = {nullptr, dequantize_heads<e4m3, T>, dequantize_heads<int8, T>};
constexpr void (*QUANTIZE[])(const float*, void*, bf16*, int64_t) = {nullptr, quantize_head<e4m3>, quantize_head<int8>};

}  // namespace simd
