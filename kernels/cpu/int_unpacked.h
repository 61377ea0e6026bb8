// Tiles of int_product.h as several blocks of rows read them: they are unpacked once for all.
#pragma once

#include <algorithm>

namespace int_product {

constexpr Form in_bytes(Form f) { return f == FIVES || f == SIXES ? SHORT_BYTES : f; }

// Whether scales of a type become fp32 for several blocks of rows.
constexpr bool is_widened([[maybe_unused]] Form f, ScaleType type) {
#if defined(INT_DOT_AVX2)
    if (f != BYTES) return type != FP32;
#endif
    return type >= INT8;
}

// Tiles for several blocks of rows: numbers of 5 and 6 bits in bytes, and some scales in fp32. Numbers of 2 and 3 bits
// stay in planes, which are about as fast as nibbles.
template <Form F, int U>
class UnpackedTiles {
    const Product& p;
    const int64_t num_bytes, num_values;
    const Scratch scratch;

  public:
    // `has_pairs`: pairs of tiles take scales of fp32 alone.
    UnpackedTiles(const Product& p, int64_t count, bool has_pairs)
        : p(p),
          num_bytes(in_bytes(F) != F ? p.num_units * U * COLUMNS : 0),
          num_values(is_widened(F, p.scales.type) || (has_pairs && p.scales.type != FP32) ? p.num_groups * COLUMNS : 0),
          scratch(std::max<int64_t>(count * (num_bytes + 2 * num_values * int64_t(sizeof(float))), 1)) {}

    Tile unpack(Tile tile, int64_t place) const {
        int8_t* to = scratch.bytes + place * (num_bytes + 2 * num_values * int64_t(sizeof(float)));
        if constexpr (in_bytes(F) != F) {
            unpack_weights(tile.weights, to);
            tile.weights = reinterpret_cast<const uint8_t*>(to);
        }
        if (!num_values) return tile;
        float* values = reinterpret_cast<float*>(to + num_bytes);
        for (Values* own : {&tile.scales, &tile.minimums}) {
            if (!own->numbers) continue;
            own->widen(tile.index, num_values, values);
            *own = {values, FP32, nullptr, 0}, values += num_values;
        }
        tile.index = 0;
        return tile;
    }

  private:
    void unpack_weights(const uint8_t* from, int8_t* to) const {
        constexpr int LINE = COLUMNS * 4;
        for (int64_t unit = 0; unit < p.num_units; unit++, from += U * COLUMNS * bits_of(F) / 8, to += U * COLUMNS)
            for (int byte = 0; byte < LINE; byte += int(sizeof(ints))) {
                for (int line = 0; line < U / 8; line++) __builtin_prefetch(from + line * LINE + byte + AHEAD);
                const ints high = high_plane<F, U>(from, byte);
                unrolled<U / 4>([&](auto quad) ALWAYS_INLINE {
                    constexpr int QUAD = decltype(quad)::value;
                    const ints numbers = joined_planes<F, U, QUAD>(high, from, byte);
                    std::memcpy(to + QUAD * LINE + byte, &numbers, sizeof numbers);
                });
            }
    }
};

}  // namespace int_product
