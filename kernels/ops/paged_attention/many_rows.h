// Many rows of one KV head (prompts): the tile's keys and values are packed once for all rows of the item. Keys are
// transposed by 16 x 16 blocks, so that a vector holds one lane of sixteen keys. Values are interleaved by pairs of
// keys. Products bound the speed: 78% of the rate of `linear` at heads of 128, 67% at 64 (chunks of 256 behind 4,096
// tokens, one thread, Zen 4, 2026-11-23).
#pragma once

#include "ops/paged_attention/tile.h"

namespace {

template <class T>
class ManyRows {
    using KeyTile = Tile<T>;
    typedef typename KeyTile::Lanes Lanes;
    typedef typename KeyTile::Sums Sums;
    static constexpr int PER_LANE = KeyTile::PER_LANE;

  public:
    explicit ManyRows(KeyTile& tile) : t_(tile) {}

    void pack(int head) {
        const int begin = t_.begin / LANES * LANES;
        for (int key = begin; key < t_.end; key += LANES) {
            const Group group = t_.group(head, 0, key);
            t_.ahead = t_.group(head, 0, std::min(key + AHEAD, (t_.end - 1) / LANES * LANES)).data;
            turn(t_.keys_of(group), panel_of(key));
        }
        for (int key = begin; key < t_.end; key += LANES) {
            const Group group = t_.group(head, 1, key);
            t_.ahead = t_.group(head, 1, std::min(key + AHEAD, (t_.end - 1) / LANES * LANES)).data;
            pack_values(t_.values_of(group), &t_.s.values[key / PER_LANE * t_.width]);
        }
    }

    // For the rows of s.rows[first .. last].
    void score(size_t first, size_t last) {
        for (int panel = t_.begin / PANEL * PANEL; panel < t_.end; panel += PANEL)
            t_.for_rows(first, last, panel, panel + PANEL, [&](auto R, int row, int key, int to) {
                if constexpr (2 * R <= MOST_SUMS)
                    for (; key + 2 * LANES <= to; key += 2 * LANES) score<R, 2>(row, key);
                for (; key < to; key += LANES) score<R, 1>(row, key);
            });
    }

    void sum(size_t first, size_t last) {
        t_.for_rows(first, last, 0, SPLIT, [&](auto R, int row, int from, int to) {
            int64_t d = 0;
            if constexpr (4 * R <= MOST_SUMS)
                for (; d + 4 * LANES <= t_.width; d += 4 * LANES) sum<R, 4>(row, d, from, to);
            if constexpr (2 * R <= MOST_SUMS)
                for (; d + 2 * LANES <= t_.width; d += 2 * LANES) sum<R, 2>(row, d, from, to);
            for (; d < t_.width; d += LANES) sum<R, 1>(row, d, from, to);
        });
    }

  protected:
    KeyTile& t_;

    int32_t* panel_of(int key) const { return &t_.s.keys[key / PANEL * PANEL * t_.num_lanes + key % PANEL]; }

  private:
    static constexpr int AHEAD = 2 * LANES;  // keys prefetched

    // acc[r][v] += row[r][c] * panel[c][v] for the lanes c = first, first + step .. end. As a call it would keep `acc` in
    // memory, and all of attention would take 1.6 times as long (Zen 4, 2026-11-23).
    template <int R, int V>
    [[gnu::always_inline]] static void multiply(const int32_t* rows, int64_t row_stride, const int32_t* panel,
                                                int64_t panel_stride, int64_t first, int64_t end, int64_t step,
                                                Sums acc[R][V]) {
        for (int64_t c = first; c < end; c += step) {
            Lanes column[V];
            for (int v = 0; v < V; v++) column[v] = Element<T>::load(panel + c * panel_stride + v * LANES);
            for (int r = 0; r < R; r++) {
                const Lanes one = Element<T>::splat(rows[r * row_stride + c]);
                for (int v = 0; v < V; v++) acc[r][v] = Element<T>::multiply(acc[r][v], one, column[v]);
            }
        }
    }

    void turn(const T* rows, int32_t* place) {
        int64_t c = 0;
        for (; (c + LANES) * PER_LANE <= t_.p.head_dim; c += LANES) {
            vi block[LANES];
            for (int i = 0; i < LANES; i++) store(&block[i], t_.take(rows, i * t_.p.head_dim + c * PER_LANE));
            transpose(block);
            for (int i = 0; i < LANES; i++) store_i(place + (c + i) * PANEL, block[i]);
        }
        for (; c < t_.num_lanes; c++)
            for (int i = 0; i < LANES; i++) {
                T lane[PER_LANE] = {};
                for (int64_t n = 0; n < PER_LANE && c * PER_LANE + n < t_.p.head_dim; n++)
                    lane[n] = rows[i * t_.p.head_dim + c * PER_LANE + n];
                std::memcpy(&place[c * PANEL + i], lane, sizeof lane);
            }
    }

    template <int R, int V>
    void score(int row, int key) {
        const int64_t lanes = t_.num_lanes;
        const int32_t* keys = panel_of(key);
        Sums total[R][V] = {};
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, lanes); lane++) {
            Sums chain[R][V] = {};
            multiply<R, V>(t_.query(row), lanes, keys, PANEL, lane, lanes, LANES, chain);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) total[r][v] = total[r][v] + chain[r][v];
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) t_.put_scores(row + r, key + v * LANES, total[r][v]);
    }

    // Pairs of keys (single ones in fp32) by the elements of the head: [SPLIT / PER_LANE][width] lanes.
    void pack_values(const T* rows, int32_t* place) {
        for (int i = 0; i < LANES; i += PER_LANE, place += t_.width) {
            if constexpr (PER_LANE == 1) spread(place, rows, i * t_.p.head_dim);
            else interleave(place, rows, i * t_.p.head_dim);
        }
    }

    void spread(int32_t* place, const T* rows, int64_t first) const {
        int64_t d = 0;
        for (; d + LANES <= t_.p.head_dim; d += LANES) store(place + d, t_.take(rows, first + d));
        for (; d < t_.width; d++) {
            const T value = d < t_.p.head_dim ? rows[first + d] : T{};
            std::memcpy(place + d, &value, sizeof value);
        }
    }

    void interleave(int32_t* place, const T* rows, int64_t first) const {
        const int64_t head_dim = t_.p.head_dim;
        int64_t d = 0;
        for (; d + 2 * LANES <= head_dim; d += 2 * LANES) {
            vi low, high;
            zip(t_.take(rows, first + d), t_.take(rows, first + head_dim + d), low, high);
            store_i(place + d, low), store_i(place + d + LANES, high);
        }
        for (; d < t_.width; d++) {
            T pair[2] = {};
            if (d < head_dim) pair[0] = rows[first + d], pair[1] = rows[first + head_dim + d];
            std::memcpy(place + d, pair, sizeof(int32_t));
        }
    }

    template <int R, int V>
    void sum(int row, int64_t d, int from, int to) {
        Sums acc[R][V] = {};
        const int32_t* weights = reinterpret_cast<const int32_t*>(t_.weights(row) + from);
        const int32_t* values = &t_.s.values[from / PER_LANE * t_.width + d];
        multiply<R, V>(weights, SPLIT / PER_LANE, values, t_.width, 0, (to - from) / PER_LANE, 1, acc);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(t_.sums(row + r) + d + v * LANES, acc[r][v]);
    }
};

}  // namespace
