// 8-bit weights times activations quantized row by row: integer dot products, one multiplication by both scales.
//
// Weights lie in tiles of 32 columns, by four elements of K: [tile][K / 4][32][4] unsigned bytes, q + 128. A lone row
// reads them as one stream. A block of up to 12 rows keeps its 12 x 32 sums in registers for all of K. A tile stays in
// the second-level cache while all blocks of rows pass.
#include <array>
#include <utility>

#include "call.h"
#include "int_dot.h"
#include "parallel.h"

namespace {

using namespace int_dot;

constexpr int COLUMNS = 32;
constexpr int PIECE = 64;  // bytes of a row that lie together in a block of rows: [K / 64][rows][64]

int64_t pad(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int R>
inline void add_quad(vi (&sums)[R][2], const uint8_t* weights, const int8_t* x) {
    vi left = simd::load_i(weights), right = simd::load_i(weights + 64);
    for (int r = 0; r < R; r++) {
        int32_t quad = read_i32(x + r * PIECE);
        sums[r][0] = dot4(sums[r][0], left, quad);
        sums[r][1] = dot4(sums[r][1], right, quad);
    }
}

struct Rows {
    const int8_t* q;
    const Span* spans;
    int64_t first;
};

struct Product {
    const uint8_t* tiles;
    const float* scales;
    const float* bias;
    int64_t num_rows, in_size, out_size;
};

template <int R, class T>
void tile_product(const Product& p, int64_t tile, const Rows& rows, T* out) {
    const int64_t num_quads = (p.in_size + 3) / 4, num_whole = num_quads / 16;
    const uint8_t* weights = p.tiles + tile * num_quads * 128;
    vi sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = simd::splat_i(-128 * rows.spans[r].sum);
    const int8_t* x = rows.q;
    for (int64_t piece = 0; piece < num_whole; piece++, weights += 16 * 128, x += R * PIECE)
        for (int quad = 0; quad < 16; quad++) add_quad<R>(sums, weights + quad * 128, x + quad * 4);
    for (int quad = 0; quad < num_quads % 16; quad++) add_quad<R>(sums, weights + quad * 128, x + quad * 4);
    for (int half = 0; half < 2; half++) {
        const int64_t column = tile * COLUMNS + half * LANES;
        const int count = int(p.out_size - column < LANES ? p.out_size - column : LANES);
        if (count <= 0) return;
        vf scale = simd::load_part(p.scales + column, count);
        vf bias = p.bias ? simd::load_part(p.bias + column, count) : vf{};
        for (int r = 0; r < R; r++) {
            vf y = simd::fma(to_floats(sums[r][half]) * scale, simd::splat(rows.spans[r].scale), bias);
            store_first(out + (rows.first + r) * p.out_size + column, y, count);
        }
    }
}

template <class T>
using TileProduct = void (*)(const Product&, int64_t, const Rows&, T*);

// Instances for 1, 2, .. rows, at index rows - 1.
template <class T, int... R>
constexpr std::array<TileProduct<T>, MAX_ROWS> tile_products(std::integer_sequence<int, R...>) {
    return {tile_product<R + 1, T>...};
}
template <class T>
constexpr auto TILE_PRODUCTS = tile_products<T>(std::make_integer_sequence<int, MAX_ROWS>());

template <class T>
void product(const Product& p, const T* x, T* out, int num_threads) {
    if (p.num_rows == 0) return;
    const RowBlocks blocks(p.num_rows);
    const int64_t row_bytes = pad(p.in_size, PIECE), num_tiles = (p.out_size + COLUMNS - 1) / COLUMNS;
    Scratch q(p.num_rows * row_bytes), spans_bytes(p.num_rows * int64_t(sizeof(Span)));
    Span* spans = reinterpret_cast<Span*>(spans_bytes.bytes);
    parallel_for(p.num_rows, p.num_rows < ROWS_TO_SHARE ? 1 : num_threads, [&](int64_t row) {
        const int64_t block = blocks.of(row), first = blocks.start(block);
        int8_t* to = q.bytes + first * row_bytes + (row - first) * PIECE;
        spans[row] = quantize_span(x + row * p.in_size, p.in_size, to, PIECE, blocks.size(block) * PIECE);
    });
    parallel_for(num_tiles, num_threads, [&](int64_t tile) {
        for (int64_t block = 0; block < blocks.count; block++) {
            const int64_t first = blocks.start(block);
            const Rows rows{q.bytes + first * row_bytes, spans + first, first};
            TILE_PRODUCTS<T>[blocks.size(block) - 1](p, tile, rows, out);
        }
    });
}

template <class T>
void quantize(const T* weight, int64_t out_size, int64_t in_size, int8_t* q, float* scales, int num_threads) {
    const int64_t padded = pad(in_size, LANES);
    parallel_for(out_size, num_threads, [&](int64_t row) {
        const Scratch row_q(padded);
        scales[row] = quantize_span(weight + row * in_size, in_size, row_q.bytes, padded, 0).scale;
        std::memcpy(q + row * in_size, row_q.bytes, in_size);
    });
}

}  // namespace

// weight [out_size, in_size] of bf16 or fp32 -> q [out_size, in_size] int8, scales [out_size] fp32.
static void linear_int8_quantize(const void* weight, int64_t is_bf16, int64_t out_size, int64_t in_size, int8_t* q,
                                 float* scales, int64_t num_threads) {
    if (is_bf16)
        quantize(static_cast<const simd::bf16*>(weight), out_size, in_size, q, scales, int(num_threads));
    else
        quantize(static_cast<const float*>(weight), out_size, in_size, q, scales, int(num_threads));
}
INFERD_EXPORT(linear_int8_quantize)

// q [out_size, in_size] -> tiles [ceil(out_size / 32)][ceil(in_size / 4)][32][4], with 128 for columns and elements
// behind the ends.
static void linear_int8_pack(const int8_t* q, int64_t out_size, int64_t in_size, uint8_t* tiles, int64_t num_threads) {
    const int64_t num_tiles = (out_size + COLUMNS - 1) / COLUMNS, num_quads = (in_size + 3) / 4;
    parallel_for(num_tiles, num_threads, [&](int64_t tile) {
        uint8_t* to = tiles + tile * num_quads * 128;
        std::memset(to, 128, num_quads * 128);
        for (int column = 0; column < COLUMNS && tile * COLUMNS + column < out_size; column++) {
            const int8_t* from = q + (tile * COLUMNS + column) * in_size;
            for (int64_t k = 0; k < in_size / 4 * 4; k += 4) {
                const int32_t quad = read_i32(from + k) ^ int32_t(0x80808080);
                std::memcpy(to + k * COLUMNS + column * 4, &quad, sizeof quad);
            }
            for (int64_t k = in_size / 4 * 4; k < in_size; k++)
                to[k / 4 * 128 + column * 4 + k % 4] = uint8_t(from[k] + 128);
        }
    });
}
INFERD_EXPORT(linear_int8_pack)

// out [num_rows, out_size] = x [num_rows, in_size] W^T + bias, both of bf16 or fp32; bias [out_size] fp32 or null.
static void linear_int8(const void* x, int64_t is_bf16, int64_t num_rows, int64_t in_size, const uint8_t* tiles,
                        const float* scales, const float* bias, int64_t out_size, void* out, int64_t num_threads) {
    const Product p{tiles, scales, bias, num_rows, in_size, out_size};
    if (is_bf16)
        product(p, static_cast<const simd::bf16*>(x), static_cast<simd::bf16*>(out), int(num_threads));
    else
        product(p, static_cast<const float*>(x), static_cast<float*>(out), int(num_threads));
}
INFERD_EXPORT(linear_int8)
