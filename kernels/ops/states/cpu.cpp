// Copies the state of one place of a pool to another, and rows of a matrix: see `__init__.py`.
//
// torch's copy waits for a thread that the system may not run for a while, because others are busy. These threads take
// each other's pieces (parallel.cpp).

#include <algorithm>
#include <cstring>

#include "cpu/call.h"
#include "cpu/parallel.h"

namespace {

constexpr int64_t PIECE_BYTES = 1 << 18;

}  // namespace

// pool [num_layers, places], a place of `num_bytes` and a layer of `layer_bytes`.
static void copy_state(char* pool, int64_t num_layers, int64_t layer_bytes, int64_t num_bytes, int64_t source,
                       int64_t goal, int64_t num_threads) {
    const int64_t pieces = (num_bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    const int64_t team = num_layers * num_bytes < 2 * PIECE_BYTES ? 1 : num_threads;
    parallel_for(num_layers * pieces, team, [&](int64_t turn) {
        char* layer = pool + turn / pieces * layer_bytes;
        const int64_t start = turn % pieces * PIECE_BYTES, size = std::min(PIECE_BYTES, num_bytes - start);
        std::memcpy(layer + goal * num_bytes + start, layer + source * num_bytes + start, size);
    });
}
INFERD_EXPORT(copy_state)

// kept [.., row_bytes], source [.., row_bytes], indices [num_rows].
static void keep_rows(const char* source, char* kept, int64_t row_bytes, const int64_t* indices,
                      const int64_t* num_rows) {
    for (int64_t i = 0; i < *num_rows; i++)
        std::memcpy(kept + i * row_bytes, source + indices[i] * row_bytes, row_bytes);
}
INFERD_EXPORT(keep_rows)
