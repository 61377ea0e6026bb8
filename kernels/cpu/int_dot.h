// The quantization of activations and of 8-bit weights to signed bytes, and blocks of rows.
//
// Integer sums are exact in any order. The few floating point operations around them are written with care: every fused
// multiply-add is spelled out, and the compiler fuses none of its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "cpu/simd.h"

namespace int_dot {

using simd::LANES;
using simd::vf;
using simd::vi;
using simd::vu;

typedef int8_t vb __attribute__((vector_size(16)));

// One register of numbers. GCC 12 handles 64 bytes in two registers of AVX2 by way of memory.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define INT_DOT_AVX2
constexpr int WIDTH = 8;
typedef float floats __attribute__((vector_size(32)));
typedef int32_t ints __attribute__((vector_size(32)));
#else
constexpr int WIDTH = LANES;
typedef vf floats;
typedef vi ints;
#endif

// To the nearest integer, ties to even. |x| < 2^31.
static inline vi round_i(vf x) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#else
    vi result;
    for (int l = 0; l < LANES; l++) result[l] = int32_t(std::nearbyint(x[l]));
    return result;
#endif
}

static inline vf to_floats(vi x) { return __builtin_convertvector(x, vf); }

// Load the first n <= LANES elements.
template <class T>
static inline void store_first(T* p, vf v, int n) {
    if (n == LANES)
        simd::store(p, v);
    else
        simd::store_part(p, v, n);
}

static inline int32_t read_i32(const void* p) {
    int32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// Join the lanes of v by halving four times, in a fixed tree.
template <class V, class Join>
static inline auto fold(V v, Join join) {
    v = join(v, __builtin_shuffle(v, vi{8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15}));
    v = join(v, __builtin_shuffle(v, vi{4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7}));
    v = join(v, __builtin_shuffle(v, vi{2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3}));
    return join(v, __builtin_shuffle(v, vi{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}))[0];
}

template <class V>
static inline auto sum_of(V v) {
    return fold(v, [](V a, V b) { return a + b; });
}
template <class V>
static inline auto largest_of(V v) {
    return fold(v, [](V a, V b) { return a > b ? a : b; });
}

#if defined(INT_DOT_AVX2)
inline floats load_floats(const float* p) { return (floats)_mm256_loadu_ps(p); }
inline floats load_floats(const simd::bf16* p) {
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline ints round_ints(floats x) { return (ints)_mm256_cvtps_epi32((__m256)x); }
inline ints largest_of(ints a, ints b) { return (ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
inline void store_bytes(int8_t* to, ints x) {
    const __m256i halves = _mm256_packs_epi32((__m256i)x, (__m256i)x);
    const __m128i low = _mm256_castsi256_si128(halves), high = _mm256_extracti128_si256(halves, 1);
    const __m128i all = _mm_unpacklo_epi64(low, high);
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(all, all));
}
template <class Join>
inline int32_t fold_ints(ints x, Join join) {
    __m128i v = join(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    v = join(v, _mm_unpackhi_epi64(v, v));
    return _mm_cvtsi128_si32(join(v, _mm_shuffle_epi32(v, 1)));
}
inline int32_t sum_of_ints(ints x) {
    return fold_ints(x, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
}
inline int32_t largest_of_ints(ints x) {
    return fold_ints(x, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
}
#else
template <class T>
inline floats load_floats(const T* p) {
    return simd::load(p);
}
inline ints round_ints(floats x) { return round_i(x); }
inline ints largest_of(ints a, ints b) { return a > b ? a : b; }
inline void store_bytes(int8_t* to, ints x) {
    const vb bytes = __builtin_convertvector(x, vb);
    std::memcpy(to, &bytes, sizeof bytes);
}
inline int32_t sum_of_ints(ints x) { return sum_of(x); }
inline int32_t largest_of_ints(ints x) { return largest_of(x); }
#endif

// x[k .. k + WIDTH), with zeros from x[n] on.
template <class T>
inline floats load_until(const T* x, int64_t k, int64_t n) {
    if (n - k >= WIDTH) return load_floats(x + k);
    T padded[WIDTH] = {};
    if (n > k) std::memcpy(padded, x + k, (n - k) * sizeof(T));
    return load_floats(padded);
}

struct Span {
    float scale;
    int32_t sum;
};

constexpr float LEAST_SPAN = 1e-30f;  // 127 / max |x| of smaller numbers is near the end of fp32: they count as zeros

// x[0..n) to signed bytes, symmetric: q = round(x * (127 / max |x|)), scale = max |x| / 127. Also gives the sum of all
// q. Piece i of `piece` bytes, a multiple of 16, goes to q + i * stride, with zeros behind the end of the last. If x
// holds NaN or infinity, so does the scale and all bytes are zero: every product with them is NaN.
template <class T>
static inline Span quantize_span(const T* x, int64_t n, int8_t* q, int64_t piece, int64_t stride) {
    ints largest = {};  // as integers, NaN's bits exceed those of every number
    for (int64_t k = 0; k < n; k += WIDTH) largest = largest_of(largest, (ints)load_until(x, k, n) & 0x7fffffff);
    const int32_t largest_bits = largest_of_ints(largest);
    float bound;
    std::memcpy(&bound, &largest_bits, sizeof bound);
    const bool is_usable = bound >= LEAST_SPAN && bound <= 3.402823466e38f;
    const float inverse = is_usable ? 127.0f / bound : 0.0f;
    ints total = {};
    for (int64_t start = 0; start < n; start += piece, q += stride)
        for (int64_t k = 0; k < piece; k += WIDTH) {
            const ints rounded = is_usable ? round_ints(load_until(x, start + k, n) * inverse) : ints{};
            total += rounded;
            store_bytes(q + k, rounded);
        }
    return {bound < LEAST_SPAN ? 0.0f : bound / 127.0f, sum_of_ints(total)};
}

// The same of N numbers, which stay in registers if the processor has so many: 128 of fp32 take a third of the time.
template <int N, int PIECE, class T>
static inline Span quantize_whole_span(const T* x, int8_t* q, int64_t stride) {
    constexpr int VECTORS = N / WIDTH, IN_PIECE = PIECE / WIDTH;
    floats own[VECTORS];
    ints largest = {}, total = {};
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) {
        own[v] = load_floats(x + v * WIDTH);
        largest = largest_of(largest, (ints)own[v] & 0x7fffffff);
    }
    const int32_t largest_bits = largest_of_ints(largest);
    float bound;
    std::memcpy(&bound, &largest_bits, sizeof bound);
    if (!(bound >= LEAST_SPAN && bound <= 3.402823466e38f)) return quantize_span(x, N, q, PIECE, stride);
    const float inverse = 127.0f / bound;
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) {
        const ints rounded = round_ints(own[v] * inverse);
        total += rounded;
        store_bytes(q + v / IN_PIECE * stride + v % IN_PIECE * WIDTH, rounded);
    }
    return {bound / 127.0f, sum_of_ints(total)};
}

// Numbers of 16 bits as two signed bytes: WIDE * high + low.
constexpr int WIDE = 254;

struct WideSpan {
    Span high, low;
};

// The same to 16 bits: q = round(x * (32258 / max |x|)) = 254 high + low, both of -127..127. Scales are those of the
// bytes.
template <class T>
static inline WideSpan quantize_wide_span(const T* x, int64_t n, int8_t* high, int8_t* low, int64_t piece,
                                          int64_t stride) {
    constexpr float LARGEST = WIDE * 127.0f;
    ints largest = {};
    for (int64_t k = 0; k < n; k += WIDTH) largest = largest_of(largest, (ints)load_until(x, k, n) & 0x7fffffff);
    const int32_t largest_bits = largest_of_ints(largest);
    float bound;
    std::memcpy(&bound, &largest_bits, sizeof bound);
    const bool is_usable = bound >= LEAST_SPAN && bound <= 3.402823466e38f;
    const float inverse = is_usable ? LARGEST / bound : 0.0f;
    ints high_total = {}, low_total = {};
    for (int64_t start = 0; start < n; start += piece, high += stride, low += stride)
        for (int64_t k = 0; k < piece; k += WIDTH) {
            const ints all = is_usable ? round_ints(load_until(x, start + k, n) * inverse) : ints{};
            const ints above = round_ints(__builtin_convertvector(all, floats) * (1.0f / WIDE));
            const ints below = all - above * WIDE;
            high_total += above, low_total += below;
            store_bytes(high + k, above);
            store_bytes(low + k, below);
        }
    const float scale = bound < LEAST_SPAN ? 0.0f : bound / LARGEST;
    return {{scale * WIDE, sum_of_ints(high_total)}, {scale, sum_of_ints(low_total)}};
}

// One thread quantizes fewer rows: waking another takes longer.
constexpr int64_t ROWS_TO_SHARE = 8;

// Splits M rows into blocks of at most `most`, as equal as possible. The sums of MAX_ROWS fit in registers,
// with their parts and totals (int_product.h).
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 8;
#else
constexpr int MAX_ROWS = 4;
#endif

struct RowBlocks {
    int64_t num_rows, count;
    explicit RowBlocks(int64_t rows, int64_t most = MAX_ROWS) : num_rows(rows), count((rows + most - 1) / most) {}
    int64_t start(int64_t block) const { return block * num_rows / count; }
    int size(int64_t block) const { return int(start(block + 1) - start(block)); }
    int64_t of(int64_t row) const { return ((row + 1) * count - 1) / num_rows; }
};

// Bytes on a cache line, freed at the end of the scope.
struct Scratch {
    int8_t* bytes;
    explicit Scratch(int64_t size) : bytes(static_cast<int8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64))) {
        if (bytes == nullptr) std::abort();
    }
    ~Scratch() { std::free(bytes); }
    Scratch(const Scratch&) = delete;
};

}  // namespace int_dot
