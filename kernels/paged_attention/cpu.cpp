// Attention over a paged KV pool for decodes, chunks and any mix of them (flash attention, Dao et al. 2022,
// arXiv:2205.14135, with the KV in tiles at absolute positions).
//
// A query's bits depend on its own sequence alone. Each tile of SPLIT keys gives a partial result of its own (its peak,
// the sum of its weights, its weighted values), and partial results are combined in the order of the tiles. Within a
// tile every score is one chain of products over the head's elements and every output element one chain over the keys,
// whatever is computed beside it: rows, heads and keys that lie next to each other only share what was loaded. Keys that
// a query may not see have weight 0 and change nothing, exactly, unless they are of its own sequence and hold inf or NaN:
// then the request fails.
//
// Keys are turned by 16 x 16 blocks, so that a vector holds sixteen keys and a score needs no sum across lanes; values
// are interleaved by pairs of keys. bfloat16 is multiplied two by two into fp32, and the weights are rounded to bfloat16
// before they are summed and multiplied, so that they add up to what is divided by.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "call.h"
#include "simd.h"

namespace {

using namespace simd;

constexpr int SPLIT = 256;
constexpr int PANEL = 64;  // keys turned at a time: four vectors
constexpr int MAX_ROWS = 64;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Problem {
    const char* q;
    const char* kv;
    char* out;
    const int32_t* query_start;  // [R + 1]
    const int32_t* seq_lens;     // [R]
    const int32_t* tables;       // [R, max_blocks]
    int64_t num_requests, max_blocks;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t window;  // 0: none
    float scale, softcap;  // softcap 0: none
    int repeat() const { return int(num_heads / num_kv_heads); }
};

// Consecutive queries of one request for some KV heads, and the tiles that this piece of work covers. Few queries take
// many heads, whose pages lie side by side: memory is then read in long stretches. Rows are by head, then by query, then
// by query head of the KV head.
struct Item {
    int32_t request, first_head, num_heads;  // KV heads
    int32_t first_query, num_queries;  // of the request's queries
    int32_t first_tile, end_tile;
    int64_t partial;  // index of its first partial result, or -1: combine as tiles come
};

template <class T>
struct Element;

template <>
struct Element<float> {
    static constexpr int PER_LANE = 1;
    static vf multiply(vf acc, vi a, vi b) { return mul_add((vf)a, (vf)b, acc); }
    static void store_weights(float* p, vf w) { store(p, w); }
    static vf rounded(vf w) { return w; }
};

template <>
struct Element<bf16> {
    static constexpr int PER_LANE = 2;
    static vf multiply(vf acc, vi a, vi b) { return dot2(acc, a, b); }
    static void store_weights(bf16* p, vf w) { store(p, w); }
    static vf rounded(vf w) { return widen(narrow(w)); }
};

struct Scratch {
    std::vector<int32_t> keys, values, query;
    std::vector<float> scores, tile_sum, summed, peak, total;
    std::vector<char> weights, partly_seen;
};

// One lane of `a` times R rows of broadcast lanes, for `num` lanes in sequence: acc[r][v] += row[r][c] * panel[c][v].
template <class T, int R, int V>
inline void multiply_panel(const int32_t* const* rows, const int32_t* panel, int64_t stride, int64_t num, vf acc[R][V]) {
    for (int64_t c = 0; c < num; c++) {
        vi column[V];
        for (int v = 0; v < V; v++) column[v] = load_i(panel + c * stride + v * LANES);
        for (int r = 0; r < R; r++) {
            vi one = splat_i(rows[r][c]);
            for (int v = 0; v < V; v++) acc[r][v] = Element<T>::multiply(acc[r][v], one, column[v]);
        }
    }
}

template <class T>
class Worker {
  public:
    Worker(const Problem& problem, Scratch& scratch) : p_(problem), s_(scratch) {
        lanes_ = (p_.head_dim + Element<T>::PER_LANE - 1) / Element<T>::PER_LANE;
        width_ = (p_.head_dim + LANES - 1) / LANES * LANES;
        s_.keys.resize(lanes_ * PANEL);
        s_.values.resize(SPLIT / Element<T>::PER_LANE * width_);
        s_.query.resize(MAX_ROWS * lanes_);
        s_.scores.resize(MAX_ROWS * SPLIT);
        s_.partly_seen.resize(LANES * p_.head_dim * sizeof(T));
        s_.weights.resize(MAX_ROWS * SPLIT * sizeof(T));
        s_.tile_sum.resize(MAX_ROWS * width_);
        s_.summed.resize(MAX_ROWS * width_);
        s_.peak.resize(MAX_ROWS);
        s_.total.resize(MAX_ROWS);
    }

    static int64_t partial_size(const Problem& p) { return (p.head_dim + LANES - 1) / LANES * LANES + 2; }

    void run(const Item& item, float* partials) {
        start(item);
        std::fill_n(s_.summed.begin(), num_rows_ * width_, 0.0f);
        std::fill_n(s_.peak.begin(), num_rows_, LOWEST);
        std::fill_n(s_.total.begin(), num_rows_, 0.0f);
        gather_queries();
        for (int tile = item.first_tile; tile < item.end_tile; tile++) {
            attend(tile);
            for (int r = 0; r < num_rows_; r++) {
                const float* tile_sum = &s_.tile_sum[r * width_];
                if (item.partial < 0)
                    merge(r, tile_peak_[r], tile_total_[r], tile_sum);
                else
                    keep(partials + (item.partial + int64_t(tile - item.first_tile) * num_rows_ + r) * partial_size(p_), r);
            }
        }
        if (item.partial < 0) write();
    }

    // Combine the partial results of a group of tiles, which lie in order, and write the output.
    void combine(const Item& item, int num_tiles, const float* partials) {
        start(item);
        const int64_t size = partial_size(p_);
        for (int r = 0; r < num_rows_; r++) {
            s_.peak[r] = LOWEST;
            s_.total[r] = 0.0f;
            std::fill_n(s_.summed.begin() + r * width_, width_, 0.0f);
            for (int tile = 0; tile < num_tiles; tile++) {
                const float* place = partials + (item.partial + int64_t(tile) * num_rows_ + r) * size;
                merge(r, place[0], place[1], place + 2);
            }
        }
        write();
    }

  private:
    const Problem& p_;
    Scratch& s_;
    int64_t lanes_;  // 32-bit lanes of a head: one fp32 or two bfloat16 each
    int64_t width_;  // head_dim rounded up to a vector
    Item item_;
    int rows_per_head_, num_rows_;
    int64_t first_token_, first_position_;

    void start(const Item& item) {
        item_ = item;
        rows_per_head_ = item.num_queries * p_.repeat();
        num_rows_ = item.num_heads * rows_per_head_;
        first_token_ = p_.query_start[item.request] + item.first_query;
        const int64_t num_new = p_.query_start[item.request + 1] - p_.query_start[item.request];
        first_position_ = p_.seq_lens[item.request] - num_new + item.first_query;
    }

    int64_t query_of(int row) const { return row % rows_per_head_ / p_.repeat(); }

    // Of row `row`, in q and out.
    int64_t head_index(int row) const {
        const int64_t head = int64_t(item_.first_head + row / rows_per_head_) * p_.repeat() + row % p_.repeat();
        return (first_token_ + query_of(row)) * p_.num_heads + head;
    }

    void gather_queries() {
        const int64_t row_bytes = p_.head_dim * sizeof(T);
        std::fill_n(s_.query.begin(), num_rows_ * lanes_, 0);
        for (int r = 0; r < num_rows_; r++) std::memcpy(&s_.query[r * lanes_], p_.q + head_index(r) * row_bytes, row_bytes);
    }

    const T* page(int64_t position, int head, bool is_value) const {
        const int64_t id = p_.tables[item_.request * p_.max_blocks + position / p_.block_size];
        const int64_t plane = (id * 2 + is_value) * p_.num_kv_heads + item_.first_head + head;
        return reinterpret_cast<const T*>(p_.kv) + (plane * p_.block_size + position % p_.block_size) * p_.head_dim;
    }

    // Sixteen keys or values from `position` on, a multiple of sixteen and so all in one page, head_dim apart. Those that
    // no query of the item sees are zeros: their memory, or the whole page, may hold anything or not exist.
    const T* vectors_at(int64_t position, int head, bool is_value) {
        const bool is_seen = position + LANES > first_seen_ && position < end_seen_;
        const T* first = is_seen ? page(position, head, is_value) : nullptr;
        if (is_seen && position >= first_seen_ && position + LANES <= end_seen_) return first;
        T* copy = reinterpret_cast<T*>(s_.partly_seen.data());
        std::memset(copy, 0, LANES * p_.head_dim * sizeof(T));
        for (int64_t i = std::max<int64_t>(0, first_seen_ - position); i < LANES && position + i < end_seen_; i++)
            std::memcpy(copy + i * p_.head_dim, first + i * p_.head_dim, p_.head_dim * sizeof(T));
        return copy;
    }

    // The tile's keys and values panel by panel, all heads of a panel before the next, as they lie in memory.
    void attend(int tile) {
        start_ = int64_t(tile) * SPLIT;
        end_seen_ = std::min<int64_t>(start_ + SPLIT, first_position_ + item_.num_queries);
        first_seen_ = p_.window ? std::max<int64_t>(start_, first_position_ - p_.window + 1) : start_;
        const int begin = int((first_seen_ - start_) / PANEL) * PANEL;
        const int end = int((end_seen_ - start_ + PANEL - 1) / PANEL) * PANEL;
        for (int key = begin; key < end; key += PANEL) {
            fetch(key, false);
            for (int head = 0; head < item_.num_heads; head++) {
                pack_keys(head, key);
                score(head, key);
            }
        }
        for (int r = 0; r < num_rows_; r++) weigh(r, begin, end);
        std::fill_n(s_.tile_sum.begin(), num_rows_ * width_, 0.0f);
        const int step = item_.num_heads > 1 ? PANEL : SPLIT;
        for (int key = begin; key < end; key += step) {
            if (step == PANEL) fetch(key, true);
            for (int head = 0; head < item_.num_heads; head++) {
                pack_values(head, key, std::min(end, key + step));
                sum_values(head, key, std::min(end, key + step));
            }
        }
    }

    // Read a panel of all heads once in the order of memory, a load a line. The packing that follows reads across rows,
    // which no prefetcher follows: alone it gets 6 GB/s, and this 27 (one core, Zen 4, 2026-11-21).
    void fetch(int key, bool is_value) {
        const int64_t keys_a_page = std::min<int64_t>(p_.block_size, PANEL);
        for (int64_t position = start_ + key; position < std::min<int64_t>(start_ + key + PANEL, end_seen_); position += keys_a_page) {
            if (position + keys_a_page <= first_seen_) continue;
            for (int head = 0; head < item_.num_heads; head++) {
                const char* bytes = reinterpret_cast<const char*>(page(position, head, is_value));
                const int64_t num_keys = std::min<int64_t>(keys_a_page, end_seen_ - position);
                for (int64_t offset = 0; offset < num_keys * p_.head_dim * int64_t(sizeof(T)); offset += 64)
                    touched_ += *reinterpret_cast<const volatile char*>(bytes + offset);
            }
        }
    }

    void pack_keys(int head, int key) {
        for (int group = 0; group < PANEL / LANES; group++) {
            const T* rows = vectors_at(start_ + key + group * LANES, head, false);
            int32_t* place = &s_.keys[group * LANES];
            int64_t c = 0;
            for (; (c + LANES) * Element<T>::PER_LANE <= p_.head_dim; c += LANES) {
                vi block[LANES];
                for (int i = 0; i < LANES; i++) block[i] = load_i(rows + i * p_.head_dim + c * Element<T>::PER_LANE);
                transpose(block);
                for (int i = 0; i < LANES; i++) store_i(place + (c + i) * PANEL, block[i]);
            }
            for (; c < lanes_; c++)
                for (int i = 0; i < LANES; i++) {
                    int32_t lane = 0;
                    const int64_t left = p_.head_dim - c * Element<T>::PER_LANE;
                    std::memcpy(&lane, rows + i * p_.head_dim + c * Element<T>::PER_LANE,
                                sizeof(T) * std::min<int64_t>(left, Element<T>::PER_LANE));
                    place[c * PANEL + i] = lane;
                }
        }
    }

    template <int R>
    void score_rows(int row, int key) {
        const int32_t* rows[R];
        for (int r = 0; r < R; r++) rows[r] = &s_.query[(row + r) * lanes_];
        vf acc[R][PANEL / LANES] = {};
        multiply_panel<T, R, PANEL / LANES>(rows, s_.keys.data(), PANEL, lanes_, acc);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < PANEL / LANES; v++)
                store(&s_.scores[(row + r) * SPLIT + key + v * LANES], acc[r][v]);
    }

    void score(int head, int key) {
        int row = head * rows_per_head_;
        const int end_row = row + rows_per_head_;
        for (; row + 4 <= end_row; row += 4) score_rows<4>(row, key);
        for (; row + 2 <= end_row; row += 2) score_rows<2>(row, key);
        for (; row < end_row; row++) score_rows<1>(row, key);
    }

    // Pairs of keys (or single ones in fp32) by the elements of the head: [SPLIT / PER_LANE][width] lanes.
    void pack_values(int head, int begin, int end) {
        constexpr int PER_LANE = Element<T>::PER_LANE;
        for (int64_t k = begin; k < end; k += LANES) {
            const T* rows = vectors_at(start_ + k, head, true);
            int32_t* place = &s_.values[k / PER_LANE * width_];
            for (int i = 0; i < LANES; i += PER_LANE, place += width_) {
                if constexpr (PER_LANE == 1) {
                    std::memcpy(place, rows + i * p_.head_dim, p_.head_dim * sizeof(T));
                    std::fill(place + p_.head_dim, place + width_, 0);
                } else {
                    interleave(place, rows + i * p_.head_dim, rows + (i + 1) * p_.head_dim);
                }
            }
        }
    }

    void interleave(int32_t* place, const T* first, const T* second) const {
        int64_t d = 0;
        for (; d + 2 * LANES <= p_.head_dim; d += 2 * LANES) zip(place + d, first + d, second + d);
        for (; d < width_; d++) {
            uint16_t a = 0, b = 0;
            if (d < p_.head_dim) {
                std::memcpy(&a, first + d, sizeof a);
                std::memcpy(&b, second + d, sizeof b);
            }
            place[d] = int32_t(uint32_t(a) | uint32_t(b) << 16);
        }
    }

    // Scores of one row to weights, relative to the tile's own peak; tile_peak_ and tile_total_ of the row.
    void weigh(int row, int begin, int end) {
        const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int64_t position = first_position_ + query_of(row) - start_;
        const int32_t last = int32_t(std::clamp<int64_t>(position, -1, SPLIT));
        const int32_t first = p_.window ? int32_t(std::clamp<int64_t>(position - p_.window + 1, 0, SPLIT)) : 0;
        float* scores = &s_.scores[row * SPLIT];
        vf peaks = splat(LOWEST);
        vi is_nan = {};
        for (int k = begin; k < end; k += LANES) {
            vf s = load(scores + k) * p_.scale;
            if (p_.softcap > 0) s = tanh(s / p_.softcap) * p_.softcap;
            vi index = lane + k;
            s = (index <= last) & (index >= first) ? s : splat(LOWEST);
            store(scores + k, s);
            peaks = max(peaks, s);
            is_nan |= s != s;
        }
        // Every comparison with NaN is false, so a peak would lose it.
        float peak = largest(peaks);
        if (largest((vf)(is_nan & (vi)splat(1.0f))) != 0.0f) peak = std::numeric_limits<float>::quiet_NaN();
        tile_peak_[row] = peak;
        T* weights = reinterpret_cast<T*>(s_.weights.data()) + row * SPLIT;
        const bool is_hidden = peak == LOWEST;
        vf totals = {};
        for (int k = begin; k < end; k += LANES) {
            vf w = is_hidden ? vf{} : exp(load(scores + k) - peak);
            Element<T>::store_weights(weights + k, w);
            totals = totals + Element<T>::rounded(w);
        }
        tile_total_[row] = sum(totals);
    }

    template <int R, int V>
    void sum_rows(int row, int64_t d, int begin, int end) {
        constexpr int PER_LANE = Element<T>::PER_LANE;
        const int32_t* rows[R];
        vf acc[R][V];
        for (int r = 0; r < R; r++) {
            rows[r] = reinterpret_cast<const int32_t*>(s_.weights.data()) + ((row + r) * SPLIT + begin) / PER_LANE;
            for (int v = 0; v < V; v++) acc[r][v] = load(&s_.tile_sum[(row + r) * width_ + d + v * LANES]);
        }
        multiply_panel<T, R, V>(rows, &s_.values[begin / PER_LANE * width_ + d], width_, (end - begin) / PER_LANE, acc);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(&s_.tile_sum[(row + r) * width_ + d + v * LANES], acc[r][v]);
    }

    template <int R>
    void sum_row_block(int row, int begin, int end) {
        int64_t d = 0;
        for (; d + 4 * LANES <= width_; d += 4 * LANES) sum_rows<R, 4>(row, d, begin, end);
        for (; d + 2 * LANES <= width_; d += 2 * LANES) sum_rows<R, 2>(row, d, begin, end);
        for (; d < width_; d += LANES) sum_rows<R, 1>(row, d, begin, end);
    }

    void sum_values(int head, int begin, int end) {
        int row = head * rows_per_head_;
        const int end_row = row + rows_per_head_;
        for (; row + 4 <= end_row; row += 4) sum_row_block<4>(row, begin, end);
        for (; row + 2 <= end_row; row += 2) sum_row_block<2>(row, begin, end);
        for (; row < end_row; row++) sum_row_block<1>(row, begin, end);
    }

    // Add a tile's result to what is summed so far, both brought to their common peak.
    void merge(int row, float peak, float total, const float* tile_sum) {
        if (peak == LOWEST) return;
        const float common = s_.peak[row] >= peak ? s_.peak[row] : peak;
        const float old_scale = exp(splat(s_.peak[row] - common))[0], new_scale = exp(splat(peak - common))[0];
        s_.total[row] = s_.total[row] * old_scale + total * new_scale;
        s_.peak[row] = common;
        for (int64_t d = 0; d < width_; d += LANES) {
            float* place = &s_.summed[row * width_ + d];
            store(place, load(place) * old_scale + load(tile_sum + d) * new_scale);
        }
    }

    void keep(float* place, int row) const {
        place[0] = tile_peak_[row];
        place[1] = tile_total_[row];
        std::copy_n(&s_.tile_sum[row * width_], width_, place + 2);
    }

    void write() {
        for (int r = 0; r < num_rows_; r++) {
            T* place = reinterpret_cast<T*>(p_.out) + head_index(r) * p_.head_dim;
            const vf total = splat(s_.total[r]);
            for (int64_t d = 0; d < p_.head_dim; d += LANES) {
                const vf value = load(&s_.summed[r * width_ + d]) / total;
                if (d + LANES <= p_.head_dim)
                    store(place + d, value);
                else
                    store_part(place + d, value, int(p_.head_dim - d));
            }
        }
    }

    int64_t start_, first_seen_, end_seen_;  // positions: the tile's first, and those that some query sees of it
    float tile_peak_[MAX_ROWS], tile_total_[MAX_ROWS];
    int touched_ = 0;
};

// The pieces of work: blocks of queries by KV head, those that see most first. Where they are too few for the threads, a
// piece is also cut by tiles; then its partial results are kept and combined afterwards, by the same arithmetic.
struct Schedule {
    std::vector<Item> items;
    std::vector<std::pair<Item, int>> cut;  // (the whole of a cut piece, its tiles)
    int64_t num_partials = 0;
};

// Waking a sleeping thread costs 10 to 66 us (2 cores, Zen 4, 2026-11-21): below so many keys by heads, one is done sooner.
constexpr int64_t KEYS_A_THREAD = 1024;

// KV heads in one piece: as many as fit its rows, while there are requests enough for all threads.
int32_t heads_together(const Problem& p, int num_queries, int num_threads) {
    int64_t heads = std::clamp<int64_t>(MAX_ROWS / (int64_t(num_queries) * p.repeat()), 1, p.num_kv_heads);
    while (heads > 1 && p.num_requests * ((p.num_kv_heads + heads - 1) / heads) < 4 * num_threads) heads = (heads + 1) / 2;
    return int32_t(heads);
}

Schedule plan(const Problem& p, int num_threads) {
    const int queries_per_item = std::max(1, MAX_ROWS / p.repeat());
    Schedule schedule;
    std::vector<Item> whole;
    int64_t num_tiles = 0;
    for (int64_t request = 0; request < p.num_requests; request++) {
        const int32_t num_queries = p.query_start[request + 1] - p.query_start[request];
        const int32_t before = p.seq_lens[request] - num_queries;
        const int32_t heads_per_item = heads_together(p, std::min(queries_per_item, num_queries), num_threads);
        for (int32_t first = 0; first < num_queries; first += queries_per_item)
            for (int32_t head = 0; head < p.num_kv_heads; head += heads_per_item) {
                const int32_t count = std::min(queries_per_item, num_queries - first);
                const int32_t heads = std::min<int32_t>(heads_per_item, int32_t(p.num_kv_heads) - head);
                const int64_t lowest = p.window ? std::max<int64_t>(0, before + first - p.window + 1) : 0;
                Item item{int32_t(request), head, heads, first, count, int32_t(lowest / SPLIT), (before + first + count - 1) / SPLIT + 1, -1};
                num_tiles += item.end_tile - item.first_tile;
                whole.push_back(item);
            }
    }
    const int64_t fair = std::max<int64_t>(1, num_tiles / (4 * num_threads));
    for (const Item& item : whole) {
        const int64_t tiles = item.end_tile - item.first_tile;
        if (num_threads == 1 || tiles <= 2 * fair) {
            schedule.items.push_back(item);
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
    auto cost = [](const Item& item) { return int64_t(item.end_tile - item.first_tile) * item.num_heads * (item.num_queries + 8); };
    std::stable_sort(schedule.items.begin(), schedule.items.end(),
                     [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
    return schedule;
}

// Of all pieces, in keys that one query of one KV head sees.
int64_t work(const Problem& p) {
    int64_t keys = 0;
    for (int64_t request = 0; request < p.num_requests; request++) {
        const int64_t seen = p.window ? std::min<int64_t>(p.window, p.seq_lens[request]) : p.seq_lens[request];
        keys += seen * (p.query_start[request + 1] - p.query_start[request]);
    }
    return keys * p.num_kv_heads;
}

template <class T>
void attend_all(const Problem& p, int num_threads) {
    num_threads = int(std::min<int64_t>(num_threads, 1 + work(p) / KEYS_A_THREAD));
    const Schedule schedule = plan(p, num_threads);
    std::vector<float> partials(schedule.num_partials * Worker<T>::partial_size(p));
    const int team = int(std::min<int64_t>(num_threads, int64_t(schedule.items.size())));
#pragma omp parallel num_threads(team) if (team > 1)
    {
        static thread_local Scratch scratch;
        Worker<T> worker(p, scratch);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < schedule.items.size(); i++) worker.run(schedule.items[i], partials.data());
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < schedule.cut.size(); i++)
            worker.combine(schedule.cut[i].first, schedule.cut[i].second, partials.data());
    }
}

}  // namespace

// q, out [T, Hq, D]; kv [blocks, 2, G, block_size, D]; see the Python signature. dtype 0: fp32, 1: bfloat16.
static void paged_attention(const void* q, const void* kv, void* out, const int32_t* query_start,
                            const int32_t* seq_lens, const int32_t* tables, int64_t num_requests,
                            int64_t max_blocks, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                            int64_t block_size, int64_t window, float scale, float softcap, int64_t dtype,
                            int64_t num_threads) {
    Problem p{static_cast<const char*>(q), static_cast<const char*>(kv), static_cast<char*>(out),
              query_start, seq_lens, tables, num_requests, max_blocks,
              num_heads, num_kv_heads, head_dim, block_size, window, scale, softcap};
    if (dtype == 0)
        attend_all<float>(p, int(num_threads));
    else
        attend_all<bf16>(p, int(num_threads));
}
INFERD_EXPORT(paged_attention)
