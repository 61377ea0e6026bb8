// 4-bit weights in groups of 32 along K, times activations quantized in the same groups. A group is one integer dot
// product. It is converted and added in fp32, group after group, for any number of rows.
//
// Weights lie in tiles of 16 columns: [tile][group][4][16][4] bytes. Byte (j, column, b) holds element 4 j + b of the
// group in its low bits and element 16 + 4 j + b in its high ones, as q + 8. Scales are [tile][group][16] bfloat16. A
// block of up to 12 rows unpacks a group once for all of its rows.
#include <array>
#include <utility>

#include "call.h"
#include "int_dot.h"
#include "parallel.h"

namespace {

using namespace int_dot;

constexpr int COLUMNS = LANES;
constexpr int GROUP = 32;
constexpr int GROUP_BYTES = COLUMNS * GROUP / 2;
constexpr int TILES = 4;  // tiles that a block of rows passes before the next block: 4 x 64 KiB at K = 8,192

// Bytes to prefetch, because the processor's own prefetching stops at each page. Two cores of a Zen 4, 16384 x 2048: 37
// -> 39 GB/s for one row, 460 -> 614 GOP/s for 8.
constexpr int AHEAD = 4096;

// A row's part of a group of activations, [group][row]: all q first, then scales, then sums.
constexpr int ROW_BYTES = GROUP + 8;

struct Product {
    const uint8_t* tiles;
    const simd::bf16* scales;
    const float* bias;
    int64_t num_rows, num_groups, out_size;
};

template <int R, class T>
void tile_product(const Product& p, int64_t tile, const int8_t* x, int64_t first_row, T* out) {
    const uint8_t* weights = p.tiles + tile * p.num_groups * GROUP_BYTES;
    const simd::bf16* scales = p.scales + tile * p.num_groups * COLUMNS;
    const vi low_bits = simd::splat_i(0x0f0f0f0f);
    vf totals[R] = {};
    for (int64_t group = 0; group < p.num_groups; group++) {
        const int8_t* x_scales = x + R * GROUP;
        const int8_t* x_sums = x_scales + R * 4;
        for (int j = 0; j < 4; j++) __builtin_prefetch(weights + AHEAD + j * 64);
        vi sums[R];
        for (int r = 0; r < R; r++) sums[r] = simd::splat_i(read_i32(x_sums + r * 4));
        for (int j = 0; j < 4; j++) {
            const vi packed = simd::load_i(weights + j * 64);
            const vi low = packed & low_bits, high = (vi)((vu)packed >> 4) & low_bits;
            for (int r = 0; r < R; r++) {
                sums[r] = dot4(sums[r], low, read_i32(x + r * GROUP + j * 4));
                sums[r] = dot4(sums[r], high, read_i32(x + r * GROUP + 16 + j * 4));
            }
        }
        const vf scale = simd::load(scales);
        for (int r = 0; r < R; r++) {
            float x_scale;
            std::memcpy(&x_scale, x_scales + r * 4, sizeof x_scale);
            totals[r] = simd::fma(to_floats(sums[r]), scale * simd::splat(x_scale), totals[r]);
        }
        weights += GROUP_BYTES, scales += COLUMNS, x += R * ROW_BYTES;
    }
    const int64_t column = tile * COLUMNS;
    const int count = int(p.out_size - column < COLUMNS ? p.out_size - column : COLUMNS);
    const vf bias = p.bias ? simd::load_part(p.bias + column, count) : vf{};
    for (int r = 0; r < R; r++) store_first(out + (first_row + r) * p.out_size + column, totals[r] + bias, count);
}

template <class T>
using TileProduct = void (*)(const Product&, int64_t, const int8_t*, int64_t, T*);

// Instances for 1, 2, .. rows, at index rows - 1.
template <class T, int... R>
constexpr std::array<TileProduct<T>, MAX_ROWS> tile_products(std::integer_sequence<int, R...>) {
    return {tile_product<R + 1, T>...};
}
template <class T>
constexpr auto TILE_PRODUCTS = tile_products<T>(std::make_integer_sequence<int, MAX_ROWS>());

template <class T>
void quantize_row(const T* x, int64_t num_groups, int8_t* to, int row, int num_rows) {
    for (int64_t group = 0; group < num_groups; group++, x += GROUP, to += num_rows * ROW_BYTES) {
        const Span span = quantize_span(x, GROUP, to + row * GROUP, GROUP, 0);
        const int32_t offset = -8 * span.sum;
        std::memcpy(to + num_rows * GROUP + row * 4, &span.scale, 4);
        std::memcpy(to + num_rows * (GROUP + 4) + row * 4, &offset, 4);
    }
}

template <class T>
void product(const Product& p, const T* x, T* out, int num_threads) {
    if (p.num_rows == 0) return;
    const RowBlocks blocks(p.num_rows);
    const int64_t row_bytes = p.num_groups * ROW_BYTES, num_tiles = (p.out_size + COLUMNS - 1) / COLUMNS;
    Scratch q(p.num_rows * row_bytes);
    parallel_for(p.num_rows, p.num_rows < ROWS_TO_SHARE ? 1 : num_threads, [&](int64_t row) {
        const int64_t block = blocks.of(row), first = blocks.start(block);
        quantize_row(x + row * p.num_groups * GROUP, p.num_groups, q.bytes + first * row_bytes, int(row - first),
                     blocks.size(block));
    });
    parallel_for((num_tiles + TILES - 1) / TILES, num_threads, [&](int64_t group) {
        const int64_t start = group * TILES;
        for (int64_t block = 0; block < blocks.count; block++)
            for (int64_t tile = start; tile < num_tiles && tile < start + TILES; tile++) {
                const int64_t first = blocks.start(block);
                TILE_PRODUCTS<T>[blocks.size(block) - 1](p, tile, q.bytes + first * row_bytes, first, out);
            }
    });
}

// w[0..32) as scale * (q - 8), 0 <= q < 16, with a small squared error. The element of the largest magnitude becomes
// -7, -7.5, -8 and -8.5 in turn, which gives the scale its sign. The rounded integers have a best scale of their own
// (least squares). The scale that explains most of w is rounded to bfloat16 before the final q are computed. Squared
// error of normal weights, relative to their squares: 0.0066; with max |w| / 7: 0.0094; with 40 scales from 5 to 10:
// 0.0065.
constexpr float TRIED[] = {-7.0f, -7.5f, -8.0f, -8.5f};

inline vi quantize(vf w, vf inverse) {
    const vi q = round_i(w * inverse), lowest = simd::splat_i(-8), highest = simd::splat_i(7);
    const vi raised = q < lowest ? lowest : q;
    return raised > highest ? highest : raised;
}

inline float best_scale(vf low, vf high, float extreme) {
    float scale = 0, most = -1;
    for (const float tried : TRIED) {
        const vf inverse = simd::splat(tried / extreme);
        const vf a = to_floats(quantize(low, inverse)), b = to_floats(quantize(high, inverse));
        const float along = sum_of(simd::fma(low, a, high * b)), square = sum_of(simd::fma(a, a, b * b));
        const float share = along / extreme, explained = share * share / square;
        if (explained > most) most = explained, scale = along / square;
    }
    return scale;
}

template <class T>
void quantize_group(const T* w, uint8_t* q, simd::bf16* scale) {
    constexpr float SMALLEST = 1e-30f;  // smaller ones have reciprocals near the end of fp32: zeros
    const vf low = simd::load(w), high = simd::load(w + LANES);
    const float top = largest_of(simd::max(low, high)), bottom = largest_of(simd::max(-low, -high));
    const float extreme = top >= bottom ? top : -bottom;
    const bool is_finite = sum_of((low - low) + (high - high)) == 0;
    const bool is_usable = is_finite && std::fabs(extreme) >= SMALLEST;
    float chosen = is_usable ? best_scale(low, high, extreme) : is_finite ? 0.0f : NAN;
    simd::bf16 rounded[LANES];
    simd::store(rounded, simd::splat(chosen));
    *scale = rounded[0];
    chosen = simd::to_float(rounded[0]);
    const vf inverse = simd::splat(is_usable && chosen != 0 ? 1.0f / chosen : 0.0f);
    const vi eight = simd::splat_i(8);
    const vb first = __builtin_convertvector(is_usable ? quantize(low, inverse) + eight : eight, vb);
    const vb second = __builtin_convertvector(is_usable ? quantize(high, inverse) + eight : eight, vb);
    std::memcpy(q, &first, LANES);
    std::memcpy(q + LANES, &second, LANES);
}

template <class T>
void quantize_all(const T* weight, int64_t num_groups, uint8_t* q, simd::bf16* scales, int num_threads) {
    parallel_for(num_groups, num_threads, [&](int64_t group) {
        quantize_group(weight + group * GROUP, q + group * GROUP, scales + group);
    });
}

}  // namespace

// weight [out_size, 32 num_groups] of bf16 or fp32 -> q of its shape in 0..15, scales [out_size, num_groups] bf16.
static void linear_int4_quantize(const void* weight, int64_t is_bf16, int64_t out_size, int64_t num_groups, uint8_t* q,
                                 simd::bf16* scales, int64_t num_threads) {
    const int64_t count = out_size * num_groups;
    if (is_bf16)
        quantize_all(static_cast<const simd::bf16*>(weight), count, q, scales, int(num_threads));
    else
        quantize_all(static_cast<const float*>(weight), count, q, scales, int(num_threads));
}
INFERD_EXPORT(linear_int4_quantize)

// q, scales -> tiles [ceil(out_size / 16)][num_groups][256], tile_scales [ceil(out_size / 16)][num_groups][16]; columns
// behind the end are zeros.
static void linear_int4_pack(const uint8_t* q, const simd::bf16* scales, int64_t out_size, int64_t num_groups,
                             uint8_t* tiles, simd::bf16* tile_scales, int64_t num_threads) {
    const int64_t num_tiles = (out_size + COLUMNS - 1) / COLUMNS, in_size = num_groups * GROUP;
    parallel_for(num_tiles, num_threads, [&](int64_t tile) {
        uint8_t* to = tiles + tile * num_groups * GROUP_BYTES;
        simd::bf16* to_scales = tile_scales + tile * num_groups * COLUMNS;
        std::memset(to, 0, num_groups * GROUP_BYTES);
        std::memset(to_scales, 0, num_groups * COLUMNS * sizeof(simd::bf16));
        for (int column = 0; column < COLUMNS && tile * COLUMNS + column < out_size; column++) {
            const uint8_t* from = q + (tile * COLUMNS + column) * in_size;
            const simd::bf16* from_scales = scales + (tile * COLUMNS + column) * num_groups;
            for (int64_t group = 0; group < num_groups; group++) {
                for (int j = 0; j < 4; j++) {
                    const uint8_t* quad = from + group * GROUP + j * 4;
                    const int32_t bytes = read_i32(quad) | read_i32(quad + 16) << 4;
                    std::memcpy(to + group * GROUP_BYTES + j * 64 + column * 4, &bytes, sizeof bytes);
                }
                to_scales[group * COLUMNS + column] = from_scales[group];
            }
        }
    });
}
INFERD_EXPORT(linear_int4_pack)

// out [num_rows, out_size] = x [num_rows, 32 num_groups] W^T + bias, both of bf16 or fp32; bias [out_size] fp32 or null.
static void linear_int4(const void* x, int64_t is_bf16, int64_t num_rows, int64_t num_groups, const uint8_t* tiles,
                        const simd::bf16* scales, const float* bias, int64_t out_size, void* out,
                        int64_t num_threads) {
    const Product p{tiles, scales, bias, num_rows, num_groups, out_size};
    if (is_bf16)
        product(p, static_cast<const simd::bf16*>(x), static_cast<simd::bf16*>(out), int(num_threads));
    else
        product(p, static_cast<const float*>(x), static_cast<float*>(out), int(num_threads));
}
INFERD_EXPORT(linear_int4)
