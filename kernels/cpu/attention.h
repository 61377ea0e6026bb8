// The numbers of attention kernels: lanes and their products, and the weights of scores.
//
// A lane is 32 bits: one fp32, or two bfloat16, which are multiplied two by two into fp32.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/simd.h"

namespace simd {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Sixteen lanes and their sums in fp32; products of lanes; the weights e^(scale (score - highest)); their sum, rounded as
// they are stored; 32 weights to memory.
template <class T>
struct Element;

// Most sums of sixteen that are kept at once, so that registers hold them.
#if defined(__AVX512F__)
constexpr int MOST_SUMS = 16;
#else
constexpr int MOST_SUMS = 4;
#endif

template <>
struct Element<float> {
    static constexpr int PER_LANE = 1;
    typedef floats Lanes;
    typedef floats Sums;
    static Lanes load(const void* p) { return load_floats(p); }
    static Sums load_sums(const void* p) { return load_floats(p); }
    static Lanes splat(int32_t lane) {
        float x;
        std::memcpy(&x, &lane, sizeof x);
        return splat_floats(x);
    }
    static Sums multiply(Sums acc, Lanes a, Lanes b) { return mul_add(a, b, acc); }
    struct Weights {
        float scale, highest;
        // The difference comes first, so that the highest score weighs exactly 1, however large it is.
        vf of(vf scores) const { return exp2_below((scores - highest) * (scale * 1.44269504f)); }
    };
    static vf add(vf totals, vf first, vf second) { return totals + first + second; }
    static void store(float* p, vf first, vf second) { simd::store(p, first), simd::store(p + LANES, second); }
};

template <>
struct Element<bf16> {
    static constexpr int PER_LANE = 2;
    typedef vi Lanes;
    typedef vf Sums;
    static Lanes load(const void* p) { return load_i(p); }
    static Sums load_sums(const void* p) { return (vf)load_i(p); }
    static Lanes splat(int32_t lane) { return splat_i(lane); }
    static Sums multiply(vf acc, vi a, vi b) { return dot2(acc, a, b); }
    struct Weights {
        float scale, highest;
        vf of(vf scores) const { return short_exp2((scores - highest) * (scale * 1.44269504f)); }
    };
    static vf add(vf totals, vf first, vf second) { return dot2(totals, narrow(first, second), splat_i(TWO_ONES)); }
    static void store(bf16* p, vf first, vf second) { store_i(p, narrow(first, second)); }
    static constexpr int32_t TWO_ONES = 0x3f803f80;
};

}  // namespace simd
