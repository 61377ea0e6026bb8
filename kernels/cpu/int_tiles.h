// Products of int_product.h for many rows, by AMX. The integers are the same, so all bits are.
//
// A tile product multiplies up to 16 rows by 16 columns, 16 or 32 inputs at a time: as many as share a scale of
// activations, at most 32. Its sums go through memory (the first cache) to the vector registers, which apply the scales. The
// weights of a tile are unpacked once for all rows, to signed bytes from which the zero points are taken off. So
// `Rows::corrections` are not needed.
#pragma once

#include "cpu/amx_product.h"

#if HAS_TILES
#include <vector>

namespace int_product {

// VNNI is faster for fewer rows.
constexpr int64_t LEAST_ROWS_OF_TILES = 13;
constexpr int CHAINS = 4;  // of products that are added to sums, if more than one makes a sum: each waits for its last

// -- registers -----------------------------------------------------------------------------------------------------

// A vector for each row. GCC 12 keeps an array of 16 of them in memory.
template <int R>
struct Registers {
    floats first = {};
    Registers<R - 1> rest;
};
template <>
struct Registers<0> {};

// Calls f(vector, row) for each row.
template <class F>
[[gnu::always_inline]] inline void each(Registers<0>&, const F&, int) {}
template <int R, class F>
[[gnu::always_inline]] inline void each(Registers<R>& rows, const F& f, int row = 0) {
    f(rows.first, row);
    each(rows.rest, f, row + 1);
}

// -- sums ----------------------------------------------------------------------------------------------------------

using Sums = ints[tiles::MAX_ROWS];  // of 16 columns by row

// Bytes of 16 columns: [unit][U / 4][columns][4], of which each line of four inputs begins `stride` after the last.
struct Columns {
    const uint8_t* bytes;
    int64_t stride;
    int64_t index;  // of the scales of the first group
};

template <int U>
inline tiles::Shape shape_of(int num_rows) {
    tiles::Shape shape;
    for (int chain = 0; chain < CHAINS; chain++) shape.set(chain, num_rows);
    for (const int x : {4, 6}) shape.set(x, num_rows), shape.row_bytes[x] = U;
    for (const int weights : {5, 7}) shape.set(weights, U / 4);
    return shape;
}

// The sums of one unit's products. x is [row][U].
template <int U>
inline void multiply(const int8_t* x, const uint8_t* weights, int64_t stride, Sums& to) {
    _tile_zero(0);
    _tile_loadd(4, x, U);
    _tile_loadd(5, weights, stride);
    _tile_dpbssd(0, 4, 5);
    _tile_stored(0, to, 64);
}

#define INFERD_ADD_UNIT(CHAIN, X, WEIGHTS)                     \
    if (unit + CHAIN < units) {                                \
        _tile_loadd(X, x + CHAIN * x_step, U);                 \
        _tile_loadd(WEIGHTS, weights + CHAIN * step, stride);  \
        _tile_dpbssd(CHAIN, X, WEIGHTS);                       \
    }
// Those of many units, in chains whose sums are to be added.
template <int U>
inline void multiply(const int8_t* x, int64_t x_step, const uint8_t* weights, int64_t stride, int64_t units,
                     Sums (&to)[CHAINS]) {
    const int64_t step = U / 4 * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t unit = 0; unit < units; unit += CHAINS, x += CHAINS * x_step, weights += CHAINS * step) {
        INFERD_ADD_UNIT(0, 4, 5)
        INFERD_ADD_UNIT(1, 6, 7)
        INFERD_ADD_UNIT(2, 4, 5)
        INFERD_ADD_UNIT(3, 6, 7)
    }
    _tile_stored(0, to[0], 64);
    _tile_stored(1, to[1], 64);
    _tile_stored(2, to[2], 64);
    _tile_stored(3, to[3], 64);
}
#undef INFERD_ADD_UNIT

// -- a block of rows by 16 columns ---------------------------------------------------------------------------------

template <bool HAS_MINIMUMS>
struct GroupScales {
    floats scales, minimums = {};
    GroupScales(const Product& p, int64_t index) : scales(p.scales.at(index)) {
        if (HAS_MINIMUMS) minimums = p.minimums.at(index);
    }
    void add(floats part, const float& x_part, floats& total) const {
        total = fused(part, scales, total);
        if (HAS_MINIMUMS) total = fused(minimums, splat_floats(x_part), total);
    }
};

inline floats scaled(ints sums, float scale, floats part) {
    return fused(__builtin_convertvector(sums, floats), splat_floats(scale), part);
}

// Each group of weights has G groups of activations, of one unit each. The tiles compute the next group's sums while the
// vector registers add the last one's.
template <int U, int R, int G, bool HAS_MINIMUMS>
void block_product(const Product& p, const Columns& of, const Rows& rows, floats* out) {
    const int64_t step = U / 4 * of.stride;
    alignas(64) Sums sums[2][G];
    Registers<R> totals;
    for (int64_t group = 0; group <= p.num_groups; group++) {
        if (group < p.num_groups)
            for (int i = 0; i < G; i++)
                multiply<U>(rows.q + (group * G + i) * R * U, of.bytes + (group * G + i) * step, of.stride,
                            sums[group % 2][i]);
        tiles::wait_for_stores();
        if (group == 0) continue;
        const int64_t last = group - 1;
        const GroupScales<HAS_MINIMUMS> scales(p, of.index + last * LANES);
        const float *x_scales = rows.scales + last * G * R, *x_parts = rows.parts + last * R;
        const auto& own = sums[last % 2];
        each(totals, [&](floats& total, int r) {
            floats part = {};
            for (int i = 0; i < G; i++) part = scaled(own[i][r], x_scales[i * R + r], part);
            scales.add(part, x_parts[r], total);
        });
    }
    each(totals, [&](const floats& total, int r) { out[r] = total; });
}

// The same for groups of any size.
template <int U, int R, bool HAS_MINIMUMS>
void block_product_of_long_groups(const Product& p, const Columns& of, const Rows& rows, floats* out) {
    const int64_t units = p.x_group_size / U, step = U / 4 * of.stride * units;
    alignas(64) Sums sums[CHAINS];
    Registers<R> totals;
    for (int64_t group = 0, x_group = 0; group < p.num_groups; group++) {
        Registers<R> parts;
        for (int64_t i = 0; i < p.x_groups_in_group; i++, x_group++) {
            const int8_t* x = rows.q + x_group * units * R * U;
            const uint8_t* weights = of.bytes + x_group * step;
            const float* x_scales = rows.scales + x_group * R;
            if (units == 1)
                multiply<U>(x, weights, of.stride, sums[0]);
            else
                multiply<U>(x, R * U, weights, of.stride, units, sums);
            tiles::wait_for_stores();
            if (units == 1)
                each(parts, [&](floats& part, int r) { part = scaled(sums[0][r], x_scales[r], part); });
            else
                each(parts, [&](floats& part, int r) {
                    part = scaled(sums[0][r] + sums[1][r] + (sums[2][r] + sums[3][r]), x_scales[r], part);
                });
        }
        const GroupScales<HAS_MINIMUMS> scales(p, of.index + group * LANES);
        alignas(64) floats of_rows[R];
        each(parts, [&](const floats& part, int r) { of_rows[r] = part; });
        each(totals, [&](floats& total, int r) { scales.add(of_rows[r], rows.parts[group * R + r], total); });
    }
    each(totals, [&](const floats& total, int r) { out[r] = total; });
}

using BlockProduct = void (*)(const Product&, const Columns&, const Rows&, floats*);

template <int U, int R, bool HAS_MINIMUMS>
BlockProduct block_product_for(const Product& p) {
    if (p.x_group_size == U) switch (p.x_groups_in_group) {
            case 1: return block_product<U, R, 1, HAS_MINIMUMS>;
            case 2: return block_product<U, R, 2, HAS_MINIMUMS>;
            case 4: return block_product<U, R, 4, HAS_MINIMUMS>;
        }
    return block_product_of_long_groups<U, R, HAS_MINIMUMS>;
}

template <int U>
BlockProduct block_product_for(const Product& p, int num_rows) {
    const bool has_minimums = p.minimums.numbers != nullptr;
    if (num_rows == 16) return has_minimums ? block_product_for<U, 16, true>(p) : block_product_for<U, 16, false>(p);
    return has_minimums ? block_product_for<U, 8, true>(p) : block_product_for<U, 8, false>(p);
}

// -- all of a product ----------------------------------------------------------------------------------------------

// The weights of a tile as signed bytes: [unit][U / 4][columns][4]. Zero points must leave them in 8 bits.
template <Form F, int U, int NUM_COLUMNS>
void unpack(const Product& p, const uint8_t* weights, int64_t index, uint8_t* bytes) {
    constexpr int UNIT_BYTES = NUM_COLUMNS * U * bits_of(F) / 8, LINES = UNIT_BYTES / 64;
    const int64_t units_in_group = p.group_size / U;
    for (int64_t unit = 0; unit < p.num_units; unit++, weights += UNIT_BYTES) {
        ints zeros = splat_ints(F == NIBBLES ? p.added * 0x01010101 : 0);
        if (F == NIBBLES && p.zeros) zeros = load_zeros<F>(p.zeros, index + unit / units_in_group * LANES) * 0x01010101;
        if constexpr (has_planes(F)) {
            static_assert(NUM_COLUMNS == LANES);
            for (int byte = 0; byte < UNIT_BYTES; byte += 64) __builtin_prefetch(weights + byte + AHEAD);
            const ints high = high_plane<F, U>(weights, 0);
            unrolled<U / 4>([&](auto quad) {
                constexpr int QUAD = decltype(quad)::value;
                const ints numbers = joined_planes<F, U, QUAD>(high, weights, 0);
                const ints signed_ones =
                    (ints)_mm512_sub_epi8((__m512i)numbers, (__m512i)splat_ints(p.added * 0x01010101));
                std::memcpy(bytes + QUAD * 64, &signed_ones, 64);
            });
            bytes += U / 4 * 64;
            continue;
        }
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
    return !p.is_wide && p.num_rows >= LEAST_ROWS_OF_TILES && (F != BYTES || p.zeros == nullptr);
}

// Blocks of 16 rows. The last one is filled up to 8 or 16, with rows whose scales are 0.
struct TileBlocks {
    int64_t num_rows, count, last_size;
    explicit TileBlocks(int64_t rows)
        : num_rows(rows), count((rows + 15) / 16), last_size(rows - (count - 1) * 16 > 8 ? 16 : 8) {}
    int size(int64_t block) const { return block + 1 < count ? 16 : int(last_size); }
    int64_t end() const { return (count - 1) * 16 + last_size; }
};

// Multiplies all rows by one tile, which has NUM_COLUMNS columns.
template <Form F, int U, int NUM_COLUMNS, class T>
void product_by_tiles(const Product& p, const TileBlocks& blocks, int8_t* bytes, int64_t tile, T* out) {
    constexpr int VECTORS = NUM_COLUMNS / LANES;
    const int64_t index = tile * p.num_groups * NUM_COLUMNS;
    const Scratch unpacked(p.num_units * NUM_COLUMNS * U);
    uint8_t* weights = reinterpret_cast<uint8_t*>(unpacked.bytes);
    unpack<F, U, NUM_COLUMNS>(p, p.tiles + tile * p.num_units * NUM_COLUMNS * U * bits_of(F) / 8, index, weights);
    tiles::Tiles registers;
    int shaped = 0;
    for (int64_t block = 0; block < blocks.count; block++) {
        const int size = blocks.size(block);
        const int64_t first = block * 16;
        const Rows rows(p, bytes, first, size);
        const auto product = block_product_for<U>(p, size);
        if (size != shaped) registers.set(shape_of<U>(size)), shaped = size;
        for (int v = 0; v < VECTORS; v++) {
            alignas(64) floats totals[16][1][1];
            product(p, {weights + v * 64, NUM_COLUMNS * 4, index + v * LANES}, rows, &totals[0][0][0]);
            for (int64_t row = first; row < std::min(first + 16, p.num_rows); row++)
                store_tile<1, 1>(p, tile * NUM_COLUMNS + v * LANES, row, totals[row - first], out);
        }
    }
}

// -- bytes with one scale a column, and activations with one scale a row --------------------------------------------

// Activations are two bytes each, so fewer rows are worth it.
constexpr int64_t LEAST_WHOLE_ROWS_OF_TILES = 7;

// Whether sums pass all inputs before scales apply. The tiles then read the weights as they are stored.
inline bool by_whole_rows(const Product& p) {
    return p.is_wide && p.num_rows >= LEAST_WHOLE_ROWS_OF_TILES && p.in_size % amx::WideBytes::STEP == 0;
}

// Quantize(row, high, low) writes the bytes of a row, a step after the other.
template <class T, class Quantize>
void run_by_whole_rows(const Product& p, T* out, int num_threads, const Quantize& quantize) {
    std::vector<WideSpan> spans(p.num_rows);
    const auto pack = [&](int64_t first, int64_t num, char* place) {
        for (int64_t row = 0; row < num; row++) {
            int8_t* high = reinterpret_cast<int8_t*>(place) + row * tiles::ROW_BYTES;
            spans[first + row] = quantize(first + row, high, high + amx::TILE_BYTES);
        }
    };
    const auto put = [&](int64_t row, int64_t column, const int32_t* high, const int32_t* low) {
        const WideSpan& span = spans[row];
        for (int v = 0; v < amx::VECTORS; v++, column += LANES, high += LANES, low += LANES) {
            const floats scale = p.scales.at(column);
            const auto part = [&](const int32_t* sums, const Span& of) {
                const ints exact = load_ints(sums) - splat_ints(p.added * of.sum);
                return fused(scaled(exact, of.scale * p.worth, floats{}), scale, floats{});
            };
            const floats total[1][1] = {{part(high, span.high) + part(low, span.low)}};
            store_tile<1, 1>(p, column, row, total, out);
        }
    };
    const int64_t steps = p.in_size / amx::WideBytes::STEP;
    amx::run<amx::WideBytes>({p.tiles, p.num_rows, steps, p.out_size}, num_threads, pack, put);
}

// -- all rows ------------------------------------------------------------------------------------------------------

template <Form F, int U, int NUM_COLUMNS, class T, class Quantize>
void run_by_tiles(const Product& p, T* out, int num_threads, const Quantize& quantize) {
    const TileBlocks blocks(p.num_rows);
    const Scratch bytes(blocks.end() * Rows::row_bytes(p));
    parallel_for(blocks.end(), num_threads, [&](int64_t row) {
        const int64_t first = row / 16 * 16;
        const int size = blocks.size(row / 16), own = int(row - first);
        const Rows rows(p, bytes.bytes, first, size);
        if (row < p.num_rows) return quantize(row, rows, own, size);
        for (int64_t i = 0; i < p.num_x_groups; i++) rows.scales[i * size + own] = 0;
        for (int64_t i = 0; i < p.num_groups; i++) rows.parts[i * size + own] = 0;
    });
    parallel_for((p.out_size + NUM_COLUMNS - 1) / NUM_COLUMNS, num_threads, [&](int64_t tile) {
        product_by_tiles<F, U, NUM_COLUMNS>(p, blocks, bytes.bytes, tile, out);
    });
}

}  // namespace int_product
#endif
