// Products of int_product.h by AVX2, of all weights but those of 8 bits. Their signs keep the units that multiply busy.
//
// A unit is a straight line of instructions, with all of its sums in registers. Totals lie in memory. Scales are read
// in fp32, so others are converted before. GCC 12 would load ahead what the registers cannot hold, or keep sums in
// memory. Empty `asm` statements keep the order of the source. One thread of a Zen 3, 4 rows of K = 1,536, cycles for
// 32 inputs and 16 columns, before and so: 98 and 67 for Q4_K, 100 and 69 for Q5_K, 103 and 72 for Q6_K (2026-11-29).
#pragma once

#include <algorithm>

#include "cpu/int_lanes.h"

#if defined(INT_DOT_AVX2)
namespace int_product {

// -- the sums of a unit --------------------------------------------------------------------------------------------

// Whether the products of a unit are added in 16 bits: a half gets two of each quad. 4 bits fit: 15 x 127 x 16 < 2^15.
// Numbers of 5 and 6 bits fit less half of their range: 16 x 127 x 16 and 32 x 127 x 8. So a half begins with what
// takes that off (`is_balanced`). It may overflow on the way, and is right at the end.
constexpr bool has_halves(Form f) { return f != TABLE; }

// The quad that is number `turn` to be added: two that share their bytes follow each other.
constexpr int quad_of_turn(Form f, int unit, int turn) {
    return bits_of(f) == 8 ? turn : turn % 2 * (unit / 8) + turn / 2;
}

// The numbers of a quad, of the columns from 8 v on.
template <Form F, int U, int QUAD>
ALWAYS_INLINE inline ints numbers_of(const uint8_t* unit, int v, const Table& table) {
    constexpr int LINE = 2 * sizeof(ints);
    const int place = v * int(sizeof(ints));
    if constexpr (bits_of(F) == 8) return load_ints(unit + place + QUAD * LINE);
    if constexpr (has_planes(F)) return joined_planes<F, U, QUAD>(high_plane<F, U>(unit, place), unit, place);
    const ints low = load_ints(unit + place + QUAD % (U / 8) * LINE);
    const ints numbers = (QUAD < U / 8 ? low : (ints)_mm256_srli_epi32((__m256i)low, 4)) & splat_ints(0x0f0f0f0f);
    return F == TABLE ? table.chosen(numbers) : numbers;
}

// Pairs of products in 16 bits.
template <Form F>
ALWAYS_INLINE inline __m256i pairs_of(ints weights, __m256i x) {
    if constexpr (F != TABLE) return _mm256_maddubs_epi16((__m256i)weights, x);
    return _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), _mm256_sign_epi8(x, (__m256i)weights));
}

// a + b, which the compiler leaves where it is.
ALWAYS_INLINE inline __m256i added_halves(__m256i a, __m256i b) {
    __m256i sum = _mm256_add_epi16(a, b);
    asm("" : "+x"(sum));
    return sum;
}
ALWAYS_INLINE inline __m256i added_ints(__m256i a, __m256i b) {
    __m256i sum = _mm256_add_epi32(a, b);
    asm("" : "+x"(sum));
    return sum;
}

// The sums of a unit's products: [row][vector of columns]. Numbers of 5 and 6 bits count less half of their range.
template <Form F, int U, int R>
ALWAYS_INLINE inline void multiply_unit(__m256i (&sums)[R][2], const uint8_t* weights, const int8_t* x,
                                        const int32_t* corrections, const Table& table) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (F != SHORT_BYTES)  // which lie in a cache
        for (int byte = 0; byte < 2 * U * bits_of(F); byte += 64) __builtin_prefetch(weights + byte + AHEAD);
    unrolled<U / 4>([&](auto turn) ALWAYS_INLINE {
        constexpr int TURN = decltype(turn)::value, QUAD = quad_of_turn(F, U, TURN);
        const ints numbers[2] = {numbers_of<F, U, QUAD>(weights, 0, table), numbers_of<F, U, QUAD>(weights, 1, table)};
        unrolled<R>([&](auto r) ALWAYS_INLINE {
            const __m256i quad = _mm256_set1_epi32(read_i32(x + r * U + QUAD * 4));
            unrolled<2>([&](auto v) ALWAYS_INLINE {
                const __m256i pairs = pairs_of<F>(numbers[v], quad);
                if constexpr (!has_halves(F)) {
                    const __m256i sum = _mm256_madd_epi16(pairs, ones);
                    sums[r][v] = TURN == 0 ? sum : added_ints(sums[r][v], sum);
                } else {
                    __m256i halves = pairs;
                    if constexpr (TURN > 0) halves = added_halves(sums[r][v], pairs);
                    else if constexpr (is_balanced(F)) halves = added_halves(_mm256_set1_epi32(corrections[r]), pairs);
                    sums[r][v] = TURN + 1 == U / 4 ? _mm256_madd_epi16(halves, ones) : halves;
                }
            });
        });
        asm("" : "+r"(x), "+r"(weights));
    });
}

// What both halves of a sum of a row's unit begin with.
inline int32_t balance_of(const int8_t* q, int64_t unit) {
    __m128i pairs = _mm_setzero_si128();
    for (int64_t k = 0; k < unit; k += 16)
        pairs = _mm_add_epi16(pairs, _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128((const __m128i*)(q + k))));
    pairs = _mm_add_epi16(pairs, _mm_unpackhi_epi64(pairs, pairs));
    pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 1));
    return _mm_cvtsi128_si32(_mm_mullo_epi16(pairs, _mm_set1_epi16(int16_t(-half_range(int(unit))))));
}

// -- groups --------------------------------------------------------------------------------------------------------

// What is yet to be read of a tile and of a block of rows.
struct Place {
    const uint8_t* weights;
    const int8_t* x;                 // as `Rows` has it, and so are the next three
    const float *x_scales, *x_parts;
    const int32_t* corrections;
    const float *scales, *minimums;  // [group][16]; minimums or null
    int64_t index;                   // of the zero points
};

// Adds `num_groups` groups of weights to totals [R][16]. `parts` has the shape of `totals`, and zeros.
template <Form F, int U, int R>
void add_groups(const Product& p, Place& at, int64_t num_groups, float* totals, float* parts) {
    const uint8_t* weights = at.weights;
    const int8_t* x = at.x;
    const float *x_scales = at.x_scales, *x_parts = at.x_parts, *scales = at.scales;
    const float* minimums = at.minimums ? at.minimums : scales;
    const int32_t* corrections = at.corrections;
    int64_t left = p.x_groups_in_group;
    bool has_minimums = at.minimums, is_simple = left == 1 && has_minimums, begins_at_0 = p.added == 0;
    const auto for_rows = [&](const auto& add) ALWAYS_INLINE {
        unrolled<R>([&](auto r) ALWAYS_INLINE {
            add(r);
            asm("" : "+r"(totals), "+r"(parts), "+r"(x_scales), "+r"(x_parts), "+r"(corrections));
        });
    };
    for (int64_t group = 0; group < num_groups;) {
        __m256i sums[R][2];
        multiply_unit<F, U, R>(sums, weights, x, corrections, p.table);
        weights += 2 * U * bits_of(F), x += R * U;
        asm("" : "+r"(has_minimums), "+r"(is_simple), "+r"(begins_at_0));  // or GCC would make a loop for each
        // Adds part_of(row, vector, scale of the row's activations) times the scales.
        const auto add_group = [&](const auto& part_of, auto with_minimums) ALWAYS_INLINE {
            const __m256 own[2] = {_mm256_loadu_ps(scales), _mm256_loadu_ps(scales + WIDTH)};
            for_rows([&](auto r) ALWAYS_INLINE {
                const __m256 x_scale = _mm256_set1_ps(x_scales[r]), x_part = _mm256_set1_ps(x_parts[r]);
                unrolled<2>([&](auto v) ALWAYS_INLINE {
                    float* total = totals + (r * 2 + v) * WIDTH;
                    __m256 sum = _mm256_fmadd_ps(part_of(r, v, x_scale), own[v], _mm256_load_ps(total));
                    if (with_minimums) sum = _mm256_fmadd_ps(_mm256_loadu_ps(minimums + v * WIDTH), x_part, sum);
                    _mm256_store_ps(total, sum);
                });
            });
        };
        const auto only_part = [&](auto r, auto v, __m256 x_scale)
                                   ALWAYS_INLINE { return _mm256_cvtepi32_ps(sums[r][v]) * x_scale; };
        const auto add_part = [&](auto r, auto v, __m256 x_scale) ALWAYS_INLINE {
            const __m256 part = _mm256_load_ps(parts + (r * 2 + v) * WIDTH);
            return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][v]), x_scale, part);
        };
        const auto add_to_sums = [&](const auto& of) ALWAYS_INLINE {
            for_rows([&](auto r) ALWAYS_INLINE {
                unrolled<2>([&](auto v) ALWAYS_INLINE { sums[r][v] = added_ints(sums[r][v], of(r, v)); });
            });
        };
        if constexpr (is_balanced(F)) {  // groups of one unit, without zero points
            if (begins_at_0)
                add_to_sums([&](auto r, auto) ALWAYS_INLINE {
                    return _mm256_madd_epi16(_mm256_set1_epi32(corrections[r]), _mm256_set1_epi16(-1));
                });
            has_minimums ? add_group(only_part, std::true_type{}) : add_group(only_part, std::false_type{});
        } else if (is_simple) {
            add_group(only_part, std::true_type{});
        } else {
            if (F == NIBBLES && p.zeros) {
                const int64_t index = at.index + group * COLUMNS;
                const ints zeros[2] = {load_zeros<F>(p.zeros, index), load_zeros<F>(p.zeros, index + WIDTH)};
                add_to_sums([&](auto r, auto v) ALWAYS_INLINE {
                    return (__m256i)multiply_pairs(zeros[v], corrections[r]);
                });
            } else if (F != TABLE && p.added) {
                add_to_sums([&](auto r, auto) ALWAYS_INLINE { return _mm256_set1_epi32(corrections[r]); });
            }
            if (p.x_groups_in_group == 1) {
                add_group(only_part, std::false_type{});
            } else if (--left > 0) {
                for_rows([&](auto r) ALWAYS_INLINE {
                    const __m256 x_scale = _mm256_set1_ps(x_scales[r]);
                    unrolled<2>([&](auto v) ALWAYS_INLINE {
                        _mm256_store_ps(parts + (r * 2 + v) * WIDTH, add_part(r, v, x_scale));
                    });
                });
                x_scales += R, corrections += R;
                continue;
            } else {
                has_minimums ? add_group(add_part, std::true_type{}) : add_group(add_part, std::false_type{});
                for_each<R, 2>([&](auto r, auto v) ALWAYS_INLINE {
                    _mm256_store_ps(parts + (r * 2 + v) * WIDTH, __m256{});
                });
                left = p.x_groups_in_group;
            }
        }
        group++, x_scales += R, corrections += R, x_parts += R, scales += COLUMNS, minimums += COLUMNS;
    }
    at.weights = weights, at.x = x, at.x_scales = x_scales, at.x_parts = x_parts, at.corrections = corrections;
    at.index += num_groups * COLUMNS;
}

// Groups whose scales are converted to fp32 at a time, if they have another type.
constexpr int64_t GROUPS_AT_ONCE = 16;

template <Form F, int U, int V, int R>
void unit_product(const Product& p, const Tile& tile, const Rows& rows, int64_t first_row, void* out, bool is_bf16) {
    static_assert(F != BYTES && V * WIDTH == COLUMNS);
    alignas(32) floats totals[R][V] = {}, parts[R][V] = {};
    float *all_totals = reinterpret_cast<float*>(totals), *all_parts = reinterpret_cast<float*>(parts);
    Place at{tile.weights, rows.q, rows.scales, rows.parts, rows.corrections, nullptr, nullptr,
             tile.number * p.num_groups * COLUMNS};
    if (tile.scales.type == FP32) {
        at.scales = static_cast<const float*>(tile.scales.numbers) + tile.index;
        if (tile.minimums.numbers) at.minimums = static_cast<const float*>(tile.minimums.numbers) + tile.index;
        add_groups<F, U, R>(p, at, p.num_groups, all_totals, all_parts);
    } else {
        alignas(32) float scales[GROUPS_AT_ONCE * COLUMNS], minimums[GROUPS_AT_ONCE * COLUMNS];
        for (int64_t group = 0; group < p.num_groups; group += GROUPS_AT_ONCE) {
            const int64_t count = std::min(GROUPS_AT_ONCE, p.num_groups - group);
            const int64_t index = tile.index + group * COLUMNS;
            tile.scales.widen(index, count * COLUMNS, scales), at.scales = scales;
            if (tile.minimums.numbers) tile.minimums.widen(index, count * COLUMNS, minimums), at.minimums = minimums;
            add_groups<F, U, R>(p, at, count, all_totals, all_parts);
        }
    }
    store_tile<V, R>(p, tile.number * COLUMNS, first_row, totals, out, is_bf16);
}

}  // namespace int_product
#endif
