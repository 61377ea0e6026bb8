// The rows of a step whose heads keep a state [key_dim, value_dim], which advances token by token. The columns of a
// state do not see each other. So a thread takes some columns of one head of a row through all its tokens, with these
// columns in its first-level cache. If a row has one token, a thread takes all columns of a head in memory, because they
// lie one after another there.
#pragma once

#include <cstring>
#include <type_traits>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace recurrence {

using namespace simd;

constexpr int MAX_KEY_DIM = 256;
#if defined(__AVX512F__)
constexpr int MOST = 8;  // vectors of columns whose sums fit in registers: two of each, and its change
#else
constexpr int MOST = 2;
#endif

struct Rows {
    float* state;  // [slots, heads, key_dim, value_dim]
    const int32_t* query_start;  // [num_rows + 1]
    const int64_t* positions;  // [tokens]
    const int64_t* slots;  // [num_rows], -1 for padding
    const int32_t* num_kept;  // [num_rows]: tokens of a row behind which its state is left; null for all
    int64_t num_rows, heads, key_dim, value_dim;
};

// Vectors of one token's columns: widened on the way in, rounded on the way out.
template <class T>
inline floats load_columns(const T* from) {
    const vf wide = load(from);
    return load_floats(&wide);
}
template <class T>
inline void store_columns(T* to, floats columns) {
    float wide[LANES];
    store(static_cast<void*>(wide), columns);
    store(to, load(wide));
}

// W vectors of columns, from `column` on, of one head of a row.
template <int W, class Advance>
void run_columns(const Rows& rows, int64_t row, int64_t head, int64_t column, const Advance& advance) {
    const int64_t first = rows.query_start[row], end = rows.query_start[row + 1], size = rows.value_dim;
    float* kept = rows.state + (rows.slots[row] * rows.heads + head) * rows.key_dim * size + column;
    alignas(64) float state[MAX_KEY_DIM * W * LANES];
    constexpr size_t BYTES = W * LANES * sizeof(float);
    const bool begins = rows.positions[first] == 0;
    for (int64_t i = 0; i < rows.key_dim; i++) {
        if (begins) std::memset(state + i * W * LANES, 0, BYTES);
        else std::memcpy(state + i * W * LANES, kept + i * size, BYTES);
    }
    const int64_t last = (rows.num_kept ? first + rows.num_kept[row] : end) - 1;
    for (int64_t token = first; token < end; token++) {
        advance(std::integral_constant<int, W>(), state, W * LANES, token, head, column);
        if (token != last) continue;
        for (int64_t i = 0; i < rows.key_dim; i++) std::memcpy(kept + i * size, state + i * W * LANES, BYTES);
    }
}

// The same in place for a row with one token, from `column` on. Takes up to V vectors at a time. A decode
// of 8 rows of Qwen3.5-0.8B took 820 us a layer by two vectors, and takes 345 by eight, at 49 GB/s (2 cores, Zen 4,
// 2026-11-26).
template <int W, int V, class Advance>
void run_one(const Rows& rows, int64_t row, int64_t head, int64_t column, const Advance& advance) {
    const int64_t first = rows.query_start[row], size = rows.value_dim;
    float* state = rows.state + (rows.slots[row] * rows.heads + head) * rows.key_dim * size;
    for (; column + V * LANES <= size; column += V * LANES) {
        if (rows.positions[first] == 0)
            for (int64_t i = 0; i < rows.key_dim; i++)
                std::memset(state + i * size + column, 0, V * LANES * sizeof(float));
        advance(std::integral_constant<int, V>(), state + column, size, first, head, column);
    }
    if constexpr (V > W) run_one<W, V / 2>(rows, row, head, column, advance);
}

template <int W, class Advance>
void run_pieces(const Rows& rows, int64_t num_threads, const Advance& advance) {
    const int64_t pieces = rows.value_dim / (W * LANES);
    parallel_for_dynamic(rows.num_rows * rows.heads * pieces, num_threads, [&](int64_t turn) {
        const int64_t row = turn / (rows.heads * pieces), head = turn / pieces % rows.heads, piece = turn % pieces;
        if (rows.slots[row] < 0) return;
        const int64_t num_tokens = rows.query_start[row + 1] - rows.query_start[row];
        if (num_tokens > 1) run_columns<W>(rows, row, head, piece * W * LANES, advance);
        else if (num_tokens == 1 && piece == 0) run_one<W, MOST>(rows, row, head, 0, advance);
    });
}

// Calls advance(W as a constant, state, stride, token, head, column) for each token of each row, in order, for all
// columns of all heads. It advances W vectors of columns of a state, from `column` on, with `stride` numbers from key to
// key.
template <class Advance>
void run(const Rows& rows, int64_t num_threads, const Advance& advance) {
    if (rows.value_dim % (2 * LANES) == 0) run_pieces<2>(rows, num_threads, advance);
    else run_pieces<1>(rows, num_threads, advance);
}

}  // namespace recurrence
