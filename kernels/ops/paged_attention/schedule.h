// The arguments of paged attention, and its division among threads.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/simd.h"

namespace {

constexpr int SPLIT = 256;    // keys of a tile
constexpr int BLOCK_ROWS = 64;  // computed together
constexpr int MAX_ROWS = 512;   // of a piece of work

struct Problem {
    const char* q;
    const char* kv;
    const simd::bf16* kv_scales;  // of 8-bit K and V: [blocks, 2, G, block_size, groups of a head]; else null
    char* out;
    const int32_t* query_start;  // [R + 1]
    const int32_t* seq_lens;     // [R]
    const int32_t* tables;       // [R, max_blocks]
    int64_t num_requests, max_blocks;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t kv_stride, scale_stride;  // elements from block to block
    int64_t window;  // 0: none
    float scale, softcap;  // softcap 0: none
    const float* sinks;    // [num_heads]; null: none
    int64_t kv_format;     // as in kv_numbers.h; 0: K and V have the type of the queries
    int repeat() const { return int(num_heads / num_kv_heads); }
};

// Consecutive queries of one request for some KV heads, and the tiles that this piece of work covers. Few queries take
// many heads, whose pages lie side by side, so memory is read in long stretches. Rows are ordered by head, then by
// query, then by query head of the KV head.
struct Item {
    int32_t request, first_head, num_heads;  // KV heads
    int32_t first_query, num_queries;  // of the request's queries
    int32_t first_tile, end_tile;
    int64_t partial;  // index of its first partial result; -1: combine each tile at once
};

// The pieces of work: blocks of queries by KV head, those that see most first. If they are too few for the threads, a
// piece is also cut by tiles. Its partial results are then kept, and combined later by the same arithmetic.
struct Schedule {
    std::vector<Item> items;
    std::vector<std::pair<Item, int>> cut;  // (the whole of a cut piece, its tiles)
    int64_t num_partials = 0;
};

// Keys that the request's last query sees.
inline int64_t num_seen(const Problem& p, int64_t request) {
    return p.window ? std::min<int64_t>(p.window, p.seq_lens[request]) : p.seq_lens[request];
}

// KV heads in one piece: as many as fit its rows while all threads have pieces. `long_enough` is the number of pieces
// of two tiles each that all requests make.
inline int32_t heads_together(const Problem& p, int num_queries, int64_t long_enough, int num_threads) {
    int64_t heads = std::clamp<int64_t>(BLOCK_ROWS / (int64_t(num_queries) * p.repeat()), 1, p.num_kv_heads);
    while (heads > 1 && long_enough * ((p.num_kv_heads + heads - 1) / heads) < 4 * num_threads) heads = (heads + 1) / 2;
    return int32_t(heads);
}

// Whether a piece may go on with the queries behind it, so that keys are packed once for all of them.
inline bool can_join(const Item& item, const Item& next, int64_t most_queries) {
    return item.partial < 0 && item.request == next.request && item.first_head == next.first_head &&
           item.first_query + item.num_queries == next.first_query && item.num_queries + next.num_queries <= most_queries;
}

inline Schedule plan(const Problem& p, int num_threads) {
    const int queries_per_item = std::max(1, BLOCK_ROWS / p.repeat());
    Schedule schedule;
    std::vector<Item> whole;
    int64_t num_tiles = 0, long_enough = 0;
    for (int64_t request = 0; request < p.num_requests; request++)
        long_enough += (num_seen(p, request) + 2 * SPLIT - 1) / (2 * SPLIT);
    for (int64_t request = 0; request < p.num_requests; request++) {
        const int32_t num_queries = p.query_start[request + 1] - p.query_start[request];
        if (!num_queries) continue;
        const int32_t before = p.seq_lens[request] - num_queries;
        const int32_t heads_per_item = heads_together(p, std::min(queries_per_item, num_queries), long_enough, num_threads);
        for (int32_t head = 0; head < p.num_kv_heads; head += heads_per_item)
            for (int32_t first = 0; first < num_queries; first += queries_per_item) {
                const int32_t count = std::min(queries_per_item, num_queries - first);
                const int32_t heads = std::min<int32_t>(heads_per_item, int32_t(p.num_kv_heads) - head);
                const int64_t lowest = p.window ? std::max<int64_t>(0, before + first - p.window + 1) : 0;
                const int32_t first_tile = int32_t(lowest / SPLIT), end_tile = (before + first + count - 1) / SPLIT + 1;
                num_tiles += end_tile - first_tile;
                whole.push_back({int32_t(request), head, heads, first, count, first_tile, end_tile, -1});
            }
    }
    const int64_t fair = std::max<int64_t>(1, num_tiles / (4 * num_threads));
    const int64_t num_joined = std::clamp<int64_t>(int64_t(whole.size()) / (4 * num_threads), 1, MAX_ROWS / BLOCK_ROWS);
    const int64_t most_queries = num_joined * queries_per_item;
    for (const Item& item : whole) {
        const int64_t tiles = item.end_tile - item.first_tile;
        if (num_threads == 1 || tiles <= 2 * fair) {
            if (!schedule.items.empty() && can_join(schedule.items.back(), item, most_queries)) {
                schedule.items.back().num_queries += item.num_queries;
                schedule.items.back().end_tile = item.end_tile;
            } else {
                schedule.items.push_back(item);
            }
            continue;
        }
        Item piece = item;
        piece.partial = schedule.num_partials;
        schedule.cut.push_back({piece, int(tiles)});
        const int64_t num_rows = int64_t(item.num_heads) * item.num_queries * p.repeat();
        for (int64_t tile = 0; tile < tiles; tile += fair) {
            piece.first_tile = int32_t(item.first_tile + tile);
            piece.end_tile = int32_t(std::min<int64_t>(item.end_tile, piece.first_tile + fair));
            piece.partial = schedule.num_partials + tile * num_rows;
            schedule.items.push_back(piece);
        }
        schedule.num_partials += tiles * num_rows;
    }
    // A cut piece has at least 2 * fair + 1 of the tiles, which are fewer than 4 * num_threads * (fair + 1). So at most
    // 8 / 3 * num_threads * BLOCK_ROWS rows have partial results, which a memory plan may count on.
    assert(3 * int64_t(schedule.cut.size()) <= 8 * num_threads);
    auto cost = [](const Item& item) {
        return int64_t(item.end_tile - item.first_tile) * item.num_heads * (item.num_queries + 8);
    };
    std::stable_sort(schedule.items.begin(), schedule.items.end(),
                     [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
    return schedule;
}

// The work of all pieces, in keys that one query of one KV head sees.
inline int64_t work(const Problem& p) {
    int64_t keys = 0;
    for (int64_t request = 0; request < p.num_requests; request++)
        keys += num_seen(p, request) * (p.query_start[request + 1] - p.query_start[request]);
    return keys * p.num_kv_heads;
}

}  // namespace
