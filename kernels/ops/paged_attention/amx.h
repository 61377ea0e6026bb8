// Both ways to compute products of bfloat16, with AMX. Bits are the same: a score is summed over the head, and an output
// element over the keys, by 32 at a time from a multiple of 32. Each time even and odd places are two chains from 0,
// and the sum of both is added to the sum so far.
//
// Keys beside those that a row sees, up to the next multiple of 32, have weight 0, and their values are finite or 0.
#pragma once

#include "cpu/amx_tiles.h"

#if HAS_TILES
#include "ops/paged_attention/few_rows.h"
#include "ops/paged_attention/many_rows.h"

namespace {

constexpr int STEP = 2 * LANES;  // keys, or elements of a head
constexpr int64_t TILE_INTS = LANES * LANES;

inline int step_down(int key) { return key / STEP * STEP; }
inline int step_up(int key) { return (key + STEP - 1) / STEP * STEP; }

// Gives weight 0 to the keys from .. to that no row of `rows` sees.
inline void clear_unseen(const Tile<bf16>& tile, const Rows& rows, int from, int to) {
    const int begin = std::clamp(rows.begin, from, to), end = std::clamp(rows.end, begin, to);
    for (int row = rows.first; row < rows.first + rows.num; row++) {
        std::fill(tile.weights(row) + from, tile.weights(row) + begin, bf16{});
        std::fill(tile.weights(row) + end, tile.weights(row) + to, bf16{});
    }
}

// Many rows: 32 rows by 32 keys, or by 32 elements of values, at a time.
class ManyRowsInTiles : public ManyRows<bf16> {
  public:
    using ManyRows<bf16>::ManyRows;

    void pack(int head) {
        ManyRows<bf16>::pack(head);
        const int begin = t_.begin / LANES * LANES, end = (t_.end + LANES - 1) / LANES * LANES;
        clear_values(step_down(begin), begin), clear_values(end, step_up(end));
    }

    void score(size_t first, size_t last) {
        for_blocks(first, last, [&](const Rows& top, int num_rows, int from, int to, size_t, size_t) {
            set_rows(num_rows);
            for (int key = from; key < to; key += STEP) {
                const int64_t key_bytes = PANEL * sizeof(int32_t), row_bytes = t_.num_lanes * sizeof(int32_t);
                multiply(t_.query(top.first), row_bytes, LANES, panel_of(key), key_bytes, LANES * PANEL,
                         t_.num_lanes / LANES, t_.scores(top.first) + key, SPLIT * sizeof(float), true);
            }
        });
    }

    void sum(size_t first, size_t last) {
        for_blocks(first, last, [&](const Rows& top, int num_rows, int from, int to, size_t group, size_t end) {
            set_rows(num_rows);
            for (; group < end; group++) clear_unseen(t_, t_.s.rows[group], from, to);
            for (int64_t d = 0; d < t_.width; d += STEP)
                multiply(t_.weights(top.first) + from, SPLIT * sizeof(bf16), STEP * sizeof(bf16) / sizeof(int32_t),
                         &t_.s.values[from / 2 * t_.width + d], t_.width * sizeof(int32_t), LANES * t_.width,
                         (to - from) / STEP, t_.sums(top.first) + d, t_.width * sizeof(float), d + LANES < t_.width);
        });
    }

  private:
    tiles::Tiles tiles_;
    int rows_set_ = 0;

    void clear_values(int from, int to) {
        std::fill(&t_.s.values[from / 2 * t_.width], &t_.s.values[to / 2 * t_.width], 0);
    }

    // Calls f(first rows, how many, from, to, first .. end of s.rows) for up to 32 rows that lie side by side, and the
    // keys by 32 that any of them sees.
    template <class F>
    void for_blocks(size_t first, size_t last, F f) const {
        constexpr size_t GROUPS = STEP / 4;
        for (; first < last; first += GROUPS) {
            const size_t end = std::min(last, first + GROUPS);
            const Rows &top = t_.s.rows[first], &bottom = t_.s.rows[end - 1];
            const int from = step_down(std::max(top.begin, step_down(t_.begin))), to = step_up(std::min(bottom.end, t_.end));
            f(top, bottom.first + bottom.num - top.first, from, std::max(from, to), first, end);
        }
    }

    // 32 x 32 sums, or 32 x 16: rows times columns, over `steps`, each `to_rows` and `to_columns` ints after the last.
    void multiply(const void* rows, int64_t row_bytes, int64_t to_rows, const int32_t* columns, int64_t column_bytes,
                  int64_t to_columns, int64_t steps, float* sums, int64_t sum_bytes, bool is_wide) const {
        tiles::wait_for_stores();
        const bool has_second = rows_set_ > LANES;
        const int32_t* upper = static_cast<const int32_t*>(rows);
        const int32_t* lower = upper + LANES * row_bytes / sizeof(int32_t);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < steps; step++, columns += to_columns) {
            _tile_loadd(6, columns, column_bytes);
            _tile_loadd(4, upper + step * to_rows, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            if (is_wide) {
                _tile_loadd(7, columns + LANES, column_bytes);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (!has_second) continue;
            _tile_loadd(5, lower + step * to_rows, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (is_wide) _tile_dpbf16ps(3, 5, 7);
        }
        float* lower_sums = sums + LANES * sum_bytes / sizeof(float);
        _tile_stored(0, sums, sum_bytes);
        if (is_wide) _tile_stored(1, sums + LANES, sum_bytes);
        if (has_second) _tile_stored(2, lower_sums, sum_bytes);
        if (has_second && is_wide) _tile_stored(3, lower_sums + LANES, sum_bytes);
    }

    void set_rows(int num_rows) {
        if (num_rows == rows_set_) return;
        rows_set_ = num_rows;
        tiles::Shape shape;
        for (int tile : {0, 1, 4}) shape.set(tile, std::min(num_rows, LANES));
        for (int tile : {2, 3, 5}) shape.set(tile, std::max(num_rows - LANES, 1));
        for (int tile : {6, 7}) shape.set(tile, tiles::MAX_ROWS);
        tiles_.set(shape);
    }
};

// Few rows: keys are read as they lie, as the rows of a product whose columns are queries. Values are interleaved by
// pairs in a buffer of 32 keys.
class FewRowsInTiles : public FewRows<bf16> {
  public:
    using FewRows<bf16>::FewRows;

    bool can_run() const { return t_.rows_per_head <= MOST_ROWS && t_.p.head_dim % STEP == 0; }

    void score() {
        set_rows();
        list_groups(STEP);
        turn_queries();
        const int64_t steps = t_.num_lanes / LANES;
        for (size_t i = 0; i < num_; i++) {
            look_ahead(i);
            const Group& group = t_.s.groups[i];
            const bf16* keys = t_.keys_of(group);
            tiles::wait_for_stores();
            _tile_zero(0);
            for (int64_t step = 0; step < steps; step++) {
                _tile_loadd(4, keys + step * STEP, t_.p.head_dim * sizeof(bf16));
                _tile_loadd(6, &t_.s.keys[(group.head * steps + step) * TILE_INTS], tiles::ROW_BYTES);
                _tile_dpbf16ps(0, 4, 6);
                const char* ahead = t_.ahead + step * tiles::MAX_ROWS * tiles::ROW_BYTES;
                for (int i = 0; i < tiles::MAX_ROWS; i++) __builtin_prefetch(ahead + i * tiles::ROW_BYTES, 0, 2);
            }
            alignas(64) vi sums[LANES];
            _tile_stored(0, sums, tiles::ROW_BYTES);
            transpose(sums);
            for (int r = 0; r < t_.rows_per_head; r++)
                t_.put_scores(group.head * t_.rows_per_head + r, group.key, (vf)sums[r]);
        }
    }

    void sum() {
        const int from = step_down(t_.begin), to = step_up(t_.end);
        for (const Rows& rows : t_.s.rows) clear_unseen(t_, rows, from, to);
        for (size_t i = num_; i < 2 * num_; i++) {
            look_ahead(i);
            const Group& group = t_.s.groups[i];
            const bool is_first = group.key == step_down(group.key);
            const bool has_other = is_first ? i + 1 < 2 * num_ && is_next(group, t_.s.groups[i + 1])
                                            : i > num_ && is_next(t_.s.groups[i - 1], group);
            int32_t* pairs = t_.s.values.data();
            const int64_t half = LANES / 2 * t_.width;
            interleave(t_.values_of(group), pairs + (is_first ? 0 : half));
            if (is_first && has_other) continue;
            if (!has_other) std::fill_n(pairs + (is_first ? half : 0), half, 0);
            multiply_values(group.head, step_down(group.key));
        }
    }

  private:
    tiles::Tiles tiles_;
    int rows_set_ = 0;

    static bool is_next(const Group& first, const Group& second) {
        return first.head == second.head && first.key + LANES == second.key;
    }

    // Queries of each head, in tiles of 16 pairs of the head's elements by 16 queries. They take the place of packed
    // keys.
    void turn_queries() {
        const size_t needed = t_.item.num_heads * t_.num_lanes * LANES;
        t_.s.keys.resize(std::max(t_.s.keys.size(), needed));
        int32_t* place = t_.s.keys.data();
        for (int head = 0; head < t_.item.num_heads; head++)
            for (int64_t lane = 0; lane < t_.num_lanes; lane += LANES, place += TILE_INTS) {
                vi block[LANES] = {};
                for (int r = 0; r < t_.rows_per_head; r++) block[r] = load_i(t_.query(head * t_.rows_per_head + r) + lane);
                transpose(block);
                std::memcpy(place, block, sizeof block);
            }
    }

    void interleave(const bf16* rows, int32_t* place) const {
        const int64_t head_dim = t_.p.head_dim;
        for (int64_t first = 0; first < LANES * head_dim; first += 2 * head_dim, place += t_.width)
            for (int64_t d = 0; d < head_dim; d += STEP) {
                vi low, high;
                zip(t_.take(rows, first + d), t_.take(rows, first + head_dim + d), low, high);
                store_i(place + d, low), store_i(place + d + LANES, high);
            }
    }

    void multiply_values(int head, int key) const {
        const int row = head * t_.rows_per_head;
        const int64_t bytes = t_.width * sizeof(float);
        tiles::wait_for_stores();
        _tile_loadd(5, t_.weights(row) + key, SPLIT * sizeof(bf16));
        for (int64_t d = 0; d < t_.width; d += STEP) {
            float* sums = t_.sums(row) + d;
            _tile_loadd(1, sums, bytes);
            _tile_loadd(6, t_.s.values.data() + d, bytes);
            _tile_dpbf16ps(1, 5, 6);
            _tile_stored(1, sums, bytes);
            _tile_loadd(2, sums + LANES, bytes);
            _tile_loadd(7, t_.s.values.data() + d + LANES, bytes);
            _tile_dpbf16ps(2, 5, 7);
            _tile_stored(2, sums + LANES, bytes);
        }
    }

    void set_rows() {
        if (t_.rows_per_head == rows_set_) return;
        rows_set_ = t_.rows_per_head;
        tiles::Shape shape;
        for (int tile : {0, 4, 6, 7}) shape.set(tile, tiles::MAX_ROWS);
        for (int tile : {1, 2, 5}) shape.set(tile, rows_set_);
        tiles_.set(shape);
    }
};

}  // namespace
#endif
