// Products of 4-bit and 8-bit weights, in every layout of quantized.py, with activations that are quantized at the
// call: to 8 bits in groups, or to 8 or 16 bits if a row has one scale. 16 bits are two rows of bytes, and so are their
// sums.
//
// Weights lie in tiles of columns, each tile in units of 16 or 32 inputs: as many as share a scale of activations, at
// most 32. A unit of bytes is [U / 4][columns][4]. A unit of nibbles is [U / 8][columns][4]
// bytes: byte (j, column, b) has input 4 j + b in its low bits and input U / 2 + 4 j + b in its high ones. Of 5 and 6 bits
// the low four are such nibbles. The high ones lie before them, as [columns][4] bytes: byte (column, b) has those of
// inputs b, 4 + b, .. from its lowest bit on. Numbers of 2 bits lie so too, without nibbles. Of 3 bits, byte (column, b)
// has those of inputs b and 4 + b, and the low two bits of input 8 + b. Before these lie [8][4] bytes: byte (i, b) has
// the number of input 12 + b, and above it the high bit of input 8 + b. Its low half is that of column i, its high half
// that of column 8 + i. Scales, zero points and minimums lie as [tile][group][columns].
#pragma once

#include <array>
#include <utility>

#include "cpu/int_lanes.h"
#include "cpu/parallel.h"

namespace int_product {

constexpr int COLUMNS = LANES;  // of a tile
#if defined(INT_DOT_VNNI)
constexpr int ROW_COLUMNS = 2 * LANES;  // of a tile whose activations have one scale a row: each is read once for both
#else
constexpr int ROW_COLUMNS = COLUMNS;
#endif
// Most tiles that a block of rows passes before the next block: 4 x 64 KiB of nibbles at K = 8,192.
constexpr int TILES_OF_NIBBLES = 4;

// Bytes to prefetch, because the processor's own prefetching stops at each page. Two cores of a Zen 4, 16384 x 2048, 4
// bits: 37 -> 39 GB/s for one row, 460 -> 614 GOP/s for 8.
constexpr int AHEAD = 4096;

// The weights, the bias and the sizes of a product.
struct Product {
    const uint8_t* tiles;
    Values scales, minimums;
    const void* zeros;     // or null
    const float* bias;     // or null
    const int32_t* order;  // or null
    Table table;
    float worth;    // of 1 in the table
    int32_t added;  // to every weight
    int64_t num_rows, in_size, out_size;
    int64_t unit, x_group_size, group_size;  // in inputs: each a multiple of the one before
    int64_t num_units, num_x_groups, num_groups, x_groups_in_group;
    bool is_wide;  // activations have 16 bits

    // 0 weights stand for all of a row. So do 0 activations, in 16 bits, and -1 in 8.
    void set_groups(int64_t weights, int64_t activations) {
        is_wide = activations == 0;
        unit = activations == 16 ? 16 : 32;
        num_units = (in_size + unit - 1) / unit;
        x_group_size = activations > 0 ? activations : num_units * unit, group_size = weights ? weights : num_units * unit;
        num_x_groups = (in_size + x_group_size - 1) / x_group_size;
        num_groups = (in_size + group_size - 1) / group_size;
        x_groups_in_group = group_size / x_group_size;
    }
};

// A block of R quantized rows. If activations have 16 bits, the low bytes of its first half are the second half.
struct Rows {
    int8_t* q;             // [unit][row][U]
    float* scales;         // [group of activations][row]
    int32_t* corrections;  // [group of activations][row]: what a sum begins with; of zero points -sum(q), 16 bits
    float* parts;          // [group of weights][row]: the sum of scale * sum(q), for minimums

    Rows(const Product& p, int8_t* bytes, int64_t first, int num_rows) {
        const int64_t q_bytes = p.num_units * p.unit, num_x_groups = p.num_x_groups;
        q = bytes + first * row_bytes(p);
        scales = reinterpret_cast<float*>(q + num_rows * q_bytes);
        corrections = reinterpret_cast<int32_t*>(scales + num_rows * num_x_groups);
        parts = reinterpret_cast<float*>(corrections + num_rows * num_x_groups);
    }
    static int64_t row_bytes(const Product& p) {
        return p.num_units * p.unit + 8 * p.num_x_groups + 4 * p.num_groups;
    }
};

// -- one tile of columns -------------------------------------------------------------------------------------------

// Adds four inputs of each column and row.
template <Form F, int U, int V, int R>
ALWAYS_INLINE inline void add_quads(Sum<F> (&sums)[R][V], const ints (&weights)[V], const int8_t* x) {
    unrolled<R>([&](auto r) ALWAYS_INLINE {
        const int32_t quad = read_i32(x + r * U);
        unrolled<V>([&](auto v) ALWAYS_INLINE { sums[r][v].add(weights[v], quad); });
    });
}

// What lies before the lines of a unit in planes, for WIDTH columns from byte `place` of a line on. Of 3 bits the low
// half of each byte counts. With a plane of high bits, a row by 3 bits took 1.3 times as long as one by nibbles with
// AVX2, and takes 1.0 times as long so (one thread of a Zen 5, 2026-11-30).
template <Form F, int U>
ALWAYS_INLINE inline ints high_plane(const uint8_t* unit, int place) {
    if constexpr (F == TWOS) return ints{};
    if constexpr (F != THREES) return load_ints(unit + place);
#if defined(INT_DOT_AVX2)
    return load_ints(unit) >> (place ? 4 : 0);
#elif defined(INT_DOT_VNNI)
    const __m512i both = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256((const __m256i*)unit));
    return (ints)_mm512_maskz_srlv_epi32(0xffff, both, (__m512i)ints{0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4});
#else
    ints both;
    for (int half = 0; half < 2; half++) std::memcpy(reinterpret_cast<char*>(&both) + half * 32, unit, 32);
    return both >> ints{0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
#endif
}

// The numbers of quad QUAD of a unit in planes, of the same columns.
template <Form F, int U, int QUAD>
ALWAYS_INLINE inline ints joined_planes(ints high, const uint8_t* unit, int place) {
    constexpr int LOW = low_bits(F), HIGH = high_bits(F), SHIFT = LOW - HIGH * QUAD, LINES = low_lines(F, U);
    const ints low = load_ints(unit + U * COLUMNS * HIGH / 8 + QUAD % LINES * COLUMNS * 4 + place);
    if constexpr (F == THREES) {
        if constexpr (QUAD == 2) return (low >> 6 & splat_ints(0x03030303)) | (high >> 1 & splat_ints(0x04040404));
        return (QUAD == 3 ? high : low >> 3 * QUAD) & splat_ints(0x07070707);
    }
    const ints numbers = low >> QUAD / LINES * LOW & splat_ints(((1 << LOW) - 1) * 0x01010101);
    if constexpr (HIGH == 0) return numbers;
    const ints shifted = SHIFT > 0 ? high << (SHIFT > 0 ? SHIFT : 0) : high >> (SHIFT < 0 ? -SHIFT : 0);
    return numbers | (shifted & splat_ints(((1 << HIGH) - 1) * (0x01010101 << LOW)));
}

// Adds a unit in planes, of N tiles with V vectors of columns together. `fetches`: prefetch what is read next.
template <Form F, int U, int V, int R, int N>
ALWAYS_INLINE inline void add_planes(Sum<F> (&sums)[R][V], const uint8_t* const (&weights)[N], const int8_t* x,
                                     bool fetches) {
    constexpr int UNIT_BYTES = U * COLUMNS * bits_of(F) / 8, LINES = low_lines(F, U), OWN = V / N;
    static_assert(OWN * WIDTH == COLUMNS);
    if (fetches)
        for (const uint8_t* unit : weights)
            for (int byte = 0; byte < UNIT_BYTES; byte += 64) __builtin_prefetch(unit + byte + AHEAD);
    ints high[V];
    unrolled<V>([&](auto v) ALWAYS_INLINE { high[v] = high_plane<F, U>(weights[v / OWN], v % OWN * sizeof(ints)); });
    unrolled<LINES>([&](auto j) ALWAYS_INLINE {
        unrolled<8 / low_bits(F)>([&](auto turn) ALWAYS_INLINE {
            constexpr int QUAD = decltype(turn)::value * LINES + decltype(j)::value;
            ints numbers[V];
            unrolled<V>([&](auto v) ALWAYS_INLINE {
                numbers[v] = joined_planes<F, U, QUAD>(high[v], weights[v / OWN], v % OWN * sizeof(ints));
            });
            add_quads<F, U>(sums, numbers, x + QUAD * 4);
            asm("" ::: "memory");  // or GCC would load the activations of several lines at once
        });
    });
}

template <Form F, int U, int V, int R, int N>
ALWAYS_INLINE inline void add_unit(Sum<F> (&sums)[R][V], const uint8_t* const (&weights)[N], const int8_t* x,
                                   const Table& table, bool fetches) {
    constexpr int OWN = V / N, LINE = OWN * sizeof(ints);
    if constexpr (has_planes(F)) return add_planes<F, U>(sums, weights, x, fetches);
    // Line by line: GCC would load the activations of several lines at once, and have no registers for the sums.
#pragma GCC unroll 1
    for (int j = 0; j < (bits_of(F) == 8 ? U / 4 : U / 8); j++) {
        ints loaded[V];
        unrolled<V>([&](auto v) ALWAYS_INLINE {
            loaded[v] = load_ints(weights[v / OWN] + j * LINE + v % OWN * sizeof(ints));
        });
        if (fetches)
            for (const uint8_t* unit : weights)
                for (int byte = 0; byte < LINE; byte += 64) __builtin_prefetch(unit + j * LINE + byte + AHEAD);
        if constexpr (bits_of(F) == 8) {
            add_quads<F, U>(sums, loaded, x + j * 4);
        } else {
            unrolled<2>([&](auto half) ALWAYS_INLINE {
                ints numbers[V];
                unrolled<V>([&](auto v) ALWAYS_INLINE {
                    numbers[v] = (half ? loaded[v] >> 4 : loaded[v]) & splat_ints(0x0f0f0f0f);
                    if constexpr (F == TABLE) numbers[v] = table.chosen(numbers[v]);
                });
                add_quads<F, U>(sums, numbers, x + half * (U / 2) + j * 4);
            });
        }
    }
}

// The number that makes a sum of unsigned weights one of signed weights or of those above their zero points.
template <Form F>
ALWAYS_INLINE inline ints start_of(const Product& p, int64_t index, int32_t correction) {
    if (F == TABLE || has_planes(F) || p.zeros == nullptr) return splat_ints(correction);
    return multiply_pairs(load_zeros<F>(p.zeros, index), correction);
}

// Adds a group of weights: its scales times its parts, and its minimums times those of the activations.
template <int V, int R>
struct Groups {
    const Values &scales, &minimums;
    floats factors[V] = {}, minimum_factors[V] = {};  // of the block

    ALWAYS_INLINE void add(int64_t index, floats (&totals)[R][V], const floats (&parts)[R][V], const float* x_parts) {
        if (scales.begins_block(index)) {
            unrolled<V>([&](auto v) ALWAYS_INLINE { factors[v] = scales.factor(index + v * WIDTH); });
            if (minimums.numbers)
                unrolled<V>([&](auto v) ALWAYS_INLINE { minimum_factors[v] = minimums.factor(index + v * WIDTH); });
        }
        unrolled<V>([&](auto v) ALWAYS_INLINE {
            const floats scale = scales.at(index + v * WIDTH, factors[v]);
            unrolled<R>([&](auto r) ALWAYS_INLINE { totals[r][v] = fused(parts[r][v], scale, totals[r][v]); });
        });
        if (minimums.numbers == nullptr) return;
        unrolled<V>([&](auto v) ALWAYS_INLINE {
            const floats minimum = minimums.at(index + v * WIDTH, minimum_factors[v]);
            unrolled<R>([&](auto r) ALWAYS_INLINE {
                totals[r][v] = fused(minimum, splat_floats(x_parts[r]), totals[r][v]);
            });
        });
    }
};

template <int V, int R, class T>
inline void store_tile(const Product& p, int64_t column, int64_t first_row, const floats (&totals)[R][V], T* out) {
    for (int64_t lane = 0; lane < V * WIDTH && column + lane < p.out_size; lane += LANES) {
        const int64_t rest = p.out_size - column - lane;
        const int count = int(rest < LANES ? rest : LANES);
        const vf bias = p.bias ? simd::load_part(p.bias + column + lane, count) : vf{};
        for (int r = 0; r < R; r++) {
            vf total;
            std::memcpy(&total, reinterpret_cast<const float*>(totals[r]) + lane, sizeof total);
            store_first(out + (first_row + r) * p.out_size + column + lane, total + bias, count);
        }
    }
}

template <int V, int R>
inline void store_tile(const Product& p, int64_t column, int64_t first_row, const floats (&totals)[R][V], void* out,
                       bool is_bf16) {
    if (is_bf16)
        store_tile<V, R>(p, column, first_row, totals, static_cast<simd::bf16*>(out));
    else
        store_tile<V, R>(p, column, first_row, totals, static_cast<float*>(out));
}

// A tile as a kernel reads it.
struct Tile {
    int64_t number;
    const uint8_t* weights;
    Values scales, minimums;
    int64_t index;  // of the first group's scales

    template <Form F, int NUM_COLUMNS>
    static Tile of(const Product& p, int64_t number) {
        return {number, p.tiles + number * p.num_units * p.unit * NUM_COLUMNS * bits_of(F) / 8, p.scales, p.minimums,
                number * p.num_groups * NUM_COLUMNS};
    }
};

template <Form F, int U, int V, int R>
void tile_product(const Product& p, const Tile& tile, const Rows& rows, int64_t first_row, void* out, bool is_bf16) {
    constexpr int UNIT_BYTES = V * WIDTH * U * bits_of(F) / 8;
    const uint8_t* weights[] = {tile.weights};
    const int8_t* x = rows.q;
    const int64_t units_in_x_group = has_planes(F) ? 1 : p.x_group_size / U;
    int64_t index = tile.index, zeros = tile.number * p.num_groups * V * WIDTH;
    Groups<V, R> groups{tile.scales, tile.minimums};
    const float* x_parts = rows.parts;
    floats totals[R][V] = {}, parts[R][V] = {};
    for (int64_t x_group = 0, left = p.x_groups_in_group; x_group < p.num_x_groups; x_group++) {
        const int32_t* corrections = rows.corrections + x_group * R;
        const float* x_scales = rows.scales + x_group * R;
        const auto start = [&](int r, int v) ALWAYS_INLINE {
            return start_of<F>(p, zeros + v * WIDTH, corrections[r]);
        };
        Sum<F> sums[R][V];
        for_each<R, V>([&](auto r, auto v) ALWAYS_INLINE { sums[r][v].begin(start(r, v)); });
        for (int64_t unit = 0; unit < units_in_x_group; unit++, weights[0] += UNIT_BYTES, x += R * U)
            add_unit<F, U>(sums, weights, x, p.table, true);
        for_each<R, V>([&](auto r, auto v) ALWAYS_INLINE {
            const floats total = __builtin_convertvector(sums[r][v].total(start(r, v)), floats);
            parts[r][v] = fused(total, splat_floats(x_scales[r]), parts[r][v]);
        });
        if (!has_planes(F) && --left > 0) continue;
        groups.add(index, totals, parts, x_parts);
        for_each<R, V>([&](auto r, auto v) ALWAYS_INLINE { parts[r][v] = floats{}; });
        left = p.x_groups_in_group, index += V * WIDTH, zeros += V * WIDTH, x_parts += R;
    }
    const int64_t column = tile.number * V * WIDTH;
    if constexpr (R % 2 == 0)
        if (p.is_wide) {
            floats both[R / 2][V];
            for (int r = 0; r < R / 2; r++)
                for (int v = 0; v < V; v++) both[r][v] = totals[r][v] + totals[r + R / 2][v];
            return store_tile<V, R / 2>(p, column, first_row, both, out, is_bf16);
        }
    store_tile<V, R>(p, column, first_row, totals, out, is_bf16);
}

}  // namespace int_product

#include "cpu/int_tiles.h"
#include "cpu/int_units.h"
#include "cpu/int_unpacked.h"
#include "cpu/int_pairs.h"

namespace int_product {

using TileProduct = void (*)(const Product&, const Tile&, const Rows&, int64_t, void*, bool);
using TileProducts = std::array<TileProduct, MAX_ROWS>;

template <Form F, int U, int V, int R>
constexpr TileProduct instance() {
#if defined(INT_DOT_AVX2)
    if constexpr (F != BYTES) return unit_product<F, U, V, R>;
    else
#endif
        return tile_product<F, U, V, R>;
}

// Instances for 1, 2, .. rows, at index rows - 1.
template <Form F, int U, int V, int... R>
constexpr TileProducts instances(std::integer_sequence<int, R...>) {
    return {instance<F, U, V, R + 1>()...};
}
template <Form F, int U, int NUM_COLUMNS>
constexpr TileProducts TILE_PRODUCTS =
    instances<F, U, NUM_COLUMNS / WIDTH>(std::make_integer_sequence<int, MAX_ROWS>());

#if defined(INT_DOT_VNNI)
using PairProduct = void (*)(const Product&, const Tile (&)[2], const Rows&, int64_t, void*, bool);
template <Form F, int U, int... R>
constexpr std::array<PairProduct, PAIR_ROWS> pair_instances(std::integer_sequence<int, R...>) {
    return {pair_product<F, U, R + 1>...};
}
template <Form F, int U>
constexpr std::array<PairProduct, PAIR_ROWS> PAIR_PRODUCTS =
    pair_instances<F, U>(std::make_integer_sequence<int, PAIR_ROWS>());
template <int U, int... R>
constexpr std::array<PairProduct, LONG_PAIR_ROWS> long_pair_instances(std::integer_sequence<int, R...>) {
    return {long_pair_product<U, R + 1>...};
}
template <int U>
constexpr std::array<PairProduct, LONG_PAIR_ROWS> LONG_PAIR_PRODUCTS =
    long_pair_instances<U>(std::make_integer_sequence<int, LONG_PAIR_ROWS>());
#endif

// -- all of a product ----------------------------------------------------------------------------------------------

template <class T>
void quantize_wide_row(const Product& p, const T* x, const Rows& rows, int row, int num_rows) {
    const int low_row = row + num_rows / 2;
    const WideSpan span = quantize_wide_span(x, p.in_size, rows.q + row * p.unit, rows.q + low_row * p.unit, p.unit,
                                             num_rows * p.unit);
    rows.scales[row] = span.high.scale * p.worth, rows.corrections[row] = -p.added * span.high.sum;
    rows.scales[low_row] = span.low.scale * p.worth, rows.corrections[low_row] = -p.added * span.low.sum;
}

template <class T>
inline Span quantize_group(const Product& p, const T* x, int64_t size, int8_t* q, int64_t stride) {
    if (size == 32 && p.unit == 32) return quantize_whole_span<32, 32>(x, q, stride);
    if (size == 128) return quantize_whole_span<128, 32>(x, q, stride);
    return quantize_span(x, size, q, p.unit, stride);
}

template <Form F, class T>
void quantize_row(const Product& p, const T* x, const Rows& rows, int row, int num_rows) {
    float* part = rows.parts + row;
    *part = 0;
    for (int64_t x_group = 0, left = p.x_groups_in_group; x_group < p.num_x_groups; x_group++, left--) {
        const int64_t start = x_group * p.x_group_size, rest = p.in_size - start;
        int8_t* q = rows.q + start * num_rows + row * p.unit;
        const Span span = quantize_group(p, x + start, rest < p.x_group_size ? rest : p.x_group_size, q, num_rows * p.unit);
        const int64_t index = x_group * num_rows + row;
        rows.scales[index] = span.scale * p.worth;
        rows.corrections[index] = p.zeros ? -span.sum & 0xffff : -p.added * span.sum;
#if defined(INT_DOT_AVX2)
        if (is_balanced(F)) rows.corrections[index] = balance_of(q, p.unit);
#endif
        if (left == 0) part += num_rows, *part = 0, left = p.x_groups_in_group;
        *part = std::fma(float(span.sum), rows.scales[index], *part);
    }
}

// Calls f with a row's inputs, in the order of the weights.
template <class T, class F>
auto in_order(const Product& p, const T* x, const F& f) {
    if (!p.order) return f(x);
    const Scratch ordered(p.in_size * int64_t(sizeof(float)));
    float* to = reinterpret_cast<float*>(ordered.bytes);
    for (int64_t k = 0; k < p.in_size; k++) to[k] = simd::to_float(x[p.order[k]]);
    return f(static_cast<const float*>(to));
}

template <Form F, int U, int NUM_COLUMNS, class T>
void run(const Product& p, const T* x, T* out, int num_threads) {
    if (p.num_rows == 0) return;
    const auto quantize = [&](int64_t row, const Rows& rows, int place, int num_rows) {
        in_order(p, x + row * p.in_size, [&](auto* values) {
            p.is_wide ? quantize_wide_row(p, values, rows, place, num_rows)
                      : quantize_row<F>(p, values, rows, place, num_rows);
        });
    };
#if HAS_TILES
    if constexpr (F == BYTES && NUM_COLUMNS == amx::COLUMNS)
        if (by_whole_rows(p)) return run_by_whole_rows(p, out, num_threads, [&](int64_t row, int8_t* high, int8_t* low) {
            return in_order(p, x + row * p.in_size, [&](auto* values) {
                return quantize_wide_span(values, p.in_size, high, low, amx::WideBytes::STEP, amx::BLOCK_BYTES);
            });
        });
    if (by_tiles<F>(p)) return run_by_tiles<F, U, NUM_COLUMNS>(p, out, num_threads, quantize);
#endif
    const int parts = p.is_wide ? 2 : 1;  // rows of bytes for each row
    const bool are_long = F == BYTES && U == 32 && NUM_COLUMNS == COLUMNS && has_long_pairs(p);
    const bool has_pairs = are_long ? p.num_rows > MAX_ROWS
                                    : NUM_COLUMNS == COLUMNS && p.x_group_size == U && p.num_rows >= least_rows_of_pairs(F);
    const RowBlocks blocks(p.num_rows, !has_pairs ? MAX_ROWS / parts : are_long ? LONG_PAIR_ROWS : PAIR_ROWS);
    const int64_t num_tiles = (p.out_size + NUM_COLUMNS - 1) / NUM_COLUMNS;
    const Scratch bytes(p.num_rows * parts * Rows::row_bytes(p));
    parallel_for(p.num_rows, p.num_rows < ROWS_TO_SHARE ? 1 : num_threads, [&](int64_t row) {
        const int64_t block = blocks.of(row), first = blocks.start(block);
        const int size = blocks.size(block) * parts;
        quantize(row, Rows(p, bytes.bytes, first * parts, size), int(row - first), size);
    });
    if (blocks.count == 1 && blocks.size(0) <= MAX_ROWS) {
        const Rows rows(p, bytes.bytes, 0, int(p.num_rows) * parts);
        return parallel_for(num_tiles, num_threads, [&](int64_t number) {
            const Tile tile = Tile::of<F, NUM_COLUMNS>(p, number);
            TILE_PRODUCTS<F, U, NUM_COLUMNS>[p.num_rows * parts - 1](p, tile, rows, 0, out, sizeof(T) == 2);
        });
    }
    const int64_t tiles = bits_of(F) <= 4 ? TILES_OF_NIBBLES : has_pairs ? 2 : 1;
    parallel_for((num_tiles + tiles - 1) / tiles, num_threads, [&](int64_t turn) {
        const int64_t start = turn * tiles, end = start + tiles < num_tiles ? start + tiles : num_tiles;
        const UnpackedTiles<F, U> unpacked(p, end - start, has_pairs);
        Tile own[TILES_OF_NIBBLES];
        for (int64_t tile = start; tile < end; tile++)
            own[tile - start] = unpacked.unpack(Tile::of<F, NUM_COLUMNS>(p, tile), tile - start);
        for (int64_t block = 0; block < blocks.count; block++) {
            const int64_t first = blocks.start(block);
            const int size = blocks.size(block) * parts;
            const Rows rows(p, bytes.bytes, first * parts, size);
            int64_t tile = start;
#if defined(INT_DOT_VNNI)
            if constexpr (F == BYTES && U == 32 && NUM_COLUMNS == COLUMNS)
                for (; are_long && has_pairs && tile < end; tile += 2) {  // behind the last column nothing is written
                    const Tile pair[2] = {own[tile - start], own[tile + 1 < end ? tile - start + 1 : tile - start]};
                    LONG_PAIR_PRODUCTS<U>[size - 1](p, pair, rows, first, out, sizeof(T) == 2);
                }
            if (has_pairs)
                for (; tile + 1 < end; tile += 2) {
                    const Tile pair[2] = {own[tile - start], own[tile - start + 1]};
                    PAIR_PRODUCTS<in_bytes(F), U>[size - 1](p, pair, rows, first, out, sizeof(T) == 2);
                }
#endif
            for (; tile < end; tile++)
                TILE_PRODUCTS<in_bytes(F), U, NUM_COLUMNS>[size - 1](p, own[tile - start], rows, first, out,
                                                                     sizeof(T) == 2);
        }
    });
}

// -- what Python passes --------------------------------------------------------------------------------------------

// Makes a product of the arguments that both ops have in common.
inline Product product_of(int64_t num_rows, int64_t in_size, int64_t out_size, const uint8_t* tiles,
                          const void* scales, int64_t scale_type, const void* zeros, const void* minimums,
                          const uint16_t* block_scales, const uint16_t* block_minimums, int64_t block_shift,
                          const float* bias, const int32_t* order, int64_t group_size, int64_t x_group_size) {
    Product p = {};
    const bool is_shared = scale_type == LOW_HALF;  // a byte has a scale and a minimum
    p.scales = {scales, ScaleType(scale_type), block_scales, int(block_shift)};
    p.minimums = {minimums, is_shared ? HIGH_HALF : ScaleType(scale_type), block_minimums, int(block_shift)};
    p.tiles = tiles, p.zeros = zeros, p.bias = bias, p.order = order, p.worth = 1;
    p.num_rows = num_rows, p.in_size = in_size, p.out_size = out_size;
    p.set_groups(group_size, x_group_size);
    return p;
}

template <Form F, int U, int NUM_COLUMNS>
void run(const Product& p, const void* x, bool is_bf16, void* out, int64_t num_threads) {
    if (is_bf16)
        run<F, U, NUM_COLUMNS>(p, static_cast<const simd::bf16*>(x), static_cast<simd::bf16*>(out), int(num_threads));
    else
        run<F, U, NUM_COLUMNS>(p, static_cast<const float*>(x), static_cast<float*>(out), int(num_threads));
}

}  // namespace int_product
