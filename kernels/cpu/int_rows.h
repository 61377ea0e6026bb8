// Rows of a matrix of int_product.h, dequantized: an embedding reads those of its tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/int_product.h"

namespace int_product {

// The number of input k in column `column` of a tile.
template <Form F, int U>
inline int number_of(const Product& p, const uint8_t* weights, int64_t column, int64_t k) {
    constexpr int LINE = COLUMNS * 4, LOW = low_bits(F), HIGH = has_planes(F) ? high_bits(F) : 0;
    const uint8_t* unit = weights + k / U * U * COLUMNS * bits_of(F) / 8;
    const int quad = int(k % U / 4), place = int(column * 4 + k % 4);
    if (F == BYTES) return int8_t(unit[quad * LINE + place] ^ ADDED);
    constexpr int LINES = low_lines(F, U);
    const uint8_t several = unit[U * COLUMNS * HIGH / 8 + quad % LINES * LINE + place];
    if (F == THREES) {
        const int high = unit[place % 32] >> place / 32 * 4 & 15;
        return (quad < 2 ? several >> 3 * quad & 7 : quad == 2 ? several >> 6 | (high >> 1 & 4) : high & 7) - p.added;
    }
    const int low = several >> quad / LINES * LOW & ((1 << LOW) - 1);
    if (F == TABLE) return p.table.values[low];
    return (low | (unit[place] >> quad * HIGH & ((1 << HIGH) - 1)) << LOW) - p.added;
}

// Writes row `row` of W, which has no zero points: scale * number + minimum, each rounded to fp32.
template <Form F, int U>
void write_row(const Product& p, int64_t row, float* out) {
    const Tile tile = Tile::of<F, COLUMNS>(p, row / COLUMNS);
    const int64_t column = row % COLUMNS;
    for (int64_t k = 0; k < p.in_size; k++) {
        const int64_t index = tile.index + k / p.group_size * COLUMNS + column / WIDTH * WIDTH;
        const float number = number_of<F, U>(p, tile.weights, column, k) * p.worth;
        out[k] = tile.scales.at(index)[column % WIDTH] * number;
        if (tile.minimums.numbers) out[k] += tile.minimums.at(index)[column % WIDTH];
    }
}

// The rows of W with these ids, rounded to fp32 (0), bf16 (1) or fp16 (2), and then in fp32 or bf16. A row that W lacks
// becomes all ones in its bits: NaN.
template <class Write>
void write_rows(const Product& p, const int64_t* ids, void* out, bool is_bf16, int64_t rounding, const Write& write) {
    std::vector<float> row(p.in_size + LANES);
    const int64_t row_bytes = p.in_size * (is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < p.num_rows; i++) {
        char* place = static_cast<char*>(out) + i * row_bytes;
        if (ids[i] < 0 || ids[i] >= p.out_size) {
            std::memset(place, 0xff, size_t(row_bytes));
            continue;
        }
        write(p, ids[i], row.data());
        for (int64_t k = 0; k < p.in_size; k += LANES) {
            const int count = int(std::min<int64_t>(LANES, p.in_size - k));
            vf values = simd::load(row.data() + k);
            if (rounding == 1) values = simd::widen(simd::narrow(values));
            if (rounding == 2)
                for (int l = 0; l < LANES; l++) values[l] = float(_Float16(values[l]));
            if (is_bf16)
                store_first(reinterpret_cast<simd::bf16*>(place) + k, values, count);
            else
                store_first(reinterpret_cast<float*>(place) + k, values, count);
        }
    }
}

}  // namespace int_product
