// One tile of keys for the rows of one piece of work: positions, pages, which rows see which keys, and buffers.
//
// A lane is 32 bits: see cpu/attention.h.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/amx_tiles.h"
#include "cpu/attention.h"
#include "cpu/kv_numbers.h"
#include "cpu/simd.h"
#include "ops/paged_attention/schedule.h"

namespace {

using namespace simd;

constexpr int PANEL = 64;  // keys side by side in packed keys

// Rows of one head that are computed together, and the keys of the tile, by sixteen, that any of them sees.
struct Rows {
    int first, num, begin, end;
};

// Sixteen keys or values of a head, all in one page; `key` counts from the tile's start. If no query of the item sees
// them, they may hold anything.
struct Group {
    const char* data;
    const bf16* scales;  // of its keys or values in 8 bits
    int head, key;
};

// Buffers of one thread. Those of scores, weights and a tile's result hold one block of rows, the others all rows of an
// item.
struct Scratch {
    Buffer<int32_t> keys, values, query;
    Buffer<float> scores, tile_sum, tile_peak, tile_total, summed, peak, total;
    Buffer<char> weights, partly_seen, widened;
    std::vector<Group> groups;
    std::vector<Rows> rows;
};

// Queries of type T over K and V of type T, or in 8 bits: these are widened when they are read.
template <class T>
class Tile {
  public:
    static constexpr int PER_LANE = Element<T>::PER_LANE;
    typedef typename Element<T>::Lanes Lanes;
    typedef typename Element<T>::Sums Sums;

    const Problem& p;
    Scratch& s;
    const int64_t num_lanes;  // of a head, and zeros if tiles need more
    const int64_t width;      // head_dim rounded up to a vector
    Item item;
    int rows_per_head, num_rows;
    int64_t first_token, first_position;
    int64_t start;       // position of the tile's first key
    int begin, end;      // keys of the tile that any query sees
    int first_row;       // of the block that is computed now
    const char* ahead;   // group to prefetch now

    Tile(const Problem& problem, Scratch& scratch)
        : p(problem),
          s(scratch),
          num_lanes(lanes_of(p.head_dim)),
          width((p.head_dim + LANES - 1) / LANES * LANES) {
        s.keys.resize(SPLIT * num_lanes);
        s.values.resize(SPLIT / PER_LANE * width);
        s.query.resize(MAX_ROWS * num_lanes);
        s.scores.resize(BLOCK_ROWS * SPLIT);
        s.weights.resize(BLOCK_ROWS * SPLIT * sizeof(T));
        s.tile_sum.resize(BLOCK_ROWS * width);
        s.tile_peak.resize(BLOCK_ROWS), s.tile_total.resize(BLOCK_ROWS);
        s.summed.resize(MAX_ROWS * width);
        s.peak.resize(MAX_ROWS), s.total.resize(MAX_ROWS);
        s.partly_seen.resize(LANES * p.head_dim * sizeof(T));
        s.widened.resize(LANES * p.head_dim * sizeof(T));
    }

    void start_item(const Item& given) {
        item = given;
        rows_per_head = item.num_queries * p.repeat();
        num_rows = item.num_heads * rows_per_head;
        first_token = p.query_start[item.request] + item.first_query;
        const int64_t num_new = p.query_start[item.request + 1] - p.query_start[item.request];
        first_position = p.seq_lens[item.request] - num_new + item.first_query;
    }

    void start_tile(int index) {
        start = int64_t(index) * SPLIT;
        const int64_t first_seen = p.window ? std::max<int64_t>(start, first_position - p.window + 1) : start;
        begin = int(first_seen - start);
        end = int(std::min<int64_t>(SPLIT, first_position + item.num_queries - start));
        list_rows();
        find_pages();
    }

    // Index of the row's query in the item.
    int64_t query_of(int row) const { return row % rows_per_head / p.repeat(); }

    // Calls f(row, offset of its head in q and out).
    template <class F>
    void for_heads(F f) const {
        int row = 0;
        for (int head = 0; head < item.num_heads; head++)
            for (int64_t token = first_token; token < first_token + item.num_queries; token++)
                for (int64_t i = 0; i < p.repeat(); i++)
                    f(row++, (token * p.num_heads + (item.first_head + head) * p.repeat() + i) * p.head_dim);
    }

    // Calls f(how many, rows, from, to) for the rows of s.rows[first .. last] that see any of the keys from .. to.
    template <class F>
    void for_rows(size_t first, size_t last, int from, int to, F f) const {
        for (size_t i = first; i < last; i++) {
            const Rows& rows = s.rows[i];
            const int low = std::max(from, rows.begin), high = std::min(to, rows.end);
            if (low >= high) continue;
            if (rows.num == 4) f(std::integral_constant<int, 4>{}, rows.first, low, high);
            else if (rows.num == 2) f(std::integral_constant<int, 2>{}, rows.first, low, high);
            else f(std::integral_constant<int, 1>{}, rows.first, low, high);
        }
    }

    size_t groups_per_head() const { return s.rows.size() / item.num_heads; }  // of rows

    const int32_t* query(int row) const { return &s.query[row * num_lanes]; }
    float* scores(int row) const { return &s.scores[(row - first_row) * SPLIT]; }
    T* weights(int row) const { return reinterpret_cast<T*>(s.weights.data()) + (row - first_row) * SPLIT; }
    float* sums(int row) const { return &s.tile_sum[(row - first_row) * width]; }

    // Stores the scores of sixteen keys, which are not scaled yet.
    void put_scores(int row, int key, Sums total) const { store(scores(row) + key, total); }

    Group group(int head, int is_value, int key) const {
        const int64_t plane = is_value * p.num_kv_heads + item.first_head + head;
        const Page& page = pages_[key / LANES];
        const int64_t slot = plane * p.block_size;
        return {page.data + slot * p.head_dim * number_bytes(), page.scales + slot * num_scales(), head, key};
    }

    // Sixteen lanes of the current group. Prefetches the same place of a later group to the second-level cache, line by
    // line beside the loads. Sixty lines at once, or to the first level, took a third longer (Zen 4, 2026-11-21).
    Lanes take(const T* data, int64_t element) const {
        __builtin_prefetch(ahead + element * sizeof(T), 0, 2);
        return Element<T>::load(data + element);
    }

    // Keys that no query sees are masked after their products, so they may hold anything. Valid until the next group is
    // read.
    const T* keys_of(const Group& group) {
        if (!p.kv_format) return reinterpret_cast<const T*>(group.data);
        T* place = reinterpret_cast<T*>(s.widened.data());
        const int64_t num_bytes = LANES * p.head_dim;
        for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        ahead = s.widened.data();
        DEQUANTIZE<T>[p.kv_format](group.data, group.scales, place, LANES, p.head_dim);
        return place;
    }

    // Zeros replace values that no query sees, because 0 * NaN is NaN.
    const T* values_of(const Group& group) {
        const T* data = keys_of(group);
        const int first = std::max(0, begin - group.key), last = std::min(LANES, end - group.key);
        if (first == 0 && last == LANES) return data;
        T* copy = reinterpret_cast<T*>(s.partly_seen.data());
        std::memset(copy, 0, LANES * p.head_dim * sizeof(T));
        std::memcpy(copy + first * p.head_dim, data + first * p.head_dim, (last - first) * p.head_dim * sizeof(T));
        return copy;
    }

  private:
    struct Page {
        const char* data;
        const bf16* scales;
    };
    Page pages_[SPLIT / LANES];  // of sixteen keys of head 0

    static int64_t lanes_of(int64_t head_dim) {
        const int64_t lanes = (head_dim + PER_LANE - 1) / PER_LANE;
        return HAS_TILES && PER_LANE == 2 ? (lanes + LANES - 1) / LANES * LANES : lanes;
    }

    int64_t number_bytes() const { return p.kv_format ? 1 : sizeof(T); }
    int64_t num_scales() const { return p.kv_format ? num_kv_groups(p.head_dim) : 0; }

    // Groups of four rows, and the rest. Each skips the keys that none of its queries sees.
    void list_rows() {
        s.rows.clear();
        for (int head = 0; head < item.num_heads; head++)
            for (int row = 0, num; row < rows_per_head; row += num) {
                num = rows_per_head - row >= 4 ? 4 : rows_per_head - row >= 2 ? 2 : 1;
                const int64_t first = first_position + row / p.repeat() - start;
                const int64_t last = first_position + (row + num - 1) / p.repeat() - start;
                const int low = p.window ? int(std::clamp<int64_t>(first - p.window + 1, 0, SPLIT)) : 0;
                const int high = int(std::clamp<int64_t>(last + 1, 0, SPLIT));
                s.rows.push_back({head * rows_per_head + row, num, low / LANES * LANES, (high + LANES - 1) / LANES * LANES});
            }
    }

    void find_pages() {
        for (int key = begin / LANES * LANES; key < end; key += LANES) {
            const int64_t position = start + key, slot = position % p.block_size;
            const int64_t block = p.tables[item.request * p.max_blocks + position / p.block_size];
            pages_[key / LANES] = {p.kv + (block * p.kv_stride + slot * p.head_dim) * number_bytes(),
                                   p.kv_scales + block * p.scale_stride + slot * num_scales()};
        }
    }
};

}  // namespace
