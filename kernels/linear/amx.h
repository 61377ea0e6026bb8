// Products of bfloat16 with AMX. A tile holds 16 rows by 32 of K of the activations, or 32 of K by 16 columns of the
// weights; both are 1 KiB. An instruction adds their product to 16 x 16 sums.
//
// A step is 32 of K. The instruction sums a step's even and its odd places in two chains, from 0, and adds both chains'
// sum to the sum so far. Steps follow each other in order, so a row's bits depend on that row alone. Sums that wait in
// memory are fp32, which changes nothing.
//
// Weights: panels of up to 2 x 16 columns; a panel is a step after the other, each with its columns' tiles. Activations
// are copied to the same form: blocks of 2 x 16 rows. So a product reads memory from end to end, and no two rows of a
// tile meet in the cache.
#pragma once

#include "amx_tiles.h"

#if HAS_TILES
#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "simd.h"

namespace amx {

using namespace simd;

constexpr int64_t STEP = 32;           // of K
constexpr int VECTORS = 2;             // of a panel
constexpr int64_t COLUMNS = VECTORS * LANES;
constexpr int64_t BLOCK = 2 * tiles::MAX_ROWS;  // rows
constexpr int64_t TILE_BYTES = 1024, BLOCK_BYTES = 2 * TILE_BYTES;

// Steps whose weights stay in the first-level cache while blocks of rows pass: 16 KiB. With 32 KiB 512 rows took 1.3
// times as long (Intel Xeon, 2026-11-23).
constexpr int64_t NEAR_STEPS = 8;
// Steps, and steps times blocks of rows, whose activations stay in the second-level cache while panels pass: 1 MiB.
constexpr int64_t FAR_STEPS = 64, FAR_BLOCK_STEPS = 512;
constexpr int64_t MOST_PANELS = 16;  // of one turn, if their sums wait in memory
constexpr int64_t BLOCKS_TOGETHER = 2;  // of one piece of work if there are more threads than panels

inline int64_t steps_of(int64_t k) { return (k + STEP - 1) / STEP; }

struct Problem {
    const bf16* x;
    const void* packed;
    int64_t rows, x_stride, k, n;
    int64_t steps() const { return steps_of(k); }
    int64_t panels() const { return (n + COLUMNS - 1) / COLUMNS; }
};

// Copies 32 rows to their block. The last step ends with zeros.
inline void pack_rows(const Problem& p, int64_t first, char* place) {
    const int64_t num = std::min(BLOCK, p.rows - first);
    const bf16* from = p.x + first * p.x_stride;
    for (int64_t at = 0; at < p.k; at += STEP, place += BLOCK_BYTES) {
        const int64_t left = std::min(STEP, p.k - at);
        for (int64_t row = 0; row < num; row++) {
            const bf16* part = from + row * p.x_stride + at;
            char* to = place + row * tiles::ROW_BYTES;
            if (left == STEP) store_i(to, load_i(part));
            else store_i(to, vi{}), std::memcpy(to, part, left * sizeof(bf16));
        }
    }
}

// Adds `steps` products to tiles 0 and 1, of the first 16 rows, and to tiles 2 and 3 of the others. Prefetches `lines`
// cache lines a step.
template <bool HAS_SECOND, int V>
inline void multiply(const char* rows, const char* columns, int64_t steps, const char* ahead, int64_t lines) {
    for (int64_t step = 0; step < steps; step++, rows += BLOCK_BYTES, columns += V * TILE_BYTES) {
        _tile_loadd(6, columns, tiles::ROW_BYTES);
        _tile_loadd(4, rows, tiles::ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (V == 2) {
            _tile_loadd(7, columns + TILE_BYTES, tiles::ROW_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (HAS_SECOND) {
            _tile_loadd(5, rows + TILE_BYTES, tiles::ROW_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            if (V == 2) _tile_dpbf16ps(3, 5, 7);
        }
        for (int64_t i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    }
}

template <bool HAS_SECOND, int V>
inline void clear_sums() {
    _tile_zero(0);
    if (V == 2) _tile_zero(1);
    if (HAS_SECOND) _tile_zero(2);
    if (HAS_SECOND && V == 2) _tile_zero(3);
}

template <bool HAS_SECOND, int V>
inline void load_sums(const float* sums) {
    constexpr int64_t BYTES = COLUMNS * sizeof(float);
    _tile_loadd(0, sums, BYTES);
    if (V == 2) _tile_loadd(1, sums + LANES, BYTES);
    if (HAS_SECOND) _tile_loadd(2, sums + LANES * COLUMNS, BYTES);
    if (HAS_SECOND && V == 2) _tile_loadd(3, sums + LANES * COLUMNS + LANES, BYTES);
}

template <bool HAS_SECOND, int V>
inline void store_sums(float* sums) {
    constexpr int64_t BYTES = COLUMNS * sizeof(float);
    _tile_stored(0, sums, BYTES);
    if (V == 2) _tile_stored(1, sums + LANES, BYTES);
    if (HAS_SECOND) _tile_stored(2, sums + LANES * COLUMNS, BYTES);
    if (HAS_SECOND && V == 2) _tile_stored(3, sums + LANES * COLUMNS + LANES, BYTES);
}

// One thread's products of some panels and some blocks of rows. Put(row, column, sums) takes the finished sums of
// a row and a panel.
template <class Put>
class Work {
  public:
    Work(const Problem& p, const char* packed_rows, float* sums, const Put& put)
        : p_(p), packed_rows_(packed_rows), sums_(sums), put_(put) {}

    // Blocks of packed rows, counted from `first_row`, the row of block 0.
    void run(int64_t first_panel, int64_t end_panel, int64_t first_block, int64_t end_block, int64_t first_row) {
        first_row_ = first_row, first_block_ = first_block, end_block_ = end_block;
        const int64_t steps = p_.steps();
        const int64_t panel_sums = steps > FAR_STEPS ? (end_block - first_block) * BLOCK * COLUMNS : 0;
        for (int64_t step = 0; step < steps; step += FAR_STEPS)
            for (int64_t panel = first_panel; panel < end_panel; panel++)
                multiply_panel(panel, step, std::min(steps, step + FAR_STEPS), sums_ + (panel - first_panel) * panel_sums);
    }

  private:
    const Problem& p_;
    const char* packed_rows_;
    float* sums_;
    const Put& put_;
    tiles::Tiles tiles_;
    int64_t first_row_, first_block_, end_block_;
    int64_t rows_set_ = 0;

    int64_t rows_of(int64_t block) const { return std::min(BLOCK, p_.rows - first_row_ - block * BLOCK); }

    void multiply_panel(int64_t panel, int64_t first_step, int64_t end_step, float* sums) {
        const bool is_part = rows_of(end_block_ - 1) < BLOCK;
        const int64_t num_whole = end_block_ - first_block_ - is_part;
        const int64_t count = end_step - first_step;
        const int64_t parts = num_whole > 1 ? std::max<int64_t>(1, (count + NEAR_STEPS / 2) / NEAR_STEPS) : 1;
        for (int64_t part = 0; part < parts; part++)
            for (int64_t i = 0; i < num_whole; i++)
                multiply_block(panel, i, num_whole, first_step + count * part / parts,
                               first_step + count * (part + 1) / parts, sums);
        // By itself, because another number of rows takes another shape of tiles.
        if (is_part) multiply_block(panel, num_whole, 1, first_step, end_step, sums);
    }

    void multiply_block(int64_t panel, int64_t index, int64_t num, int64_t first_step, int64_t end_step, float* sums) {
        const int64_t rows = rows_of(first_block_ + index);
        set_rows(rows);
        const bool is_narrow = p_.n - panel * COLUMNS <= LANES, has_second = rows > LANES;
        const auto multiply = has_second ? is_narrow ? &Work::run_block<true, 1> : &Work::run_block<true, 2>
                                         : is_narrow ? &Work::run_block<false, 1> : &Work::run_block<false, 2>;
        (this->*multiply)(panel, index, num, first_step, end_step, sums + index * BLOCK * COLUMNS);
    }

    // `num` blocks read the same weights; together they prefetch those of the next panel.
    template <bool HAS_SECOND, int V>
    void run_block(int64_t panel, int64_t index, int64_t num, int64_t first_step, int64_t end_step, float* sums) {
        const int64_t steps = p_.steps(), count = end_step - first_step, block = first_block_ + index;
        const char* rows = packed_rows_ + (block * steps + first_step) * BLOCK_BYTES;
        const char* columns = static_cast<const char*>(p_.packed) + panel * steps * VECTORS * TILE_BYTES;
        columns += first_step * V * TILE_BYTES;
        constexpr int64_t STEP_LINES = V * TILE_BYTES / 64;
        const int64_t share = num > 1 ? (STEP_LINES + num - 1) / num : 0, fetched = index * share;
        const char* ahead = columns + steps * V * TILE_BYTES + fetched * count * 64;
        tiles::wait_for_stores();
        first_step ? load_sums<HAS_SECOND, V>(sums) : clear_sums<HAS_SECOND, V>();
        multiply<HAS_SECOND, V>(rows, columns, count, ahead, std::clamp<int64_t>(STEP_LINES - fetched, 0, share));
        store_sums<HAS_SECOND, V>(sums);
        if (end_step < steps) return;
        for (int64_t row = 0, end = rows_of(block); row < end; row++)
            put_(first_row_ + block * BLOCK + row, panel * COLUMNS, sums + row * COLUMNS);
    }

    void set_rows(int64_t rows) {
        if (rows == rows_set_) return;
        rows_set_ = rows;
        const int first = int(std::min<int64_t>(rows, LANES)), second = int(std::max<int64_t>(rows - LANES, 1));
        tiles::Shape shape;
        for (int tile : {0, 1, 4}) shape.set(tile, first);
        for (int tile : {2, 3, 5}) shape.set(tile, second);
        for (int tile : {6, 7}) shape.set(tile, tiles::MAX_ROWS);
        tiles_.set(shape);
    }
};

template <class Put>
void run(const Problem& p, int num_threads, const Put& put) {
    static thread_local Buffer<char> packed_rows;
    const int64_t steps = p.steps(), panels = p.panels(), all_blocks = (p.rows + BLOCK - 1) / BLOCK;
    const int64_t far_blocks = FAR_BLOCK_STEPS / std::min(steps, FAR_STEPS);
    const int64_t most_panels = steps > FAR_STEPS ? MOST_PANELS : panels;
    // One thread takes neighbouring panels, in four turns: if it is held up, others take some of its turns.
    const int64_t turn = std::clamp<int64_t>(panels / (4 * num_threads), 1, most_panels);
    const int64_t turns = (panels + turn - 1) / turn;
    for (int64_t first = 0; first < all_blocks; first += far_blocks) {
        const int64_t blocks = std::min(far_blocks, all_blocks - first);
        packed_rows.resize(std::max<size_t>(packed_rows.size(), blocks * steps * BLOCK_BYTES));
        char* place = packed_rows.data();
        parallel_for(blocks, num_threads, [&](int64_t block) {
            pack_rows(p, (first + block) * BLOCK, place + block * steps * BLOCK_BYTES);
        });
        const int64_t together = panels >= 2 * num_threads ? blocks : BLOCKS_TOGETHER;
        const int64_t pieces = (blocks + together - 1) / together;
        const int team = int(std::min<int64_t>(num_threads, turns * pieces));
        parallel_for_dynamic(turns * pieces, team, [&](int64_t i) {
            static thread_local Buffer<float> sums;
            const int64_t begin = i % pieces * together, end = std::min(blocks, begin + together);
            const int64_t panel = i / pieces * turn, end_panel = std::min(panels, panel + turn);
            const size_t needed = (steps > FAR_STEPS ? end_panel - panel : 1) * (end - begin) * BLOCK * COLUMNS;
            sums.resize(std::max(sums.size(), needed));
            Work<Put>(p, place, sums.data(), put).run(panel, end_panel, begin, end, first * BLOCK);
        });
    }
}

}  // namespace amx
#endif
