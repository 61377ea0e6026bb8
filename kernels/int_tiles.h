// Products of int_product.h for many rows, by AMX. The integers are the same, so all bits are.
//
// A tile product multiplies up to 16 rows by 16 columns, 16 or 32 inputs at a time: as many as share a scale of
// activations. Its sums go through memory (the first cache) to the vector registers, which apply the scales. The
// weights of a tile are unpacked once for all rows, to signed bytes from which the zero points are taken off. So
// `Rows::corrections` are not needed.
#pragma once

#include "amx_tiles.h"

#if HAS_TILES

namespace int_product {

// Fewer rows are faster by VNNI.
constexpr int64_t LEAST_ROWS_OF_TILES = 24;
constexpr int SUMS = 4;  // tiles of sums, 0 to 3, that are computed at once

// One step of `multiply` for the tile SUM of sums.
#define INFERD_ADD_UNITS(SUM, X, WEIGHTS)                                                              \
    if (SUM < count) {                                                                                 \
        _tile_zero(SUM);                                                                               \
        for (int64_t unit = 0; unit < units; unit++, x += x_step, weights += weights_step) {           \
            _tile_loadd(X, x, U);                                                                      \
            _tile_loadd(WEIGHTS, weights, stride);                                                     \
            _tile_dpbssd(SUM, X, WEIGHTS);                                                             \
        }                                                                                              \
    }

// `count` sums, each of the products of `units`. x is [unit][row][U], weights [unit][U / 4][columns][4]. All products
// come before the first sum is stored, or they would wait for each other.
template <int U>
inline void multiply(const int8_t* x, int64_t x_step, const uint8_t* weights, int64_t weights_step, int64_t stride,
                     int64_t units, int count, ints (*to)[tiles::MAX_ROWS]) {
    INFERD_ADD_UNITS(0, 4, 5)
    INFERD_ADD_UNITS(1, 6, 7)
    INFERD_ADD_UNITS(2, 4, 5)
    INFERD_ADD_UNITS(3, 6, 7)
    _tile_stored(0, to[0], 64);
    if (count > 1) _tile_stored(1, to[1], 64);
    if (count > 2) _tile_stored(2, to[2], 64);
    if (count > 3) _tile_stored(3, to[3], 64);
}
#undef INFERD_ADD_UNITS

template <int U>
inline tiles::Shape shape_of(int num_rows) {
    tiles::Shape shape;
    for (int sum = 0; sum < SUMS; sum++) shape.set(sum, num_rows);
    for (const int x : {4, 6}) shape.set(x, num_rows), shape.row_bytes[x] = U;
    for (const int weights : {5, 7}) shape.set(weights, U / 4);
    return shape;
}

// Bytes of 16 columns: [unit][U / 4][columns][4], of which each line of four inputs begins `stride` after the last.
struct Columns {
    const uint8_t* bytes;
    int64_t stride;
    int64_t index;  // of the scales of the first group
};

template <bool HAS_MINIMUMS, int G>
inline void add_groups(const Product& p, const ints (&sums)[SUMS][tiles::MAX_ROWS], int64_t index, int count,
                       const float* scales, const float* x_parts, int num_rows, floats* totals) {
    floats w_scales[SUMS / G], minimums[SUMS / G];
    for (int g = 0; g < count; g++) {
        w_scales[g] = load_values(p.scales, p.type, index + g * LANES);
        if (HAS_MINIMUMS) minimums[g] = load_values(p.minimums, p.type, index + g * LANES);
    }
    for (int r = 0; r < num_rows; r++) {
        floats total = totals[r];
        for (int g = 0; g < count; g++) {
            floats part = {};
            for (int i = g * G; i < g * G + G; i++)
                part = fused(__builtin_convertvector(sums[i][r], floats), splat_floats(scales[i * num_rows + r]), part);
            total = fused(part, w_scales[g], total);
            if (HAS_MINIMUMS) total = fused(minimums[g], splat_floats(x_parts[g * num_rows + r]), total);
        }
        totals[r] = total;
    }
}

// Not a multiple of 4 KiB: the processor would take loads from one for loads of what is being stored to the other.
struct Sums {
    ints sums[SUMS][tiles::MAX_ROWS], unused[SUMS * tiles::MAX_ROWS / 2];
};

// The product of a block of rows with 16 columns, whose groups of weights have G sums each. The tiles compute the next
// sums while the vector registers add the last ones.
template <int U, int G>
void block_product(const Product& p, const Columns& of, const Rows& rows, int num_rows, floats* totals) {
    const int64_t units = p.x_group_size / U, x_step = num_rows * U, weights_step = U / 4 * of.stride;
    Sums both[2];
    const auto begin = [&](int64_t x_group) {
        const int64_t left = p.num_x_groups - x_group, unit = x_group * units;
        if (left > 0)
            multiply<U>(rows.q + unit * x_step, x_step, of.bytes + unit * weights_step, weights_step, of.stride, units,
                        int(left < SUMS ? left : SUMS), both[x_group / SUMS % 2].sums);
    };
    begin(0);
    for (int64_t x_group = 0, group = 0; x_group < p.num_x_groups; x_group += SUMS, group += SUMS / G) {
        begin(x_group + SUMS);
        const int64_t left = (p.num_x_groups - x_group) / G;
        const int count = left < SUMS / G ? int(left) : SUMS / G;
        const auto add = p.minimums ? add_groups<true, G> : add_groups<false, G>;
        add(p, both[x_group / SUMS % 2].sums, of.index + group * LANES, count, rows.scales + x_group * num_rows,
            rows.parts + group * num_rows, num_rows, totals);
    }
}

// The same for groups of any number of sums.
template <int U>
void block_product_of_long_groups(const Product& p, const Columns& of, const Rows& rows, int num_rows, floats* totals) {
    const int64_t units = p.x_group_size / U, x_step = num_rows * U, weights_step = U / 4 * of.stride;
    for (int64_t x_group = 0, group = 0; group < p.num_groups; group++) {
        const int64_t index = of.index + group * LANES;
        floats parts[tiles::MAX_ROWS] = {};
        for (int64_t i = 0; i < p.x_groups_in_group; i++, x_group++) {
            ints sums[1][tiles::MAX_ROWS];
            multiply<U>(rows.q + x_group * units * x_step, x_step, of.bytes + x_group * units * weights_step,
                        weights_step, of.stride, units, 1, sums);
            for (int r = 0; r < num_rows; r++) {
                const int64_t at = x_group * num_rows + r;
                parts[r] = fused(__builtin_convertvector(sums[0][r], floats), splat_floats(rows.scales[at]), parts[r]);
            }
        }
        for (int r = 0; r < num_rows; r++) {
            floats total[1][1] = {{totals[r]}};
            add_group<1, 1>(p, index, total, {{parts[r]}}, rows.parts + group * num_rows + r);
            totals[r] = total[0][0];
        }
    }
}

using BlockProduct = void (*)(const Product&, const Columns&, const Rows&, int, floats*);

template <int U>
BlockProduct block_product_for(int64_t x_groups_in_group) {
    switch (x_groups_in_group) {
        case 1: return block_product<U, 1>;
        case 2: return block_product<U, 2>;
        case 4: return block_product<U, 4>;
        default: return block_product_of_long_groups<U>;
    }
}

// The weights of a tile as signed bytes: [unit][U / 4][columns][4]. Zero points must leave them in 8 bits.
template <Form F, int U, int NUM_COLUMNS>
void unpack(const Product& p, const uint8_t* weights, int64_t index, uint8_t* bytes) {
    constexpr int LINES = NUM_COLUMNS / LANES * U / (F == BYTES ? 4 : 8);  // of 64 bytes that are read for a unit
    const int64_t units_in_group = p.group_size / U;
    for (int64_t unit = 0; unit < p.num_units; unit++, weights += LINES * 64) {
        ints zeros = splat_ints(F == NIBBLES ? p.added * 0x01010101 : 0);
        if (F == NIBBLES && p.zeros) zeros = load_zeros<F>(p.zeros, index + unit / units_in_group * LANES) * 0x01010101;
        for (int line = 0; line < LINES; line++) {
            __builtin_prefetch(weights + line * 64 + AHEAD);
            const ints read = load_ints(weights + line * 64);
            if (F == BYTES) {
                const ints flipped = read ^ splat_ints(int32_t(ADDED * 0x01010101u));
                std::memcpy(bytes, &flipped, 64), bytes += 64;
                continue;
            }
            for (int half = 0; half < 2; half++) {
                ints numbers = (half ? read >> 4 : read) & splat_ints(0x0f0f0f0f);
                if (F == TABLE) numbers = p.table.chosen(numbers) ^ splat_ints(int32_t(ADDED * 0x01010101u));
                numbers = (ints)_mm512_sub_epi8((__m512i)numbers, (__m512i)zeros);
                std::memcpy(bytes + half * LINES * 64, &numbers, 64);
            }
            bytes += 64;
        }
        if (F != BYTES) bytes += LINES * 64;
    }
}

// Whether products of so many rows are computed here. Bytes less zero points have 9 bits.
template <Form F>
bool by_tiles(const Product& p) {
    return p.num_rows >= LEAST_ROWS_OF_TILES && (F != BYTES || p.zeros == nullptr);
}

// Multiplies all rows by one tile, which has NUM_COLUMNS columns.
template <Form F, int U, int NUM_COLUMNS>
void product_by_tiles(const Product& p, const RowBlocks& blocks, int8_t* bytes, int64_t tile, void* out, bool is_bf16) {
    constexpr int VECTORS = NUM_COLUMNS / LANES;
    const auto product = block_product_for<U>(p.x_groups_in_group);
    const int64_t index = tile * p.num_groups * NUM_COLUMNS;
    const Scratch unpacked(p.num_units * NUM_COLUMNS * U);
    uint8_t* weights = reinterpret_cast<uint8_t*>(unpacked.bytes);
    unpack<F, U, NUM_COLUMNS>(p, p.tiles + tile * p.num_units * NUM_COLUMNS * U / (F == BYTES ? 1 : 2), index, weights);
    tiles::Tiles registers;
    int shaped = 0;
    for (int64_t block = 0; block < blocks.count; block++) {
        const int num_rows = blocks.size(block);
        const int64_t first = blocks.start(block);
        const Rows rows(p, bytes, first, num_rows);
        if (num_rows != shaped) registers.set(shape_of<U>(num_rows)), shaped = num_rows;
        for (int v = 0; v < VECTORS; v++) {
            floats totals[tiles::MAX_ROWS][1][1] = {};
            product(p, {weights + v * 64, NUM_COLUMNS * 4, index + v * LANES}, rows, num_rows, &totals[0][0][0]);
            const int64_t column = tile * NUM_COLUMNS + v * LANES;
            for (int r = 0; r < num_rows; r++) {
                if (is_bf16)
                    store_tile<1, 1>(p, column, first + r, totals[r], static_cast<simd::bf16*>(out));
                else
                    store_tile<1, 1>(p, column, first + r, totals[r], static_cast<float*>(out));
            }
        }
    }
}

}  // namespace int_product
#endif
