// 4-bit weights: their quantization in groups of 32, and their products in every layout (int_product.h).
#include "cpu/call.h"
#include "cpu/int_pack.h"
#include "cpu/int_product.h"
#include "cpu/int_rows.h"

namespace {

using namespace int_product;

constexpr int GROUP = 32;

// `quantize_int4` has the method, `reference.py` the same operations in the same order.
constexpr float LOWEST[] = {0.0f, 0.5f}, HIGHEST[] = {15.0f, 15.5f};

struct Pair {
    vf low, high;
};

inline vi cut(vf x) {
    const vi q = round_i(x), lowest = {}, highest = simd::splat_i(15);
    const vi raised = q < lowest ? lowest : q;
    return raised > highest ? highest : raised;
}

struct Line {
    float slope, q_sum;
};

// The line slope * q + constant that explains most of the shares, which are from 0 to 1 and have this sum.
inline Line best_line(const Pair& shares, float w_sum) {
    Line best{0, 0};
    float most = -1;
    for (const float below : LOWEST)
        for (const float highest : HIGHEST) {
            const vf steps = simd::splat(below + highest), down = simd::splat(below);
            const vf a = to_floats(cut(shares.low * steps - down)), b = to_floats(cut(shares.high * steps - down));
            const float q_sum = sum_of(a + b);
            const float along = GROUP * sum_of(a * shares.low + b * shares.high) - q_sum * w_sum;
            const float square = GROUP * sum_of(a * a + b * b) - q_sum * q_sum;
            const float slope = along / square, explained = along * slope;
            if (explained > most) most = explained, best = {slope, q_sum};
        }
    return best;
}

// To fp16, to the nearest, ties to even, and back.
inline float rounded(float x, uint16_t* to) {
    uint32_t bits, sign, half;
    std::memcpy(&bits, &x, sizeof bits);
    sign = bits & 0x80000000, bits ^= sign;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    if (bits >= 0x47800000) {  // 65,536 and more, or NaN
        half = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
        magnitude = half == 0x7c00 ? INFINITY : NAN;
    } else if (bits < 0x38800000) {  // below 2^-14 the step is 2^-24
        half = uint32_t(std::nearbyint(magnitude * 0x1p24f));
        magnitude = half * 0x1p-24f;
    } else {
        bits += 0xfff + ((bits >> 13) & 1), bits &= ~uint32_t(0x1fff);
        half = (bits - 0x38000000) >> 13;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        if (half >= 0x7c00) magnitude = INFINITY;
    }
    *to = uint16_t(half | sign >> 16);
    return sign ? -magnitude : magnitude;
}

template <class T>
void quantize_group(const T* w, uint8_t* q, uint16_t* scale, uint16_t* minimum) {
    constexpr float SMALLEST = 1e-30f;  // of a narrower group all weights become its minimum
    const Pair own{simd::load(w), simd::load(w + LANES)};
    const bool is_number = sum_of((own.low - own.low) + (own.high - own.high)) == 0;
    const float bottom = -largest_of(simd::max(-own.low, -own.high));
    const float width = is_number ? largest_of(simd::max(own.low, own.high)) - bottom : NAN;
    const bool is_finite = width - width == 0, is_usable = is_finite && width >= SMALLEST;
    const vf base = simd::splat(bottom), share = simd::splat(1.0f / width);
    const Pair shares{(own.low - base) * share, (own.high - base) * share};
    const float w_sum = sum_of(shares.low + shares.high);
    const Line line = is_usable ? best_line(shares, w_sum) : Line{0, 0};
    const float chosen = rounded(is_usable ? line.slope * width : is_finite ? 0.0f : NAN, scale);
    const float above = is_usable ? (w_sum * width - line.q_sum * chosen) * (1.0f / GROUP) : 0.0f;
    const vf lowest = simd::splat(rounded(is_finite ? above + bottom : NAN, minimum));
    const bool has_scale = is_usable && chosen > 0 && chosen <= 65504;
    const vf inverse = simd::splat(1.0f / chosen);
    const vb first = __builtin_convertvector(has_scale ? cut((own.low - lowest) * inverse) : vi{}, vb);
    const vb second = __builtin_convertvector(has_scale ? cut((own.high - lowest) * inverse) : vi{}, vb);
    std::memcpy(q, &first, LANES);
    std::memcpy(q + LANES, &second, LANES);
}

template <class T>
void quantize_all(const T* weight, int64_t num_groups, uint8_t* q, uint16_t* scales, uint16_t* minimums,
                  int num_threads) {
    parallel_for(num_groups, num_threads, [&](int64_t group) {
        quantize_group(weight + group * GROUP, q + group * GROUP, scales + group, minimums + group);
    });
}

}  // namespace

// weight [32 num_groups] of bf16 or fp32 -> q of its shape in 0..15, scales and minimums [num_groups] fp16.
static void linear_int4_quantize(const void* weight, int64_t is_bf16, int64_t num_groups, uint8_t* q, uint16_t* scales,
                                uint16_t* minimums, int64_t num_threads) {
    if (is_bf16)
        quantize_all(static_cast<const simd::bf16*>(weight), num_groups, q, scales, minimums, int(num_threads));
    else
        quantize_all(static_cast<const float*>(weight), num_groups, q, scales, minimums, int(num_threads));
}
INFERD_EXPORT(linear_int4_quantize)

// q [out_size, in_size] in 0..15 -> tiles of `bits`, with columns up to a multiple of 16. Numbers begin at `lowest`.
static void linear_int4_pack(const uint8_t* q, int64_t out_size, int64_t in_size, int64_t x_group_size, int64_t bits,
                             int64_t lowest, uint8_t* tiles, int64_t num_threads) {
    const auto packed = bits == 2 ? pack<TWOS> : bits == 3 ? pack<THREES> : pack<NIBBLES>;
    packed(q, out_size, in_size, x_group_size, COLUMNS, int32_t(-lowest), tiles, int(num_threads));
}
INFERD_EXPORT(linear_int4_pack)

namespace {

Product made(int64_t num_rows, int64_t in_size, int64_t out_size, const uint8_t* tiles, const void* scales,
             int64_t scale_type, const void* zeros, const void* minimums, const uint16_t* block_scales,
             const uint16_t* block_minimums, int64_t block_shift, const float* bias, const int32_t* order,
             int64_t group_size, int64_t x_group_size, int64_t lowest, const int8_t* table, double worth) {
    Product p = product_of(num_rows, in_size, out_size, tiles, scales, scale_type, zeros, minimums, block_scales,
                           block_minimums, block_shift, bias, order, group_size, x_group_size);
    p.added = table ? ADDED : minimums ? 0 : int32_t(8 - lowest), p.worth = float(worth);
    if (table) std::memcpy(p.table.values, table, sizeof p.table.values);
    return p;
}

}  // namespace

// out [num_rows, out_size] = x [num_rows, in_size] W^T + bias, both of bf16 or fp32. Scales and minimums are of
// `scale_type`, zero points bytes; what a layout does not have is null. Scales and minimums of signed bytes have a
// factor in fp16 for 2^block_shift groups. 2 and 3 bits have groups of 16 activations. A table has 16 values in
// multiples of `worth`.
static void linear_int4(const void* x, void* out, int64_t num_rows, int64_t is_bf16, int64_t in_size, int64_t out_size,
                        const uint8_t* tiles, const void* scales, int64_t scale_type, const void* zeros,
                        const void* minimums, const uint16_t* block_scales, const uint16_t* block_minimums,
                        int64_t block_shift, const float* bias, const int32_t* order, int64_t group_size,
                        int64_t x_group_size, int64_t bits, int64_t lowest, const int8_t* table, double worth,
                        int64_t num_threads) {
    const Product p = made(num_rows, in_size, out_size, tiles, scales, scale_type, zeros, minimums, block_scales,
                           block_minimums, block_shift, bias, order, group_size, x_group_size, lowest, table, worth);
    const auto product = bits == 2            ? run<TWOS, 16, COLUMNS>
                         : bits == 3          ? run<THREES, 16, COLUMNS>
                         : x_group_size == 16 ? table ? run<TABLE, 16, COLUMNS> : run<NIBBLES, 16, COLUMNS>
                         : table              ? run<TABLE, 32, COLUMNS>
                                              : run<NIBBLES, 32, COLUMNS>;
    product(p, x, is_bf16, out, num_threads);
}
INFERD_EXPORT(linear_int4)

// out [num_rows, in_size] = the rows of W with these ids; `rounding` as of `write_rows`.
static void linear_int4_rows(const int64_t* ids, void* out, int64_t num_rows, int64_t is_bf16, int64_t in_size,
                             int64_t out_size, const uint8_t* tiles, const void* scales, int64_t scale_type,
                             const void* zeros, const void* minimums, const uint16_t* block_scales,
                             const uint16_t* block_minimums, int64_t block_shift, const float* bias,
                             const int32_t* order, int64_t group_size, int64_t x_group_size, int64_t bits,
                             int64_t lowest, const int8_t* table, double worth, int64_t rounding) {
    const Product p = made(num_rows, in_size, out_size, tiles, scales, scale_type, zeros, minimums, block_scales,
                           block_minimums, block_shift, bias, order, group_size, x_group_size, lowest, table, worth);
    const auto write = bits == 2            ? write_row<TWOS, 16>
                       : bits == 3          ? write_row<THREES, 16>
                       : x_group_size == 16 ? table ? write_row<TABLE, 16> : write_row<NIBBLES, 16>
                       : table              ? write_row<TABLE, 32>
                                            : write_row<NIBBLES, 32>;
    write_rows(p, ids, out, is_bf16, rounding, write);
}
INFERD_EXPORT(linear_int4_rows)
