// Tiles of AMX: eight registers of up to 16 rows of 64 bytes, if the compiler may use them (`HAS_TILES`).
#pragma once

#include <cstdint>

#if !defined(__AMX_TILE__)
#define HAS_TILES 0
#else
#include <immintrin.h>
#define HAS_TILES 1

namespace tiles {

constexpr int MAX_ROWS = 16;
constexpr int ROW_BYTES = 64;

// Keeps the compiler from moving stores behind the tile loads that read them: to GCC 12 those read no memory.
inline void wait_for_stores() { asm volatile("" ::: "memory"); }

// The rows of each tile, as LDTILECFG reads them. Every row has 64 bytes.
struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows) { row_bytes[tile] = ROW_BYTES, rows[tile] = uint8_t(num_rows); }
};

// Gives this thread tiles, and releases them at the end of the scope: a thread that holds tiles costs the system more
// at every switch.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    // Clears all tiles.
    void set(const Shape& shape) {
        asm volatile("" ::"r"(&shape) : "memory");  // to GCC 12 LDTILECFG reads eight bytes, and not all 64
        _tile_loadconfig(&shape);
    }
};

}  // namespace tiles
#endif
