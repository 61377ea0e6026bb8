// Shared parts of the 8 and 4 bit linear kernels: products of 8-bit integers, and the quantization of activations.
//
// Integer sums are exact in any order. The few floating point operations around them are written with care: every fused
// multiply-add is spelled out, and the compiler fuses none of its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "simd.h"

namespace int_dot {

using simd::LANES;
using simd::vf;
using simd::vi;
using simd::vu;

typedef int8_t vb __attribute__((vector_size(16)));

// acc[l] + sum over j < 4 of weights[4 l + j] * x[j]: weights unsigned bytes, x four signed bytes. Exact.
static inline vi dot4(vi acc, vi weights, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    // maddubs would saturate. Separate 16-bit products of the even and of the odd bytes do not.
    __m256i all = _mm256_set1_epi32(x), half[2], sum[2];
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd = _mm256_srai_epi16(all, 8);
    std::memcpy(half, &weights, sizeof half);
    std::memcpy(sum, &acc, sizeof sum);
    for (int i = 0; i < 2; i++) {
        __m256i low = _mm256_and_si256(half[i], _mm256_set1_epi16(0xff)), high = _mm256_srli_epi16(half[i], 8);
        __m256i products = _mm256_add_epi32(_mm256_madd_epi16(low, even), _mm256_madd_epi16(high, odd));
        sum[i] = _mm256_add_epi32(sum[i], products);
    }
    std::memcpy(&acc, sum, sizeof sum);
    return acc;
#else
    vu bytes = (vu)weights;
    for (int j = 0; j < 4; j++) acc += (vi)((bytes >> (8 * j)) & 255) * int32_t(int8_t(uint32_t(x) >> (8 * j)));
    return acc;
#endif
}

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

struct Span {
    float scale;
    int32_t sum;
};

// x[0..n) to signed bytes, symmetric: q = round(x * (127 / max |x|)), scale = max |x| / 127. Also gives the sum of all
// q. Piece i of `piece` bytes goes to q + i * stride, with zeros behind the end up to a multiple of 16. If x holds NaN
// or infinity, so does the scale and all bytes are zero: every product with them is NaN.
template <class T>
static inline Span quantize_span(const T* x, int64_t n, int8_t* q, int64_t piece, int64_t stride) {
    constexpr float SMALLEST = 1e-30f;  // 127 / max |x| of smaller numbers is near the end of fp32: they count as zeros
    vi largest = {};
    for (int64_t k = 0; k < n; k += LANES) {
        vi bits = (vi)(n - k >= LANES ? simd::load(x + k) : simd::load_part(x + k, int(n - k))) & 0x7fffffff;
        largest = bits > largest ? bits : largest;  // as integers, NaN's bits exceed those of every number
    }
    const int32_t largest_bits = largest_of(largest);
    float bound;
    std::memcpy(&bound, &largest_bits, sizeof bound);
    bool is_usable = bound >= SMALLEST && bound <= 3.402823466e38f;
    vf inverse = simd::splat(127.0f / bound);
    vi total = {};
    for (int64_t k = 0; k < n; k += LANES) {
        vi rounded = {};
        if (is_usable)
            rounded = round_i((n - k >= LANES ? simd::load(x + k) : simd::load_part(x + k, int(n - k))) * inverse);
        total += rounded;
        vb bytes = __builtin_convertvector(rounded, vb);
        std::memcpy(q + k / piece * stride + k % piece, &bytes, sizeof bytes);
    }
    return {bound < SMALLEST ? 0.0f : bound / 127.0f, sum_of(total)};
}

// One thread quantizes fewer rows: waking another takes longer.
constexpr int64_t ROWS_TO_SHARE = 8;

// Splits M rows into blocks of at most MAX_ROWS, as equal as possible. The sums of a block fit in registers.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 4;
#endif

struct RowBlocks {
    int64_t num_rows, count;
    explicit RowBlocks(int64_t rows) : num_rows(rows), count((rows + MAX_ROWS - 1) / MAX_ROWS) {}
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
