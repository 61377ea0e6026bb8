// 8-bit weights: their quantization, and their products (int_product.h).
#include "cpu/call.h"
#include "cpu/int_product.h"

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

// q [out_size, in_size] int8 -> tiles, with columns up to a multiple of 32 if activations have one scale a row (an
// x_group_size of 0), else of 16.
static void linear_int8_pack(const uint8_t* q, int64_t out_size, int64_t in_size, int64_t x_group_size, uint8_t* tiles,
                             int64_t num_threads) {
    const int columns = x_group_size ? COLUMNS : ROW_COLUMNS;
    pack<BYTES>(q, out_size, in_size, x_group_size == 16 ? 16 : 32, columns, tiles, int(num_threads));
}
INFERD_EXPORT(linear_int8_pack)

// out [num_rows, out_size] = x [num_rows, in_size] W^T + bias, both of bf16 or fp32. Scales and minimums are of
// `scale_type`, zero points 16 bits; what a layout does not have is null.
static void linear_int8(const void* x, void* out, int64_t num_rows, int64_t is_bf16, int64_t in_size, int64_t out_size,
                        const uint8_t* tiles, const void* scales, int64_t scale_type, const void* zeros,
                        const void* minimums, const float* bias, const int32_t* order, int64_t group_size,
                        int64_t x_group_size, int64_t num_threads) {
    Product p = product_of(num_rows, in_size, out_size, tiles, scales, scale_type, zeros, minimums, bias, order,
                           group_size, x_group_size);
    p.added = ADDED;
    const auto product = x_group_size == 0    ? run<BYTES, 32, ROW_COLUMNS>
                         : x_group_size == 16 ? run<BYTES, 16, COLUMNS>
                                              : run<BYTES, 32, COLUMNS>;
    product(p, x, is_bf16, out, num_threads);
}
INFERD_EXPORT(linear_int8)
