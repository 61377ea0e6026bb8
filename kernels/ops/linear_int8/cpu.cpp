// 8-bit weights: their quantization, and their products (int_product.h).
#include "cpu/call.h"
#include "cpu/int_pack.h"
#include "cpu/int_product.h"
#include "cpu/int_rows.h"

namespace {

using namespace int_product;

template <class T>
inline vf load_some(const T* w, int64_t count) {
    return count >= LANES ? simd::load(w) : simd::load_part(w, int(count));
}

template <class T>
void quantize_group(const T* w, int64_t size, int8_t* q, simd::bf16* scale) {
    constexpr float SMALLEST = 1e-30f;  // a group of smaller weights counts as zeros
    vi bits = {};
    for (int64_t k = 0; k < size; k += LANES) {
        const vi own = (vi)load_some(w + k, size - k) & 0x7fffffff;
        bits = own > bits ? own : bits;  // as integers, NaN's bits exceed those of every number
    }
    const int32_t largest_bits = largest_of(bits);
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    simd::bf16 rounded[LANES];
    simd::store(rounded, simd::splat(largest < SMALLEST ? 0.0f : largest / 127.0f));
    *scale = rounded[0];
    const bool is_usable = largest >= SMALLEST && largest <= 3.402823466e38f;
    const vf inverse = simd::splat(1.0f / simd::to_float(rounded[0]));
    for (int64_t k = 0; k < size; k += LANES) {
        const vi own = is_usable ? round_i(load_some(w + k, size - k) * inverse) : vi{};
        const vb bytes = __builtin_convertvector(own, vb);
        std::memcpy(q + k, &bytes, size - k < LANES ? size - k : LANES);
    }
}

template <class T>
void quantize_all(const T* weight, int64_t num_groups, int64_t size, int8_t* q, simd::bf16* scales, int num_threads) {
    parallel_for(num_groups, num_threads, [&](int64_t group) {
        quantize_group(weight + group * size, size, q + group * size, scales + group);
    });
}

}  // namespace

// weight [num_groups, size] of bf16 or fp32 -> q of its shape, scales [num_groups] bf16.
static void linear_int8_quantize(const void* weight, int64_t is_bf16, int64_t num_groups, int64_t size, int8_t* q,
                                 simd::bf16* scales, int64_t num_threads) {
    if (is_bf16)
        quantize_all(static_cast<const simd::bf16*>(weight), num_groups, size, q, scales, int(num_threads));
    else
        quantize_all(static_cast<const float*>(weight), num_groups, size, q, scales, int(num_threads));
}
INFERD_EXPORT(linear_int8_quantize)

// q [out_size, in_size] int8 -> tiles of `bits`, with columns up to a multiple of 32 if activations have one scale a row
// (an x_group_size of 0 or -1), else of 16. Numbers of 5 and 6 bits begin at `lowest`.
static void linear_int8_pack(const uint8_t* q, int64_t out_size, int64_t in_size, int64_t x_group_size, int64_t bits,
                             int64_t lowest, uint8_t* tiles, int64_t num_threads) {
    const int columns = x_group_size > 0 ? COLUMNS : ROW_COLUMNS;
    const auto packed = bits == 5 ? pack<FIVES> : bits == 6 ? pack<SIXES> : pack<BYTES>;
    packed(q, out_size, in_size, x_group_size == 16 ? 16 : 32, columns, int32_t(-lowest), tiles, int(num_threads));
}
INFERD_EXPORT(linear_int8_pack)

namespace {

Product made(int64_t num_rows, int64_t in_size, int64_t out_size, const uint8_t* tiles, const void* scales,
             int64_t scale_type, const void* zeros, const void* minimums, const uint16_t* block_scales,
             const uint16_t* block_minimums, int64_t block_shift, const float* bias, const int32_t* order,
             int64_t group_size, int64_t x_group_size, int64_t bits, int64_t lowest) {
    Product p = product_of(num_rows, in_size, out_size, tiles, scales, scale_type, zeros, minimums, block_scales,
                           block_minimums, block_shift, bias, order, group_size, x_group_size);
    p.added = bits == 8 ? ADDED : int32_t(-lowest);
    return p;
}

}  // namespace

// out [num_rows, out_size] = x [num_rows, in_size] W^T + bias, both of bf16 or fp32. Scales and minimums are of
// `scale_type`, zero points 16 bits; what a layout does not have is null. Scales and minimums of signed bytes have a
// factor in fp16 for 2^block_shift groups. 5 bits have groups of 32 activations, and 6 bits of 16.
static void linear_int8(const void* x, void* out, int64_t num_rows, int64_t is_bf16, int64_t in_size, int64_t out_size,
                        const uint8_t* tiles, const void* scales, int64_t scale_type, const void* zeros,
                        const void* minimums, const uint16_t* block_scales, const uint16_t* block_minimums,
                        int64_t block_shift, const float* bias, const int32_t* order, int64_t group_size,
                        int64_t x_group_size, int64_t bits, int64_t lowest, int64_t num_threads) {
    const Product p = made(num_rows, in_size, out_size, tiles, scales, scale_type, zeros, minimums, block_scales,
                           block_minimums, block_shift, bias, order, group_size, x_group_size, bits, lowest);
    const auto product = bits == 5            ? run<FIVES, 32, COLUMNS>
                         : bits == 6          ? run<SIXES, 16, COLUMNS>
                         : x_group_size <= 0  ? run<BYTES, 32, ROW_COLUMNS>
                         : x_group_size == 16 ? run<BYTES, 16, COLUMNS>
                                              : run<BYTES, 32, COLUMNS>;
    product(p, x, is_bf16, out, num_threads);
}
INFERD_EXPORT(linear_int8)

// out [num_rows, in_size] = the rows of W with these ids; `rounding` as of `write_rows`. W has groups of activations.
static void linear_int8_rows(const int64_t* ids, void* out, int64_t num_rows, int64_t is_bf16, int64_t in_size,
                             int64_t out_size, const uint8_t* tiles, const void* scales, int64_t scale_type,
                             const void* zeros, const void* minimums, const uint16_t* block_scales,
                             const uint16_t* block_minimums, int64_t block_shift, const float* bias,
                             const int32_t* order, int64_t group_size, int64_t x_group_size, int64_t bits,
                             int64_t lowest, int64_t rounding) {
    const Product p = made(num_rows, in_size, out_size, tiles, scales, scale_type, zeros, minimums, block_scales,
                           block_minimums, block_shift, bias, order, group_size, x_group_size, bits, lowest);
    const auto write = bits == 5            ? write_row<FIVES, 32>
                       : bits == 6          ? write_row<SIXES, 16>
                       : x_group_size == 16 ? write_row<BYTES, 16>
                                            : write_row<BYTES, 32>;
    write_rows(p, ids, out, is_bf16, rounding, write);
}
INFERD_EXPORT(linear_int8_rows)
