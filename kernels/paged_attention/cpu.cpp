// Attention over a paged KV pool for decodes, chunks and any mix of them (flash attention, Dao et al. 2022,
// arXiv:2205.14135, with the KV in tiles at absolute positions).
//
// A query's bits depend on its own sequence alone. Each tile of SPLIT keys gives a partial result of its own (its peak,
// the sum of its weights, its weighted values), and partial results are combined in the order of the tiles. Within a
// tile every score is one chain of products over the head's elements and every output element one chain over the keys,
// whatever is computed beside it: rows, heads and keys that lie next to each other only share what was loaded. Keys that
// a query may not see have weight 0 and change nothing, exactly.
//
// Keys are turned by 16 x 16 blocks, so that a vector holds sixteen keys and a score needs no sum across lanes; values
// are interleaved by pairs of keys. bfloat16 is multiplied two by two into fp32, and the weights are rounded to bfloat16
// before they are summed and multiplied, so that they add up to what is divided by.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace {

using namespace simd;

constexpr int SPLIT = 256;
constexpr int PANEL = 64;  // keys turned at a time: four vectors
constexpr int MAX_ROWS = 64;
constexpr int AHEAD = 64;  // keys that are fetched ahead; values are fetched while the keys of their tile are turned
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

// Consecutive queries of one request for one KV head, and the tiles that this piece of work covers.
struct Item {
    int32_t request, kv_head;
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
    std::vector<float> scores, summed, peak, total;
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
        s_.summed.resize(MAX_ROWS * width_);
        s_.peak.resize(MAX_ROWS);
        s_.total.resize(MAX_ROWS);
    }

    static int64_t partial_size(const Problem& p) { return (p.head_dim + LANES - 1) / LANES * LANES + 2; }

    void run(const Item& item, float* partials) {
        const int num_rows = item.num_queries * p_.repeat();
        const int64_t first_token = p_.query_start[item.request] + item.first_query;
        const int64_t num_new = p_.query_start[item.request + 1] - p_.query_start[item.request];
        const int64_t first_position = p_.seq_lens[item.request] - num_new + item.first_query;
        gather_queries(item, first_token);
        std::fill_n(s_.summed.begin(), num_rows * width_, 0.0f);
        std::fill_n(s_.peak.begin(), num_rows, LOWEST);
        std::fill_n(s_.total.begin(), num_rows, 0.0f);
        for (int tile = item.first_tile; tile < item.end_tile; tile++) {
            attend(item, tile, first_position, num_rows);
            if (item.partial < 0) continue;
            float* place = partials + (item.partial + int64_t(tile - item.first_tile) * num_rows) * partial_size(p_);
            keep_partial(place, num_rows);
        }
        if (item.partial < 0) write(item, first_token, num_rows);
    }

    // Combine the partial results of a group of tiles, which lie in order, and write the output.
    void combine(const Item& item, int num_tiles, const float* partials) {
        const int num_rows = item.num_queries * p_.repeat();
        const int64_t size = partial_size(p_);
        for (int r = 0; r < num_rows; r++) {
            s_.peak[r] = LOWEST;
            s_.total[r] = 0.0f;
            std::fill_n(s_.summed.begin() + r * width_, width_, 0.0f);
            for (int tile = 0; tile < num_tiles; tile++) {
                const float* place = partials + (item.partial + int64_t(tile) * num_rows + r) * size;
                merge(r, place[0], place[1], place + 2);
            }
        }
        write(item, p_.query_start[item.request] + item.first_query, num_rows);
    }

  private:
    const Problem& p_;
    Scratch& s_;
    int64_t lanes_;  // 32-bit lanes of a head: one fp32 or two bfloat16 each
    int64_t width_;  // head_dim rounded up to a vector

    // Row r is query r / repeat, head r % repeat of the KV head's.
    void gather_queries(const Item& item, int64_t first_token) {
        const int64_t row_bytes = p_.head_dim * sizeof(T);
        std::fill_n(s_.query.begin(), int64_t(item.num_queries) * p_.repeat() * lanes_, 0);
        for (int query = 0; query < item.num_queries; query++)
            for (int head = 0; head < p_.repeat(); head++) {
                int64_t place = (first_token + query) * p_.num_heads + int64_t(item.kv_head) * p_.repeat() + head;
                std::memcpy(&s_.query[(query * p_.repeat() + head) * lanes_], p_.q + place * row_bytes, row_bytes);
            }
    }

    const T* page(const Item& item, int64_t block, bool is_value) const {
        int64_t id = p_.tables[item.request * p_.max_blocks + block];
        int64_t plane = (id * 2 + is_value) * p_.num_kv_heads + item.kv_head;
        return reinterpret_cast<const T*>(p_.kv) + plane * p_.block_size * p_.head_dim;
    }

    // Sixteen keys or values from `position` on, a multiple of sixteen and so all in one page, head_dim apart. Those that
    // no query of the item sees are zeros: their memory, or the whole page, may hold anything or not exist.
    const T* vectors_at(const Item& item, int64_t position, int64_t first_seen, int64_t end_seen, bool is_value) {
        const bool is_seen = position + LANES > first_seen && position < end_seen;
        const T* first = is_seen ? page(item, position / p_.block_size, is_value) + position % p_.block_size * p_.head_dim : nullptr;
        if (is_seen && position >= first_seen && position + LANES <= end_seen) return first;
        T* copy = reinterpret_cast<T*>(s_.partly_seen.data());
        std::memset(copy, 0, LANES * p_.head_dim * sizeof(T));
        for (int64_t i = std::max<int64_t>(0, first_seen - position); i < LANES && position + i < end_seen; i++)
            std::memcpy(copy + i * p_.head_dim, first + i * p_.head_dim, p_.head_dim * sizeof(T));
        return copy;
    }

    // Pages lie anywhere, so the processor does not see them coming: sixteen keys or values from `position` on.
    void prefetch(const Item& item, int64_t position, int64_t first_seen, int64_t end_seen, bool is_value) const {
        if (position + LANES <= first_seen || position >= end_seen) return;
        const T* first = page(item, position / p_.block_size, is_value) + position % p_.block_size * p_.head_dim;
        const char* bytes = reinterpret_cast<const char*>(first);
        const int64_t num_bytes = std::min<int64_t>(LANES, end_seen - position) * p_.head_dim * int64_t(sizeof(T));
        for (int64_t offset = 0; offset < num_bytes; offset += 64) __builtin_prefetch(bytes + offset, 0, 2);
    }

    void attend(const Item& item, int tile, int64_t first_position, int num_rows) {
        const int64_t start = int64_t(tile) * SPLIT;
        const int64_t end_seen = std::min<int64_t>(start + SPLIT, first_position + item.num_queries);
        const int64_t first_seen = p_.window ? std::max<int64_t>(start, first_position - p_.window + 1) : start;
        const int num_panels = int((end_seen - start + PANEL - 1) / PANEL);
        const int first_panel = int((first_seen - start) / PANEL);
        for (int64_t ahead = 0; ahead < AHEAD; ahead += LANES)
            prefetch(item, start + first_panel * PANEL + ahead, first_seen, end_seen, false);
        for (int panel = first_panel; panel < num_panels; panel++) {
            pack_keys(item, start + panel * PANEL, first_seen, end_seen);
            score(panel, num_rows);
        }
        pack_values(item, start, first_seen, end_seen, first_panel, num_panels);
        for (int r = 0; r < num_rows; r++) weigh(r, start, first_position + r / p_.repeat(), first_panel, num_panels);
        sum_values(first_panel, num_panels, num_rows, item.partial >= 0);
    }

    void pack_keys(const Item& item, int64_t start, int64_t first_seen, int64_t end_seen) {
        for (int group = 0; group < PANEL / LANES; group++) {
            const int64_t position = start + group * LANES;
            prefetch(item, position + AHEAD, first_seen, end_seen, false);
            prefetch(item, position, first_seen, end_seen, true);
            const T* rows = vectors_at(item, position, first_seen, end_seen, false);
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
    void score_rows(int panel, int row) {
        const int32_t* rows[R];
        for (int r = 0; r < R; r++) rows[r] = &s_.query[(row + r) * lanes_];
        vf acc[R][PANEL / LANES] = {};
        multiply_panel<T, R, PANEL / LANES>(rows, s_.keys.data(), PANEL, lanes_, acc);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < PANEL / LANES; v++)
                store(&s_.scores[(row + r) * SPLIT + panel * PANEL + v * LANES], acc[r][v]);
    }

    void score(int panel, int num_rows) {
        int row = 0;
        for (; row + 4 <= num_rows; row += 4) score_rows<4>(panel, row);
        for (; row + 2 <= num_rows; row += 2) score_rows<2>(panel, row);
        for (; row < num_rows; row++) score_rows<1>(panel, row);
    }

    // Pairs of keys (or single ones in fp32) by the elements of the head: [SPLIT / PER_LANE][width] lanes.
    void pack_values(const Item& item, int64_t start, int64_t first_seen, int64_t end_seen, int first_panel, int num_panels) {
        constexpr int PER_LANE = Element<T>::PER_LANE;
        for (int64_t k = first_panel * PANEL; k < num_panels * PANEL; k += LANES) {
            const T* rows = vectors_at(item, start + k, first_seen, end_seen, true);
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
    void weigh(int row, int64_t start, int64_t position, int first_panel, int num_panels) {
        const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int32_t last = int32_t(std::clamp<int64_t>(position - start, -1, SPLIT));
        const int32_t first = p_.window ? int32_t(std::clamp<int64_t>(position - p_.window + 1 - start, 0, SPLIT)) : 0;
        float* scores = &s_.scores[row * SPLIT];
        const int begin = first_panel * PANEL, end = num_panels * PANEL;
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
    void sum_rows(int row, int64_t d, int begin, int end, bool keeps) {
        constexpr int PER_LANE = Element<T>::PER_LANE;
        const int32_t* rows[R];
        for (int r = 0; r < R; r++)
            rows[r] = reinterpret_cast<const int32_t*>(s_.weights.data()) + (row + r) * (SPLIT / PER_LANE) + begin / PER_LANE;
        vf acc[R][V] = {};
        multiply_panel<T, R, V>(rows, &s_.values[begin / PER_LANE * width_ + d], width_, (end - begin) / PER_LANE, acc);
        for (int r = 0; r < R; r++) {
            if (tile_peak_[row + r] == LOWEST) continue;
            float old_scale = scale_old_[row + r], new_scale = scale_new_[row + r];
            for (int v = 0; v < V; v++) {
                float* place = &s_.summed[(row + r) * width_ + d + v * LANES];
                store(place, keeps ? acc[r][v] : load(place) * old_scale + acc[r][v] * new_scale);
            }
        }
    }

    template <int R>
    void sum_row_block(int row, int begin, int end, bool keeps) {
        int64_t d = 0;
        for (; d + 4 * LANES <= width_; d += 4 * LANES) sum_rows<R, 4>(row, d, begin, end, keeps);
        for (; d + 2 * LANES <= width_; d += 2 * LANES) sum_rows<R, 2>(row, d, begin, end, keeps);
        for (; d < width_; d += LANES) sum_rows<R, 1>(row, d, begin, end, keeps);
    }

    void sum_values(int first_panel, int num_panels, int num_rows, bool keeps) {
        const int begin = first_panel * PANEL, end = num_panels * PANEL;
        for (int r = 0; r < num_rows; r++) rescale(r, tile_peak_[r], tile_total_[r]);
        int row = 0;
        for (; row + 4 <= num_rows; row += 4) sum_row_block<4>(row, begin, end, keeps);
        for (; row + 2 <= num_rows; row += 2) sum_row_block<2>(row, begin, end, keeps);
        for (; row < num_rows; row++) sum_row_block<1>(row, begin, end, keeps);
    }

    // The factors that bring what is summed so far, and a tile's own sum, to their common peak; peak and total updated.
    void rescale(int row, float peak, float total) {
        if (peak == LOWEST) return;
        float common = s_.peak[row] >= peak ? s_.peak[row] : peak;
        scale_old_[row] = exp(splat(s_.peak[row] - common))[0];
        scale_new_[row] = exp(splat(peak - common))[0];
        s_.total[row] = s_.total[row] * scale_old_[row] + total * scale_new_[row];
        s_.peak[row] = common;
    }

    void keep_partial(float* place, int num_rows) {
        for (int r = 0; r < num_rows; r++) {
            float* own = place + r * partial_size(p_);
            own[0] = tile_peak_[r];
            own[1] = tile_total_[r];
            std::copy_n(&s_.summed[r * width_], width_, own + 2);
        }
    }

    void merge(int row, float peak, float total, const float* summed) {
        if (peak == LOWEST) return;
        rescale(row, peak, total);
        float old_scale = scale_old_[row], new_scale = scale_new_[row];
        for (int64_t d = 0; d < width_; d += LANES) {
            float* place = &s_.summed[row * width_ + d];
            store(place, load(place) * old_scale + load(summed + d) * new_scale);
        }
    }

    void write(const Item& item, int64_t first_token, int num_rows) {
        for (int r = 0; r < num_rows; r++) {
            int64_t token = first_token + r / p_.repeat();
            int64_t head = int64_t(item.kv_head) * p_.repeat() + r % p_.repeat();
            T* place = reinterpret_cast<T*>(p_.out) + (token * p_.num_heads + head) * p_.head_dim;
            vf total = splat(s_.total[r]);
            for (int64_t d = 0; d < p_.head_dim; d += LANES) {
                vf value = load(&s_.summed[r * width_ + d]) / total;
                if (d + LANES <= p_.head_dim)
                    store(place + d, value);
                else
                    store_part(place + d, value, int(p_.head_dim - d));
            }
        }
    }

    float tile_peak_[MAX_ROWS], tile_total_[MAX_ROWS], scale_old_[MAX_ROWS], scale_new_[MAX_ROWS];
};

// The pieces of work: blocks of queries by KV head, those that see most first. Where they are too few for the threads, a
// piece is also cut by tiles; then its partial results are kept and combined afterwards, by the same arithmetic.
struct Schedule {
    std::vector<Item> items;
    std::vector<std::pair<Item, int>> cut;  // (the whole of a cut piece, its tiles)
    int64_t num_partials = 0;
};

// Waking a thread costs some 20 us or more: below so many keys by heads, one thread is done sooner.
constexpr int64_t KEYS_A_THREAD = 1024;

Schedule plan(const Problem& p, int num_threads) {
    const int queries_per_item = std::max(1, MAX_ROWS / p.repeat());
    Schedule schedule;
    std::vector<Item> whole;
    int64_t num_tiles = 0;
    for (int64_t request = 0; request < p.num_requests; request++) {
        const int32_t num_queries = p.query_start[request + 1] - p.query_start[request];
        const int32_t before = p.seq_lens[request] - num_queries;
        for (int32_t first = 0; first < num_queries; first += queries_per_item)
            for (int32_t head = 0; head < p.num_kv_heads; head++) {
                const int32_t count = std::min(queries_per_item, num_queries - first);
                const int64_t lowest = p.window ? std::max<int64_t>(0, before + first - p.window + 1) : 0;
                Item item{int32_t(request), head, first, count, int32_t(lowest / SPLIT), (before + first + count - 1) / SPLIT + 1, -1};
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
        const int64_t num_rows = int64_t(item.num_queries) * p.repeat();
        for (int64_t tile = 0; tile < tiles; tile += fair) {
            piece.first_tile = int32_t(item.first_tile + tile);
            piece.end_tile = int32_t(std::min<int64_t>(item.end_tile, piece.first_tile + fair));
            piece.partial = schedule.num_partials + tile * num_rows;
            schedule.items.push_back(piece);
        }
        schedule.num_partials += tiles * num_rows;
    }
    auto cost = [](const Item& item) { return int64_t(item.end_tile - item.first_tile) * (item.num_queries + 8); };
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
extern "C" void inferd_paged_attention(const void* q, const void* kv, void* out, const int32_t* query_start,
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
