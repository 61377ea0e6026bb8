// Packs the numbers of a matrix into the tiles of int_product.h.
#pragma once

#include "cpu/int_lanes.h"
#include "cpu/parallel.h"

namespace int_product {

// Packs q [out_size, in_size] into tiles, with weights of 0 behind the ends. `added` makes numbers in planes unsigned.
template <Form F>
void pack(const uint8_t* q, int64_t out_size, int64_t in_size, int64_t unit, int64_t columns, int32_t added,
          uint8_t* tiles, int num_threads) {
    const int64_t num_tiles = (out_size + columns - 1) / columns, num_units = (in_size + unit - 1) / unit;
    constexpr int LOW = low_bits(F), HIGH = has_planes(F) ? high_bits(F) : 0;
    const int64_t unit_bytes = columns * unit * bits_of(F) / 8;
    const int64_t lines = F == BYTES ? unit / 4 : low_lines(F, int(unit));
    const int32_t flipped = F == BYTES ? int32_t(ADDED * 0x01010101u) : 0;
    parallel_for(num_tiles * num_units, num_threads, [&](int64_t turn) {
        const int64_t tile = turn / num_units, first = turn % num_units * unit;
        const int64_t count = in_size - first < unit ? in_size - first : unit;
        uint8_t* to = tiles + turn * unit_bytes;
        for (int64_t column = 0; column < columns; column++) {
            uint8_t from[32] = {}, high[4] = {};
            const int64_t row = tile * columns + column;
            if (row < out_size) std::memcpy(from, q + row * in_size + first, count);
            for (int64_t i = 0; has_planes(F) && i < unit; i++) from[i] = (from[i] + added) & ((1 << bits_of(F)) - 1);
            if constexpr (F == THREES)
                for (int64_t b = 0; b < 4; b++) {
                    const int both = from[12 + b] | from[8 + b] >> 2 << 3, place = column % 8 * 4 + b;
                    to[place] = uint8_t(column < 8 ? both : to[place] | both << 4);
                    from[b] |= from[4 + b] << 3 | from[8 + b] << 6;
                }
            else if constexpr (HIGH > 0) {
                for (int64_t i = 0; i < unit; i++) high[i % 4] |= from[i] >> LOW << i / 4 * HIGH, from[i] &= 15;
                std::memcpy(to + column * 4, high, sizeof high);
            }
            uint8_t* low = to + columns * unit * HIGH / 8;
            for (int64_t j = 0; j < lines; j++) {
                int32_t quad = read_i32(from + j * 4) ^ flipped;
                for (int64_t turn = 1; F != THREES && turn < unit / 4 / lines; turn++)
                    quad |= read_i32(from + (turn * lines + j) * 4) << turn * LOW;
                std::memcpy(low + (j * columns + column) * 4, &quad, sizeof quad);
            }
        }
    });
}

}  // namespace int_product
