// Few rows of each KV head (decodes): keys are read as they lie. A vector holds sixteen lanes of one key, a link of
// every chain, and the chains of sixteen keys are transposed to be added up. Values are interleaved by pairs in
// registers. Nothing is stored, except for keys and values that are widened from 8 bits; memory bounds the speed.
#pragma once

#include "ops/paged_attention/tile.h"

namespace {

template <class T>
class FewRows {
    using KeyTile = Tile<T>;
    typedef typename KeyTile::Lanes Lanes;
    typedef typename KeyTile::Sums Sums;
    static constexpr int PER_LANE = KeyTile::PER_LANE;

  protected:
    static constexpr int MOST_ROWS = 8;     // of one KV head: more are worth the packing of its keys
    static constexpr int GROUPS_AHEAD = 2;  // prefetched: best of 1, 2, 4, 8 over heads of 64, 128 (Zen 4, 2026-11-21)

  public:
    explicit FewRows(KeyTile& tile) : t_(tile) {}

    // In bfloat16 heads of 64, 96, 128 and 256. Values are summed two vectors at a time.
    bool can_run() const {
        const int64_t vectors = t_.num_lanes / LANES;
        const bool is_known = vectors == 2 || vectors == 3 || vectors == 4 || vectors == 8;
        return t_.rows_per_head <= MOST_ROWS && t_.num_lanes % LANES == 0 && t_.width % (2 * LANES) == 0 && is_known;
    }

    void score() {
        list_groups();
        for (size_t i = 0; i < num_; i++) {
            look_ahead(i);
            const Group& group = t_.s.groups[i];
            score(group, t_.keys_of(group));
        }
    }

    void sum() {
        for (size_t i = num_; i < 2 * num_; i++) {
            look_ahead(i);
            const Group& group = t_.s.groups[i];
            sum(group, t_.values_of(group));
        }
    }

  protected:
    KeyTile& t_;
    size_t num_;  // groups of keys

    // The tile's keys, then its values, in the order of memory: panel by panel, all heads of a panel before the next.
    // Panels begin at multiples of `unit` keys.
    void list_groups(int unit = LANES) {
        t_.s.groups.clear();
        const int begin = t_.begin / LANES * LANES;
        const int together = int(std::clamp<int64_t>(t_.p.block_size, unit, PANEL)) / unit * unit;
        const int panel = t_.item.num_heads > 1 ? together : PANEL;
        for (int is_value = 0; is_value < 2; is_value++)
            for (int first = begin / panel * panel; first < t_.end; first += panel)
                for (int head = 0; head < t_.item.num_heads; head++)
                    for (int key = std::max(first, begin); key < std::min(first + panel, t_.end); key += LANES)
                        t_.s.groups.push_back(t_.group(head, is_value, key));
        num_ = t_.s.groups.size() / 2;
    }

    void look_ahead(size_t i) { t_.ahead = t_.s.groups[std::min(i + GROUPS_AHEAD, t_.s.groups.size() - 1)].data; }

  private:
    template <class F>
    void for_rows(const Group& group, F f) const {
        const size_t num = t_.groups_per_head();
        t_.for_rows(group.head * num, (group.head + 1) * num, group.key, group.key + LANES, f);
    }

    void score(const Group& group, const T* keys) {
        for_rows(group, [&](auto R, int row, int key, int) {
            switch (t_.num_lanes / LANES) {
                case 2: return score<R, 2>(row, key, keys);
                case 3: return score<R, 3>(row, key, keys);
                case 4: return score<R, 4>(row, key, keys);
                case 8: return score<R, 8>(row, key, keys);
            }
        });
    }

    // A head is N vectors.
    template <int R, int N>
    void score(int row, int key, const T* keys) {
        Lanes query[R][N];
        vi chains[R][LANES];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) query[r][n] = Element<T>::load(t_.query(row + r) + n * LANES);
        for (int i = 0; i < LANES; i++) {
            Sums acc[R] = {};
            for (int n = 0; n < N; n++) {
                const Lanes one = t_.take(keys, (i * N + n) * LANES * PER_LANE);
                for (int r = 0; r < R; r++) acc[r] = Element<T>::multiply(acc[r], query[r][n], one);
            }
            for (int r = 0; r < R; r++) store(&chains[r][i], acc[r]);
        }
        for (int r = 0; r < R; r++) {
            transpose(chains[r]);
            Sums total = {};
            for (int i = 0; i < LANES; i++) total = total + Element<T>::load_sums(&chains[r][i]);
            t_.put_scores(row + r, key, total);
        }
    }

    void sum(const Group& group, const T* values) {
        for_rows(group, [&](auto R, int row, int key, int) {
            constexpr int V = std::clamp(MOST_SUMS / R, 2, 8);
            int64_t d = 0;
            for (; d + V * LANES <= t_.width; d += V * LANES) sum<R, V>(row, d, key, values);
            if constexpr (V > 4)
                for (; d + 4 * LANES <= t_.width; d += 4 * LANES) sum<R, 4>(row, d, key, values);
            for (; d < t_.width; d += 2 * LANES) sum<R, 2>(row, d, key, values);
        });
    }

    template <int R, int V>
    void sum(int row, int64_t d, int key, const T* values) {
        const int32_t* weights = reinterpret_cast<const int32_t*>(t_.weights(row) + key);
        Sums acc[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) acc[r][v] = Element<T>::load_sums(t_.sums(row + r) + d + v * LANES);
        for (int i = 0; i < LANES / PER_LANE; i++)
            for (int v = 0; v < V; v += 2) {
                Lanes low, high;
                const int64_t place = i * PER_LANE * t_.p.head_dim + d + v * LANES;
                if constexpr (PER_LANE == 1) low = t_.take(values, place), high = t_.take(values, place + LANES);
                else zip(t_.take(values, place), t_.take(values, place + t_.p.head_dim), low, high);
                for (int r = 0; r < R; r++) {
                    const Lanes one = Element<T>::splat(weights[r * (SPLIT / PER_LANE) + i]);
                    acc[r][v] = Element<T>::multiply(acc[r][v], one, low);
                    acc[r][v + 1] = Element<T>::multiply(acc[r][v + 1], one, high);
                }
            }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(t_.sums(row + r) + d + v * LANES, acc[r][v]);
    }
};

}  // namespace
