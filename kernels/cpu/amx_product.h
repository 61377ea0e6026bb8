// Products with AMX, of bfloat16 or of bytes. A tile holds 16 rows by a step of K of the activations, or a step of K by 16
// columns of the weights; both are 1 KiB. An instruction adds their product to 16 x 16 sums.
//
// The sums of bytes are exact. Of bfloat16 the instruction sums a step's even and its odd places in two chains, from 0,
// and adds both chains' sum to the sum so far. Steps follow each other in order, so a row's bits depend on that row
// alone. Sums that wait in memory have 32 bits, which changes nothing.
//
// Weights: panels of up to 2 x 16 columns; a panel is a step after the other. Activations are copied to blocks of
// 2 x 16 rows, each a step after the other, with its rows' tiles. So a product reads memory from end to end, and no two
// rows of a tile meet in the cache.
#pragma once

#include "cpu/amx_tiles.h"

#if HAS_TILES
#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace amx {

using namespace simd;

// A panel of bfloat16 has each step's tiles of columns one after the other.
struct Bf16 {
    typedef float Sum;
    static constexpr bool IS_WIDE = false;
    static constexpr int64_t STEP = 32;                             // of K
    static constexpr int64_t STRIDE = 64, NEXT = STRIDE * LANES;  // between rows of a tile, and to the next columns
};
// One of bytes has them side by side, as int_product.h stores them. Weights are unsigned. Activations are signed and have
// two bytes: a block is 16 rows of high bytes, then the low bytes of the same rows.
struct WideBytes {
    typedef int32_t Sum;
    static constexpr bool IS_WIDE = true;
    static constexpr int64_t STEP = 64, STRIDE = 128, NEXT = 64;
};

constexpr int VECTORS = 2;             // of a panel
constexpr int64_t COLUMNS = VECTORS * LANES;
constexpr int64_t BLOCK = 2 * tiles::MAX_ROWS;  // rows of tiles
constexpr int64_t TILE_BYTES = 1024, BLOCK_BYTES = 2 * TILE_BYTES;

// Steps whose weights stay in the first-level cache while blocks of rows pass: 16 KiB. With 32 KiB 512 rows took 1.3
// times as long (Intel Xeon, 2026-11-23).
constexpr int64_t NEAR_STEPS = 8;
// Steps, and steps times blocks of rows, whose activations stay in the second-level cache while panels pass: 1 MiB.
constexpr int64_t FAR_STEPS = 64, FAR_BLOCK_STEPS = 512;
// Bytes that a lone block prefetches, because the processor's own prefetching stops at each page: 32 rows by 1,024 x 4,096
// take 0.34 ms instead of 0.39 (Intel Xeon, 2026-11-24).
constexpr int64_t AHEAD = 4096;
constexpr int64_t MOST_PANELS = 16;  // of one turn, if their sums wait in memory
constexpr int64_t BLOCKS_TOGETHER = 2;  // of one piece of work if there are more threads than panels

struct Problem {
    const void* packed;
    int64_t rows, steps, n;
    int64_t panels() const { return (n + COLUMNS - 1) / COLUMNS; }
};

// Copies rows to a block: `num` rows of `k` bfloat16. The last step ends with zeros.
inline void pack_rows(const bf16* from, int64_t stride, int64_t num, int64_t k, char* place) {
    for (int64_t at = 0; at < k; at += Bf16::STEP, place += BLOCK_BYTES) {
        const int64_t left = std::min(Bf16::STEP, k - at);
        for (int64_t row = 0; row < num; row++) {
            const bf16* part = from + row * stride + at;
            char* to = place + row * tiles::ROW_BYTES;
            if (left == Bf16::STEP) store_i(to, load_i(part));
            else store_i(to, vi{}), std::memcpy(to, part, left * sizeof(bf16));
        }
    }
}

#define INFERD_MULTIPLY(SUMS, ROWS, COLUMNS)                                          \
    if constexpr (K::IS_WIDE) {                                                      \
        _tile_dpbsud(SUMS, ROWS, COLUMNS);                                            \
    } else {                                                                          \
        _tile_dpbf16ps(SUMS, ROWS, COLUMNS);                                          \
    }

// Adds `steps` products to tiles 0 and 1, of the first 16 rows, and to tiles 2 and 3 of the others. Prefetches `lines`
// cache lines a step.
template <class K, bool HAS_SECOND, int V>
inline void multiply(const char* rows, const char* columns, int64_t steps, const char* ahead, int64_t lines) {
    for (int64_t step = 0; step < steps; step++, rows += BLOCK_BYTES, columns += V * TILE_BYTES) {
        _tile_loadd(6, columns, K::STRIDE);
        _tile_loadd(4, rows, tiles::ROW_BYTES);
        INFERD_MULTIPLY(0, 4, 6)
        if (V == 2) {
            _tile_loadd(7, columns + K::NEXT, K::STRIDE);
            INFERD_MULTIPLY(1, 4, 7)
        }
        if (HAS_SECOND) {
            _tile_loadd(5, rows + TILE_BYTES, tiles::ROW_BYTES);
            INFERD_MULTIPLY(2, 5, 6)
            if (V == 2) {
                INFERD_MULTIPLY(3, 5, 7)
            }
        }
        for (int64_t i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    }
}
#undef INFERD_MULTIPLY

template <bool HAS_SECOND, int V>
inline void clear_sums() {
    _tile_zero(0);
    if (V == 2) _tile_zero(1);
    if (HAS_SECOND) _tile_zero(2);
    if (HAS_SECOND && V == 2) _tile_zero(3);
}

template <bool HAS_SECOND, int V, class Sum>
inline void load_sums(const Sum* sums) {
    constexpr int64_t BYTES = COLUMNS * sizeof(Sum);
    _tile_loadd(0, sums, BYTES);
    if (V == 2) _tile_loadd(1, sums + LANES, BYTES);
    if (HAS_SECOND) _tile_loadd(2, sums + LANES * COLUMNS, BYTES);
    if (HAS_SECOND && V == 2) _tile_loadd(3, sums + LANES * COLUMNS + LANES, BYTES);
}

template <bool HAS_SECOND, int V, class Sum>
inline void store_sums(Sum* sums) {
    constexpr int64_t BYTES = COLUMNS * sizeof(Sum);
    _tile_stored(0, sums, BYTES);
    if (V == 2) _tile_stored(1, sums + LANES, BYTES);
    if (HAS_SECOND) _tile_stored(2, sums + LANES * COLUMNS, BYTES);
    if (HAS_SECOND && V == 2) _tile_stored(3, sums + LANES * COLUMNS + LANES, BYTES);
}

// One thread's products of some panels and some blocks of rows.
template <class K, class Put>
class Work {
  public:
    typedef typename K::Sum Sum;
    static constexpr int64_t ROWS = K::IS_WIDE ? BLOCK / 2 : BLOCK;  // of a block

    Work(const Problem& p, const char* packed_rows, Sum* sums, const Put& put)
        : p_(p), packed_rows_(packed_rows), sums_(sums), put_(put) {}

    // Blocks of packed rows, counted from `first_row`, the row of block 0.
    void run(int64_t first_panel, int64_t end_panel, int64_t first_block, int64_t end_block, int64_t first_row) {
        first_row_ = first_row, first_block_ = first_block, end_block_ = end_block;
        const int64_t steps = p_.steps;
        const int64_t panel_sums = steps > FAR_STEPS ? (end_block - first_block) * BLOCK * COLUMNS : 0;
        for (int64_t step = 0; step < steps; step += FAR_STEPS)
            for (int64_t panel = first_panel; panel < end_panel; panel++)
                multiply_panel(panel, step, std::min(steps, step + FAR_STEPS), sums_ + (panel - first_panel) * panel_sums);
    }

  private:
    const Problem& p_;
    const char* packed_rows_;
    Sum* sums_;
    const Put& put_;
    tiles::Tiles tiles_;
    int64_t first_row_, first_block_, end_block_;
    int64_t rows_set_ = 0;

    int64_t rows_of(int64_t block) const { return std::min(ROWS, p_.rows - first_row_ - block * ROWS); }

    void multiply_panel(int64_t panel, int64_t first_step, int64_t end_step, Sum* sums) {
        const bool is_part = rows_of(end_block_ - 1) < ROWS;
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

    void multiply_block(int64_t panel, int64_t index, int64_t num, int64_t first_step, int64_t end_step, Sum* sums) {
        const int64_t rows = rows_of(first_block_ + index);
        set_rows(rows);
        // A panel of bytes has all its columns.
        const bool is_narrow = !K::IS_WIDE && p_.n - panel * COLUMNS <= LANES, has_second = K::IS_WIDE || rows > LANES;
        const auto multiply = has_second ? is_narrow ? &Work::run_block<true, 1> : &Work::run_block<true, 2>
                                         : is_narrow ? &Work::run_block<false, 1> : &Work::run_block<false, 2>;
        (this->*multiply)(panel, index, num, first_step, end_step, sums + index * BLOCK * COLUMNS);
    }

    // `num` blocks read the same weights. Together they prefetch those of the next panel; a lone one those behind its own.
    template <bool HAS_SECOND, int V>
    void run_block(int64_t panel, int64_t index, int64_t num, int64_t first_step, int64_t end_step, Sum* sums) {
        const int64_t steps = p_.steps, count = end_step - first_step, block = first_block_ + index;
        const char* rows = packed_rows_ + (block * steps + first_step) * BLOCK_BYTES;
        const char* columns = static_cast<const char*>(p_.packed) + panel * steps * VECTORS * TILE_BYTES;
        columns += first_step * V * TILE_BYTES;
        constexpr int64_t STEP_LINES = V * TILE_BYTES / 64;
        const int64_t share = (STEP_LINES + num - 1) / num, fetched = index * share;
        const char* ahead = num > 1 ? columns + steps * V * TILE_BYTES + fetched * count * 64 : columns + AHEAD;
        tiles::wait_for_stores();
        first_step ? load_sums<HAS_SECOND, V>(sums) : clear_sums<HAS_SECOND, V>();
        multiply<K, HAS_SECOND, V>(rows, columns, count, ahead, std::clamp<int64_t>(STEP_LINES - fetched, 0, share));
        store_sums<HAS_SECOND, V>(sums);
        if (end_step < steps) return;
        for (int64_t i = 0, end = rows_of(block); i < end; i++) {
            const int64_t row = first_row_ + block * ROWS + i, column = panel * COLUMNS;
            if constexpr (K::IS_WIDE) put_(row, column, sums + i * COLUMNS, sums + (LANES + i) * COLUMNS);
            else put_(row, column, sums + i * COLUMNS);
        }
    }

    void set_rows(int64_t rows) {
        if (rows == rows_set_) return;
        rows_set_ = rows;
        const int first = int(std::min<int64_t>(rows, LANES));
        const int second = K::IS_WIDE ? first : int(std::max<int64_t>(rows - LANES, 1));
        tiles::Shape shape;
        for (int tile : {0, 1, 4}) shape.set(tile, first);
        for (int tile : {2, 3, 5}) shape.set(tile, second);
        for (int tile : {6, 7}) shape.set(tile, tiles::MAX_ROWS);
        tiles_.set(shape);
    }
};

// Pack(first row, number of rows, place) writes a block's rows. Put(row, column, sums) takes the finished sums of a row
// and a panel, or those of the high bytes and of the low ones.
template <class K, class Pack, class Put>
void run(const Problem& p, int num_threads, const Pack& pack, const Put& put) {
    static thread_local Buffer<char> packed_rows;
    constexpr int64_t ROWS = Work<K, Put>::ROWS;
    const int64_t steps = p.steps, panels = p.panels(), all_blocks = (p.rows + ROWS - 1) / ROWS;
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
            const int64_t row = (first + block) * ROWS;
            pack(row, std::min(ROWS, p.rows - row), place + block * steps * BLOCK_BYTES);
        });
        const int64_t together = panels >= 2 * num_threads ? blocks : BLOCKS_TOGETHER;
        const int64_t pieces = (blocks + together - 1) / together;
        const int team = int(std::min<int64_t>(num_threads, turns * pieces));
        parallel_for_dynamic(turns * pieces, team, [&](int64_t i) {
            static thread_local Buffer<typename K::Sum> sums;
            const int64_t begin = i % pieces * together, end = std::min(blocks, begin + together);
            const int64_t panel = i / pieces * turn, end_panel = std::min(panels, panel + turn);
            const size_t needed = (steps > FAR_STEPS ? end_panel - panel : 1) * (end - begin) * BLOCK * COLUMNS;
            sums.resize(std::max(sums.size(), needed));
            Work<K, Put>(p, place, sums.data(), put).run(panel, end_panel, begin, end, first * ROWS);
        });
    }
}

}  // namespace amx
#endif
