// Products of int_product.h by VNNI for many rows: two tiles at once, so that each quad of activations is loaded for
// both. A Zen 5 loads two vectors in the time of two products, and a tile alone waits for its loads.
//
// Sums and totals of 6 rows lie in registers, and scales are read in fp32. One thread of a Zen 5, 256 rows of K = 1,536,
// 10^9 operations a second, with a tile alone and so: 540 and 670 for Q4_K, 516 and 600 for Q6_K, 676 and 745 for 8 bits
// in groups of 64 (2026-11-30).
//
// Long groups of activations have blocks of 12 rows, whose totals lie in memory. One thread of an Intel Xeon that does
// 730: 240 rows of 384 x 1,152 in groups of 32, 64 and 128: 424, 515 and 577 (2026-12-01).
#pragma once

#include <type_traits>

namespace int_product {

#if defined(INT_DOT_VNNI)
constexpr int PAIR_ROWS = 6;  // of a block

// Fewest rows for which pairs are faster, if weights come from memory: then one tile is nearer to their order.
constexpr int64_t least_rows_of_pairs(Form f) { return has_planes(f) ? 9 : f == BYTES ? 65 : 17; }

// Two tiles, whose activations have a scale for each unit.
template <Form F, int U, int R>
void pair_product(const Product& p, const Tile (&pair)[2], const Rows& rows, int64_t first_row, void* out,
                  bool is_bf16) {
    constexpr int UNIT_BYTES = COLUMNS * U * bits_of(F) / 8;
    const uint8_t* weights[2] = {pair[0].weights, pair[1].weights};
    const float *scales[2], *minimums[2] = {};
    for (int v = 0; v < 2; v++) {
        scales[v] = static_cast<const float*>(pair[v].scales.numbers) + pair[v].index;
        if (p.minimums.numbers) minimums[v] = static_cast<const float*>(pair[v].minimums.numbers) + pair[v].index;
    }
    const int8_t* x = rows.q;
    const float *x_scales = rows.scales, *x_parts = rows.parts;
    const int32_t* corrections = rows.corrections;
    const int64_t zeros_of_tile = p.num_groups * COLUMNS;
    int64_t zeros = pair[0].number * zeros_of_tile;
    floats totals[R][2] = {};
    alignas(64) floats parts[R][2];  // of a group of weights with several of activations
    floats* parts_in_memory = parts[0];
    for (int64_t x_group = 0, left = p.x_groups_in_group; x_group < p.num_x_groups; x_group++) {
        Sum<F> sums[R][2];
        for_each<R, 2>([&](auto r, auto v) ALWAYS_INLINE {
            sums[r][v].begin(start_of<F>(p, zeros + v * zeros_of_tile, corrections[r]));
        });
        add_unit<F, U>(sums, weights, x, p.table, first_row == 0);
        asm("" : "+r"(parts_in_memory));  // or GCC would keep parts in registers, and other sums in memory
        const auto part_of = [&](auto r, auto v) ALWAYS_INLINE {
            return __builtin_convertvector(sums[r][v].sum, floats);
        };
        const auto add_all = [&](const auto& part, auto with_minimums) ALWAYS_INLINE {
            const floats own[2] = {(floats)load_ints(scales[0]), (floats)load_ints(scales[1])};
            floats least[2];
            if (with_minimums) least[0] = (floats)load_ints(minimums[0]), least[1] = (floats)load_ints(minimums[1]);
            unrolled<R>([&](auto r) ALWAYS_INLINE {
                const floats x_scale = splat_floats(x_scales[r]), x_part = splat_floats(x_parts[r]);
                unrolled<2>([&](auto v) ALWAYS_INLINE {
                    totals[r][v] = fused(part(r, v, x_scale), own[v], totals[r][v]);
                    if (with_minimums) totals[r][v] = fused(least[v], x_part, totals[r][v]);
                });
                asm("" : "+r"(x_scales), "+r"(x_parts));
            });
        };
        const auto add_group = [&](const auto& part) ALWAYS_INLINE {
            minimums[0] ? add_all(part, std::true_type{}) : add_all(part, std::false_type{});
            scales[0] += COLUMNS, scales[1] += COLUMNS, x_parts += R, zeros += COLUMNS;
            if (minimums[0]) minimums[0] += COLUMNS, minimums[1] += COLUMNS;
        };
        const auto only_part = [&](auto r, auto v, floats x_scale) ALWAYS_INLINE { return part_of(r, v) * x_scale; };
        const auto next_part = [&](auto r, auto v, floats x_scale) ALWAYS_INLINE {
            return fused(part_of(r, v), x_scale, parts_in_memory[r * 2 + v]);
        };
        const auto keep = [&](const auto& part) ALWAYS_INLINE {
            for_each<R, 2>([&](auto r, auto v) ALWAYS_INLINE {
                parts_in_memory[r * 2 + v] = part(r, v, splat_floats(x_scales[r]));
            });
        };
        const bool is_first = left == p.x_groups_in_group, is_last = --left == 0;
        if (is_last) is_first ? add_group(only_part) : add_group(next_part), left = p.x_groups_in_group;
        else is_first ? keep(only_part) : keep(next_part);
        x += R * U, x_scales += R, corrections += R;
        weights[0] += UNIT_BYTES, weights[1] += UNIT_BYTES;
    }
    store_tile<2, R>(p, pair[0].number * COLUMNS, first_row, totals, out, is_bf16);
}

constexpr int LONG_PAIR_ROWS = 12;  // whose sums alone lie in registers

// Whether groups of activations have several units. The products of such a group then hide what its scales take.
inline bool has_long_pairs(const Product& p) {
    return p.x_group_size > p.unit && p.x_group_size < p.in_size && p.zeros == nullptr && p.minimums.numbers == nullptr;
}

// Adds four inputs of each row and of two tiles. It is `asm`, because GCC 12 puts intrinsics in an order of its own,
// which keeps sums in memory.
template <int U, int R>
ALWAYS_INLINE inline void add_long_quads(ints (&sums)[R][2], const uint8_t* first, const uint8_t* second,
                                         const int8_t* x) {
    typedef int32_t __attribute__((may_alias)) quad;
    const ints weights[2] = {load_ints(first), load_ints(second)};
    unrolled<R>([&](auto r) ALWAYS_INLINE {
        ints loaded;
        asm("vpbroadcastd %1, %0" : "=v"(loaded) : "m"(*reinterpret_cast<const quad*>(x + r * U)));
        unrolled<2>([&](auto v) ALWAYS_INLINE {
            asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][v]) : "v"(weights[v]), "v"(loaded));
        });
    });
    asm("" ::: "memory");  // or GCC would load the activations of several lines at once
}

// Two tiles of bytes without zero points and minimums.
template <int U, int R>
void long_pair_product(const Product& p, const Tile (&pair)[2], const Rows& rows, int64_t first_row, void* out,
                       bool is_bf16) {
    constexpr int UNIT_BYTES = COLUMNS * U, LINE = COLUMNS * 4;
    const uint8_t *first = pair[0].weights, *second = pair[1].weights;
    const float* scales[2];
    for (int v = 0; v < 2; v++) scales[v] = static_cast<const float*>(pair[v].scales.numbers) + pair[v].index;
    const int8_t* x = rows.q;
    const float* x_scales = rows.scales;
    const int32_t* corrections = rows.corrections;
    const int64_t units = p.x_group_size / U;
    floats totals[R][2], parts[R][2], biases[2] = {};
    floats *total = totals[0], *kept = parts[0];
    // Of whole vectors of fp32. Others pass through memory.
    const int64_t column = pair[0].number * COLUMNS;
    const bool is_whole = !is_bf16 && column + 2 * COLUMNS <= p.out_size;
    float* place = is_whole ? static_cast<float*>(out) + first_row * p.out_size + column : nullptr;
    for (int v = 0; p.bias && is_whole && v < 2; v++) biases[v] = simd::load(p.bias + column + v * COLUMNS);
    for (int64_t x_group = 0, left = p.x_groups_in_group; x_group < p.num_x_groups; x_group++) {
        ints sums[R][2];
        for_each<R, 2>([&](auto r, auto v) ALWAYS_INLINE { sums[r][v] = splat_ints(corrections[r]); });
        for (int64_t unit = 0; unit < units; unit++, first += UNIT_BYTES, second += UNIT_BYTES, x += R * U) {
            for (int byte = 0; first_row == 0 && byte < UNIT_BYTES; byte += 64)
                __builtin_prefetch(first + byte + AHEAD), __builtin_prefetch(second + byte + AHEAD);
            unrolled<U / 4>([&](auto j) ALWAYS_INLINE {
                add_long_quads<U>(sums, first + j * LINE, second + j * LINE, x + j * 4);
            });
        }
        asm("" : "+r"(total), "+r"(kept));  // or GCC would keep totals in registers, and sums in memory
        const auto part_of = [&](auto r, auto v) ALWAYS_INLINE { return __builtin_convertvector(sums[r][v], floats); };
        const auto only_part = [&](auto r, auto v) ALWAYS_INLINE { return part_of(r, v) * splat_floats(x_scales[r]); };
        const auto next_part = [&](auto r, auto v) ALWAYS_INLINE {
            return fused(part_of(r, v), splat_floats(x_scales[r]), kept[r * 2 + v]);
        };
        const auto add = [&](const auto& part) ALWAYS_INLINE {
            const floats own[2] = {(floats)load_ints(scales[0]), (floats)load_ints(scales[1])};
            const auto put = [&](const auto& begin, const auto& end) ALWAYS_INLINE {
                for_each<R, 2>([&](auto r, auto v) ALWAYS_INLINE { end(r, v, fused(part(r, v), own[v], begin(r, v))); });
            };
            const auto nothing = [&](auto, auto) ALWAYS_INLINE { return floats{}; };
            const auto so_far = [&](auto r, auto v) ALWAYS_INLINE { return total[r * 2 + v]; };
            const auto go_on = [&](auto r, auto v, floats sum) ALWAYS_INLINE { total[r * 2 + v] = sum; };
            const auto write = [&](auto r, auto v, floats sum) ALWAYS_INLINE {
                simd::store(place + r * p.out_size + v * COLUMNS, sum + biases[v]);
            };
            const bool begins = x_group < p.x_groups_in_group;
            const bool ends = x_group + 1 == p.num_x_groups;
            if (place && ends) begins ? put(nothing, write) : put(so_far, write);
            else begins ? put(nothing, go_on) : put(so_far, go_on);
            scales[0] += COLUMNS, scales[1] += COLUMNS, left = p.x_groups_in_group;
        };
        const auto keep = [&](const auto& part) ALWAYS_INLINE {
            for_each<R, 2>([&](auto r, auto v) ALWAYS_INLINE { kept[r * 2 + v] = part(r, v); });
        };
        const bool is_first = left == p.x_groups_in_group, is_last = --left == 0;
        if (is_last) is_first ? add(only_part) : add(next_part);
        else is_first ? keep(only_part) : keep(next_part);
        x_scales += R, corrections += R;
    }
    if (!is_whole) store_tile<2, R>(p, column, first_row, totals, out, is_bf16);
}
#else
constexpr int PAIR_ROWS = 1, LONG_PAIR_ROWS = 1;
constexpr int64_t least_rows_of_pairs(Form) { return INT64_MAX; }
inline bool has_long_pairs(const Product&) { return false; }
#endif

}  // namespace int_product
