// Products of int_product.h by VNNI for many rows: two tiles at once, so that each quad of activations is loaded for
// both. A Zen 5 loads two vectors in the time of two products, and a tile alone waits for its loads.
//
// Sums and totals of 6 rows lie in registers, and scales are read in fp32. One thread of a Zen 5, 256 rows of K = 1,536,
// 10^9 operations a second, with a tile alone and so: 540 and 670 for Q4_K, 516 and 600 for Q6_K, 676 and 745 for 8 bits
// in groups of 64 (2026-11-30).
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
#else
constexpr int PAIR_ROWS = 1;
constexpr int64_t least_rows_of_pairs(Form) { return INT64_MAX; }
#endif

}  // namespace int_product
