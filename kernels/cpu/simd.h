// Vector types and functions of the CPU kernels: sixteen lanes of fp32, bfloat16 in pairs, exp and tanh.
//
// They are GCC's vector types, so one source compiles for AVX-512, AVX2 and anything else. Instructions are named only
// if the compiler would not find them. Every function is a fixed sequence of operations on each lane: a lane's bits
// depend on its own inputs alone.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace simd {

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

static inline vf splat(float x) { return x - vf{}; }
static inline vi splat_i(int32_t x) { return x - vi{}; }

static inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
static inline vi load_i(const void* p) {
    vi v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline void store_i(void* p, vi v) { std::memcpy(p, &v, sizeof v); }
static inline void store(void* p, vi v) { store_i(p, v); }
static inline void store(void* p, vf v) { std::memcpy(p, &v, sizeof v); }

// a * b + c, rounded once.
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    float x[LANES], y[LANES], z[LANES];
    store(x, a), store(y, b), store(z, c);
    for (int i = 0; i < LANES; i += 8)
        _mm256_storeu_ps(z + i, _mm256_fmadd_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i), _mm256_loadu_ps(z + i)));
    return load(z);
#else
    vf result;
    for (int i = 0; i < LANES; i++) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return result;
#endif
}

// The same if the processor can fuse; else rounded twice, because a fused product in software takes a hundred times as
// long.
static inline vf mul_add(vf a, vf b, vf c) {
#if defined(__FMA__)
    return fma(a, b, c);
#else
    return a * b + c;
#endif
}

// Sixteen fp32 in the registers that the processor has. Around named instructions GCC keeps a `vf` in memory if no
// register holds it. Then a fused product takes 10 times as long (Zen 3, 2026-11-23).
#if defined(__FMA__) && !defined(__AVX512F__)
struct floats {
    __m256 low, high;
};
static inline floats load_floats(const void* p) {
    const float* place = static_cast<const float*>(p);
    return {_mm256_loadu_ps(place), _mm256_loadu_ps(place + 8)};
}
static inline void store(void* p, floats v) {
    float* place = static_cast<float*>(p);
    _mm256_storeu_ps(place, v.low), _mm256_storeu_ps(place + 8, v.high);
}
static inline floats splat_floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline floats mul_add(floats a, floats b, floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline floats operator+(floats a, floats b) { return {a.low + b.low, a.high + b.high}; }
static inline floats operator*(floats a, float b) { return {a.low * b, a.high * b}; }
#else
typedef vf floats;
static inline floats load_floats(const void* p) { return (vf)load_i(p); }
static inline floats splat_floats(float x) { return splat(x); }
#endif

static inline vf widen(vh h) {
#if defined(__AVX512F__)
    return (vf)((vu)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h) << 16);  // GCC would widen by halves
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

// Round to nearest, ties to even; NaN stays NaN.
static inline vh narrow(vf v) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu bits = (vu)v;
    vu rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vu is_nan = (vu)(v != v);
    vu chosen = (rounded & ~is_nan) | ((bits | 0x400000) & is_nan);
    return __builtin_convertvector(chosen >> 16, vh);
#endif
}

// 32 bfloat16, those of `first` before those of `second`.
static inline vi narrow(vf first, vf second) {
#if defined(__AVX512BF16__)
    return (vi)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    const vh both[2] = {narrow(first), narrow(second)};
    return load_i(both);
#endif
}

static inline vf load(const bf16* p) {
    vh h;
    std::memcpy(&h, p, sizeof h);
    return widen(h);
}
static inline void store(bf16* p, vf v) {
    vh h = narrow(v);
    std::memcpy(p, &h, sizeof h);
}

// Begins at a cache line: a vector that lies in two lines takes two loads.
template <class T>
struct Aligned {
    typedef T value_type;
    T* allocate(size_t num) { return static_cast<T*>(operator new(num * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* place, size_t) { operator delete(place, std::align_val_t(64)); }
    bool operator==(const Aligned&) const { return true; }
    bool operator!=(const Aligned&) const { return false; }
};

template <class T>
using Buffer = std::vector<T, Aligned<T>>;

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}
// Finite numbers only. The exponent's bias differs by 112, and the product makes the smallest exact too.
static inline float to_float(fp16 x) {
    const uint32_t bits = uint32_t(x.bits & 0x7fff) << 13;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return x.bits & 0x8000 ? f * -0x1p112f : f * 0x1p112f;
}

// The first n < LANES elements, with zeros behind them.
template <class T>
static inline vf load_part(const T* p, int n) {
    T padded[LANES] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
static inline void store_part(T* p, vf v, int n) {
    T padded[LANES];
    store(padded, v);
    std::memcpy(p, padded, n * sizeof(T));
}

static inline vf max(vf a, vf b) { return a > b ? a : b; }

// The sum of the lanes in a fixed tree: always the upper half onto the lower.
static inline float sum(vf v) {
#if defined(__AVX512F__)
    __m256 eight = (__m256)_mm512_maskz_extractf64x4_pd(0xff, (__m512d)v, 0) +
                   (__m256)_mm512_maskz_extractf64x4_pd(0xff, (__m512d)v, 1);
    __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
#else
    float a[LANES];
    store(a, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
#endif
}
static inline float largest(vf v) {
    const vi eight = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}, four = {4, 5, 6, 7, 0, 1, 2, 3};
    v = max(v, __builtin_shuffle(v, eight));
    v = max(v, __builtin_shuffle(v, four));
    const float low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
    return low > high ? low : high;
}

// acc + a.low * b.low + a.high * b.high, with two bfloat16 in each 32-bit lane of a and b.
static inline vf dot2(vf acc, vi a, vi b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    vi high = splat_i(int32_t(0xffff0000));
    acc = mul_add((vf)(a & high), (vf)(b & high), acc);
    return mul_add((vf)(a << 16), (vf)(b << 16), acc);
#endif
}

// e^x with a relative error below 1e-7: x = n ln 2 + r, a polynomial in r (least largest error, with 1 at 0), times
// 2^n. Below -87.3 it is 0, so e^-inf is exactly 0; above 88.3 it is inf; NaN stays NaN.
static inline vf exp(vf x) {
#if defined(__AVX512F__)
    // Scaling overflows by itself; its mask keeps numbers that are not too low. 200 could be any number from 89 to
    // 2^22.
    __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.3f), _CMP_NLT_UQ);
    __mmask16 is_high = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(88.3f), _CMP_GT_OQ);
    vf bounded = (vf)_mm512_mask_mov_ps((__m512)x, is_high, (__m512)splat(200.0f));
#else
    vf bounded = x > 88.3f ? splat(88.3f) : (x < -87.3f ? splat(-87.3f) : x);
#endif
    const float whole = 12582912.0f;  // 1.5 * 2^23: a sum's low bits are the rounded integer
    vf shifted = mul_add(bounded, splat(1.44269504f), splat(whole));
    vf n = shifted - whole;
    vf r = mul_add(n, splat(-0.693359375f), bounded);
    r = mul_add(n, splat(2.12194440e-4f), r);
    vf p = splat(1.3818296e-3f);
    p = mul_add(p, r, splat(8.3685322e-3f));
    p = mul_add(p, r, splat(4.1668292e-2f));
    p = mul_add(p, r, splat(1.6666523e-1f));
    p = mul_add(p, r, splat(4.9999994e-1f));
    p = mul_add(p, r, splat(1.0f));
    p = mul_add(p, r, splat(1.0f));
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_scalef_ps(is_kept, (__m512)p, (__m512)n);
#else
    vf scaled = (vf)((vi)p + ((vi)shifted << 23));
    vf result = x > 88.3f ? splat(__builtin_inff()) : (vf)((vi)scaled & ~(vi)(x < -87.3f));
    return x != x ? x : result;
#endif
}

// 2^x for x <= 0, with a relative error below 1e-7. Below -150 it is 0; NaN stays NaN.
static inline vf exp2_below(vf x) {
#if defined(__AVX512F__)
    const float whole = 12582912.0f;
    const vf bounded = (vf)_mm512_max_ps((__m512)splat(-160.0f), (__m512)x);  // of NaN and a number the second
    const vf n = bounded + whole - whole, r = bounded - n;
    vf p = splat(1.535336206e-4f);
    p = mul_add(p, r, splat(1.339887456e-3f));
    p = mul_add(p, r, splat(9.618437358e-3f));
    p = mul_add(p, r, splat(5.550332471e-2f));
    p = mul_add(p, r, splat(2.402264791e-1f));
    p = mul_add(p, r, splat(6.931472029e-1f));
    p = mul_add(p, r, splat(1.0f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return exp(x * 0.693147181f);
#endif
}

// 2^x with a relative error below 3e-6, for weights that are rounded to 8 bits. Below -150 it is 0; NaN stays NaN.
static inline vf short_exp2(vf x) {
#if defined(__AVX512F__)
    const float whole = 12582912.0f;
    const vf bounded = (vf)_mm512_max_ps((__m512)splat(-160.0f), (__m512)x);  // of NaN and a number the second
    const vf n = bounded + whole - whole, r = bounded - n;
    vf p = splat(9.5828529e-3f);
    p = mul_add(p, r, splat(5.5906426e-2f));
    p = mul_add(p, r, splat(2.4024099e-1f));
    p = mul_add(p, r, splat(6.9312418e-1f));
    p = mul_add(p, r, splat(1.0f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return exp(x * 0.693147181f);
#endif
}

// 1 - 2 / (e^2x + 1): absolute error below 2e-7.
static inline vf tanh(vf x) {
    vf bounded = x > 20.0f ? splat(20.0f) : (x < -20.0f ? splat(-20.0f) : x);
    return 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
}

// 32 elements of 16 bits of a and b, alternating: a's in the low halves of 32-bit lanes, b's in the high ones.
static inline void zip(vi a, vi b, vi& lower, vi& upper) {
    typedef uint16_t v32 __attribute__((vector_size(64)));
    const v32 low = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    lower = (vi)__builtin_shuffle((v32)a, (v32)b, low);
    upper = (vi)__builtin_shuffle((v32)a, (v32)b, low + 16);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Transposes an 8 x 8 block of a matrix with rows of 16.
static inline void transpose_eight(const float* from, float* to) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) b[i] = _mm256_loadu_ps(from + i * LANES);
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(b[i], b[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(b[i], b[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; half++) {
            b[i + 2 * half] = _mm256_shuffle_ps(a[i + half], a[i + 2 + half], 0x44);
            b[i + 2 * half + 1] = _mm256_shuffle_ps(a[i + half], a[i + 2 + half], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * LANES, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * LANES, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}
#endif

// Transposes a 16 x 16 block of 32-bit elements.
static inline void transpose(vi rows[LANES]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    float from[LANES * LANES];
    float* to = reinterpret_cast<float*>(rows);
    std::memcpy(from, rows, sizeof from);
    for (int row = 0; row < LANES; row += 8)
        for (int column = 0; column < LANES; column += 8)
            transpose_eight(from + row * LANES + column, to + column * LANES + row);
#else
    const vi low32 = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const vi high32 = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const vi low64 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const vi high64 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
    vi a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = __builtin_shuffle(rows[i], rows[i + 1], low32);
        a[i + 1] = __builtin_shuffle(rows[i], rows[i + 1], high32);
    }
    for (int i = 0; i < LANES; i += 4) {
        b[i] = __builtin_shuffle(a[i], a[i + 2], low64);
        b[i + 1] = __builtin_shuffle(a[i], a[i + 2], high64);
        b[i + 2] = __builtin_shuffle(a[i + 1], a[i + 3], low64);
        b[i + 3] = __builtin_shuffle(a[i + 1], a[i + 3], high64);
    }
    // b[4 q + c] holds, in 128-bit part p, column 4 p + c of rows 4 q .. 4 q + 3.
    const vi even = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const vi odd = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
    for (int c = 0; c < 4; c++) {
        a[c] = __builtin_shuffle(b[c], b[4 + c], even);
        a[4 + c] = __builtin_shuffle(b[c], b[4 + c], odd);
        a[8 + c] = __builtin_shuffle(b[8 + c], b[12 + c], even);
        a[12 + c] = __builtin_shuffle(b[8 + c], b[12 + c], odd);
    }
    const vi lower = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const vi upper = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    for (int c = 0; c < 4; c++) {
        rows[c] = __builtin_shuffle(a[c], a[8 + c], lower);
        rows[4 + c] = __builtin_shuffle(a[4 + c], a[12 + c], lower);
        rows[8 + c] = __builtin_shuffle(a[c], a[8 + c], upper);
        rows[12 + c] = __builtin_shuffle(a[4 + c], a[12 + c], upper);
    }
#endif
}

}  // namespace simd
