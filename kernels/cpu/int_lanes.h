// Registers of the integer products: sums of products of bytes, and the numbers of WIDTH columns of a tile.
//
// Instructions multiply unsigned bytes by signed ones. Nibbles are unsigned as they are. For VNNI, bytes and tables
// have 128 added, which is taken off a sum by the sum of the activations. AVX2 multiplies the weights' magnitudes by
// activations that take the weights' signs: 128 x 127 x 2 is below 2^15, so the pairs of `maddubs` are exact. Weights of
// 3, 5 and 6 bits have half of their range added, so they are unsigned too.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/int_dot.h"

// GCC would call these functions, and pass their vectors through memory.
#define ALWAYS_INLINE __attribute__((always_inline))

namespace int_product {

using namespace int_dot;

// 4 bits as they are, 4 bits that number a value of a table, 2, 3, 5 and 6 bits, the last two in bytes, and 8 bits.
enum Form { NIBBLES, TABLE, TWOS, THREES, FIVES, SIXES, SHORT_BYTES, BYTES };
// The last two: 4 bits without a sign, in the low and in the high half of a byte.
enum ScaleType { FP32, BF16, FP16, INT8, LOW_HALF, HIGH_HALF };

constexpr int bits_of(Form f) {
    return f == TWOS ? 2 : f == THREES ? 3 : f == FIVES ? 5 : f == SIXES ? 6 : f >= SHORT_BYTES ? 8 : 4;
}
constexpr bool has_planes(Form f) { return f >= TWOS && f <= SIXES; }  // of low bits, and of the others
constexpr int low_bits(Form f) { return bits_of(f) < 4 ? 2 : 4; }
constexpr int high_bits(Form f) { return bits_of(f) - low_bits(f); }
// Whole lines of a unit: line j has quads j, lines + j, .. from the lowest bits of its bytes on.
constexpr int low_lines(Form f, int unit) { return unit * low_bits(f) / 32; }

// Half of the range of 5 bits, which come in units of 32, and of 6 bits, in units of 16.
constexpr int half_range(int unit) { return unit == 32 ? 16 : 32; }

// Whether a correction has two halves: -half_range times the sum of a unit's even pairs of activations, and of the odd
// pairs.
constexpr bool is_balanced([[maybe_unused]] Form f) {
#if defined(INT_DOT_AVX2)
    return f == FIVES || f == SIXES || f == SHORT_BYTES;
#else
    return false;
#endif
}

#if defined(__AVX512VNNI__)
#define INT_DOT_VNNI
#endif

#if defined(INT_DOT_VNNI)
constexpr int ADDED = 128;  // to bytes and to values of a table
#else
constexpr int ADDED = 0;
#endif

inline ints splat_ints(int32_t x) { return x - ints{}; }
inline floats splat_floats(float x) { return x - floats{}; }
inline ints load_ints(const void* p) {
    ints v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline floats fused(floats a, floats b, floats c) {
#if defined(INT_DOT_AVX2)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return simd::fma(a, b, c);
#endif
}

// pairs[l].low * x.low + pairs[l].high * x.high, of signed 16-bit halves.
inline ints multiply_pairs(ints pairs, int32_t x) {
#if defined(INT_DOT_VNNI)
    return (ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(x));
#elif defined(INT_DOT_AVX2)
    return (ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(x));
#else
    return (pairs << 16 >> 16) * int32_t(int16_t(x)) + (pairs >> 16) * (x >> 16);
#endif
}

// The sum of products of WIDTH columns: four weights of each with the same four activations, as often as wanted.
template <Form F>
struct Sum {
    ints sum;
    void begin(ints start) { sum = start; }
    void add(ints weights, int32_t x) {
#if defined(INT_DOT_VNNI)
        sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(INT_DOT_AVX2)
        __m256i magnitudes = (__m256i)weights, with_signs = _mm256_set1_epi32(x);
        if constexpr (F == TABLE || F == BYTES)
            with_signs = _mm256_sign_epi8(with_signs, magnitudes), magnitudes = _mm256_abs_epi8(magnitudes);
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes, with_signs);
        sum += (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
        for (int j = 0; j < 4; j++) sum += (weights << (24 - 8 * j) >> 24) * int32_t(int8_t(uint32_t(x) >> (8 * j)));
#endif
    }
    ints total(ints) const { return sum; }
};

#if defined(INT_DOT_AVX2)
// Of a unit of nibbles: a 16-bit half adds at most 16 products of 15 x 127, which is below 2^15.
template <>
struct Sum<NIBBLES> {
    __m256i halves;
    void begin(ints) { halves = _mm256_setzero_si256(); }
    void add(ints weights, int32_t x) {
        halves = _mm256_add_epi16(halves, _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(x)));
        asm("" : "+x"(halves));  // or GCC 12 adds the products of a unit as a tree, and has no registers for it
    }
    ints total(ints start) const { return start + (ints)_mm256_madd_epi16(halves, _mm256_set1_epi16(1)); }
};
#endif

struct Table {
    alignas(16) int8_t values[16];

    // The values that the bytes 0..15 of `numbers` choose, plus ADDED.
    ints chosen(ints numbers) const {
#if defined(INT_DOT_VNNI)
        const __m512i all = _mm512_maskz_broadcast_i32x4(0xffff, _mm_load_si128((const __m128i*)values));
        return (ints)_mm512_xor_si512(_mm512_shuffle_epi8(all, (__m512i)numbers), _mm512_set1_epi8(char(ADDED)));
#elif defined(INT_DOT_AVX2)
        const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)values));
        return (ints)_mm256_shuffle_epi8(all, (__m256i)numbers);
#else
        int8_t bytes[sizeof(ints)];
        std::memcpy(bytes, &numbers, sizeof bytes);
        for (int8_t& byte : bytes) byte = values[byte];
        return load_ints(bytes);
#endif
    }
};

// 16 bits each of WIDTH columns, without a sign.
inline ints load_halves(const uint16_t* p) {
    typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));
    halves v;
    std::memcpy(&v, p, sizeof v);
#if defined(INT_DOT_VNNI)
    return (ints)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)v);
#elif defined(INT_DOT_AVX2)
    return (ints)_mm256_cvtepu16_epi32((__m128i)v);
#else
    return __builtin_convertvector(v, ints);
#endif
}

inline floats load_fp16(const uint16_t* p) {
#if defined(INT_DOT_VNNI)
    return (floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif defined(INT_DOT_AVX2)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    // The exponent's bias differs by 112. A product with 2^112 also makes subnormal numbers right, and is exact.
    const ints halves = load_halves(p);
    const floats magnitude = (floats)((halves & 0x7fff) << 13) * 5.192296858534828e33f;
    const ints is_special = (halves & 0x7c00) == 0x7c00;  // infinity and NaN
    return (floats)((ints)magnitude | (is_special & 0x7f800000) | ((halves & 0x8000) << 16));
#endif
}

// Signed bytes of WIDTH columns.
inline ints load_signed(const int8_t* p) {
#if defined(INT_DOT_VNNI)
    return (ints)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
#elif defined(INT_DOT_AVX2)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef int8_t bytes __attribute__((vector_size(WIDTH)));
    bytes v;
    std::memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, ints);
#endif
}

// Scales or minimums of all groups: [tile][group][LANES].
struct Values {
    const void* numbers;  // or null
    ScaleType type;
    const uint16_t* factors;  // of bytes and halves: [tile][block][LANES] fp16, where a block is 2^shift groups
    int shift;

    bool has_factors() const { return type >= INT8; }
    // Whether the group at `index` is the first of a block.
    bool begins_block(int64_t index) const { return has_factors() && !(index / LANES & ((1 << shift) - 1)); }
    floats factor(int64_t index) const {
        return load_fp16(factors + (index / LANES >> shift) * LANES + index % LANES);
    }
    // Those of WIDTH columns, from number `index` on. The product of an integer and a factor is exact.
    floats at(int64_t index, floats factor) const {
        if (type == FP32) return (floats)load_ints(static_cast<const float*>(numbers) + index);
        if (type == INT8)
            return __builtin_convertvector(load_signed(static_cast<const int8_t*>(numbers) + index), floats) * factor;
        if (has_factors()) {
            const ints both = load_signed(static_cast<const int8_t*>(numbers) + index);
            return __builtin_convertvector((type == LOW_HALF ? both : both >> 4) & 15, floats) * factor;
        }
        const uint16_t* halves = static_cast<const uint16_t*>(numbers) + index;
        return type == BF16 ? (floats)(load_halves(halves) << 16) : load_fp16(halves);
    }
    floats at(int64_t index) const { return at(index, has_factors() ? factor(index) : floats{}); }
    // Those of `count` columns, from number `index` on, which begins a group.
    void widen(int64_t index, int64_t count, float* to) const {
        constexpr int VECTORS = LANES / WIDTH;
        for (const int64_t end = index + count; index < end;) {
            int64_t stop = end;  // of what shares its factors
            floats factors[VECTORS] = {};
            if (has_factors()) {
                stop = std::min(end, (((index / LANES >> shift) + 1) << shift) * LANES);
                for (int v = 0; v < VECTORS; v++) factors[v] = factor(index + v * WIDTH);
            }
            for (; index < stop; index += LANES, to += LANES)
                for (int v = 0; v < VECTORS; v++) {
                    const floats value = at(index + v * WIDTH, factors[v]);
                    std::memcpy(to + v * WIDTH, &value, sizeof value);
                }
        }
    }
};

// Zero points of WIDTH columns, in the low halves of the lanes: of nibbles from bytes, of bytes from 16 bits.
template <Form F>
inline ints load_zeros(const void* zeros, int64_t index) {
    if constexpr (F == BYTES) return load_halves(static_cast<const uint16_t*>(zeros) + index) + ADDED;
    typedef uint8_t bytes __attribute__((vector_size(WIDTH)));
    bytes v;
    std::memcpy(&v, static_cast<const uint8_t*>(zeros) + index, sizeof v);
#if defined(INT_DOT_VNNI)
    return (ints)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)v);  // GCC 12 would move byte by byte
#elif defined(INT_DOT_AVX2)
    return (ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)v));
#else
    return __builtin_convertvector(v, ints);
#endif
}

template <class F, int... I>
ALWAYS_INLINE inline void each(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

// Calls f(0) .. f(N - 1) with constants. GCC 12 keeps an array in registers only if its indices are constants before it
// unrolls loops. 2,048 x 2,048 of 4 bits with 8 and 16 rows: 173 and 176 GOP/s with loops, 296 and 301 so; 8 bits with 8
// and 256 rows: 279 and 256, 345 and 347 so (one thread of a Zen 4, 2026-11-25).
template <int N, class F>
ALWAYS_INLINE inline void unrolled(const F& f) {
    each(f, std::make_integer_sequence<int, N>());
}

template <int R, int V, class F>
ALWAYS_INLINE inline void for_each(const F& f) {
    unrolled<R>([&](auto r) ALWAYS_INLINE { unrolled<V>([&](auto v) ALWAYS_INLINE { f(r, v); }); });
}

}  // namespace int_product
