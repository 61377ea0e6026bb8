// Attention over a paged KV pool for decodes, chunks and any mix of them (flash attention, Dao et al. 2022,
// arXiv:2205.14135, with the KV in tiles at absolute positions).
//
// A query's bits depend on its own sequence alone:
// - Each tile of SPLIT keys gives a partial result of its own: its peak, the sum of its weights, its weighted values.
//   Partial results are combined in the order of the tiles.
// - Within a tile a score is sixteen chains of products, added up in order; chain l runs over the lanes l, l + 16, ..
//   of the head. Every output element is one chain over the keys, whatever is computed beside it.
// - Keys that a query may not see have weight 0 or are left out. The two differ only in the sign of a zero, which is
//   lost when tiles are combined. A key of its own sequence that holds inf or NaN may show: then the request fails.
//
// A lane is 32 bits: one fp32, or two bfloat16, which are multiplied two by two into fp32. Two ways give the same bits:
// - Few rows (decodes) read keys as they lie: a vector holds sixteen lanes of one key, a link of every chain, and the
//   chains of sixteen keys are transposed to be added up. Values are interleaved by pairs in registers. Nothing is
//   stored; memory bounds the speed.
// - Many rows (prompts) transpose keys by 16 x 16 blocks first, so that a vector holds one lane of sixteen keys. They
//   interleave values once for all rows. Products bound the speed.
//
// Weights are rounded to the element's type before they are summed and multiplied, so that their sum is exactly the
// divisor.
//
// K and V in 8 bits are widened exactly when they are loaded. A key's scale multiplies its scores, and a value's scale
// its weights, which are rounded after that.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "call.h"
#include "e4m3.h"
#include "paged_attention/schedule.h"
#include "parallel.h"
#include "simd.h"

namespace {

using namespace simd;

constexpr int PANEL = 64;  // keys transposed at a time
constexpr int DIRECT_ROWS = 8;   // of one KV head: for so few, transposing its keys costs more than it saves
constexpr int GROUPS_AHEAD = 2;  // prefetched: best of 1, 2, 4 and 8 over heads of 64 and 128 (Zen 4, 2026-11-21)
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Rows of one head that are computed together, and the keys of the tile, by sixteen, that any of them sees.
struct Rows {
    int head, first, num, begin, end;
};

// Sixteen keys or values of a head, all in one page; `key` counts from the tile's start. If no query of the item sees
// them, they may hold anything.
struct Group {
    const char* data;
    const float* scales;  // of its keys or values in 8 bits
    int head, key;
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
    std::vector<float> scores, tile_sum, summed, peak, total, key_scales, value_scales;
    std::vector<char> weights, partly_seen, widened;
    std::vector<Group> groups;
    std::vector<Rows> rows;
};

// acc[r][v] += row[r][c] * panel[c][v] for the lanes c = first, first + step .. end.
template <class T, int R, int V>
inline void multiply_panel(const int32_t* rows, int64_t row_stride, const int32_t* panel, int64_t panel_stride,
                           int64_t first, int64_t end, int64_t step, vf acc[R][V]) {
    for (int64_t c = first; c < end; c += step) {
        vi column[V];
        for (int v = 0; v < V; v++) column[v] = load_i(panel + c * panel_stride + v * LANES);
        for (int r = 0; r < R; r++) {
            vi one = splat_i(rows[r * row_stride + c]);
            for (int v = 0; v < V; v++) acc[r][v] = Element<T>::multiply(acc[r][v], one, column[v]);
        }
    }
}

// Queries of type T over K and V stored as S: T itself, or 8 bits.
template <class T, class S>
class Worker {
    static constexpr int PER_LANE = Element<T>::PER_LANE;
    static constexpr bool HAS_SCALES = std::is_same_v<S, e4m3>;

  public:
    Worker(const Problem& problem, Scratch& scratch) : p_(problem), s_(scratch) {
        lanes_ = (p_.head_dim + PER_LANE - 1) / PER_LANE;
        width_ = (p_.head_dim + LANES - 1) / LANES * LANES;
        s_.keys.resize(lanes_ * PANEL);
        s_.values.resize(SPLIT / PER_LANE * width_);
        s_.query.resize(MAX_ROWS * lanes_);
        s_.scores.resize(MAX_ROWS * SPLIT);
        s_.partly_seen.resize(LANES * p_.head_dim * sizeof(S));
        if (HAS_SCALES) {
            s_.key_scales.resize(PANEL), s_.value_scales.resize(MAX_ROWS * SPLIT);
            s_.widened.resize(LANES * p_.head_dim * sizeof(T));
        }
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
                if (item.partial < 0)
                    merge(r, tile_peak_[r], tile_total_[r], &s_.tile_sum[r * width_]);
                else
                    keep(partials + (item.partial + int64_t(tile - item.first_tile) * num_rows_ + r) * partial_size(p_), r);
            }
        }
        if (item.partial < 0) write();
    }

    // Combine the partial results of a group of tiles, which are in order, and write the output.
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
    int64_t lanes_;  // of a head
    int64_t width_;  // head_dim rounded up to a vector
    Item item_;
    int rows_per_head_, num_rows_;
    int64_t first_token_, first_position_;
    int64_t start_, first_seen_, end_seen_;  // positions: the tile's first, and the range that any query sees of it
    float tile_peak_[MAX_ROWS], tile_total_[MAX_ROWS];
    size_t blocks_per_head_;  // of rows
    const char* ahead_;       // the group to prefetch now
    int panel_begin_;         // key of the first group that is packed and not used yet

    void start(const Item& item) {
        item_ = item;
        rows_per_head_ = item.num_queries * p_.repeat();
        num_rows_ = item.num_heads * rows_per_head_;
        first_token_ = p_.query_start[item.request] + item.first_query;
        const int64_t num_new = p_.query_start[item.request + 1] - p_.query_start[item.request];
        first_position_ = p_.seq_lens[item.request] - num_new + item.first_query;
    }

    // Index of the row's query in the item.
    int64_t query_of(int row) const { return row % rows_per_head_ / p_.repeat(); }

    // Calls f(row, offset of its head in q and out).
    template <class F>
    void for_heads(F f) const {
        int row = 0;
        for (int head = 0; head < item_.num_heads; head++)
            for (int64_t token = first_token_; token < first_token_ + item_.num_queries; token++)
                for (int64_t i = 0; i < p_.repeat(); i++)
                    f(row++, (token * p_.num_heads + (item_.first_head + head) * p_.repeat() + i) * p_.head_dim);
    }

    void gather_queries() {
        std::fill_n(s_.query.begin(), num_rows_ * lanes_, 0);
        const T* q = reinterpret_cast<const T*>(p_.q);
        for_heads([&](int row, int64_t place) { std::memcpy(&s_.query[row * lanes_], q + place, p_.head_dim * sizeof(T)); });
    }

    void attend(int tile) {
        start_ = int64_t(tile) * SPLIT;
        end_seen_ = std::min<int64_t>(start_ + SPLIT, first_position_ + item_.num_queries);
        first_seen_ = p_.window ? std::max<int64_t>(start_, first_position_ - p_.window + 1) : start_;
        list_rows();
        list_groups();
        std::fill_n(s_.tile_sum.begin(), num_rows_ * width_, 0.0f);
        const bool is_direct = rows_per_head_ <= DIRECT_ROWS && can_be_direct();
        const size_t num = s_.groups.size() / 2;
        for (size_t i = 0; i < num; i++) {
            look_ahead(i);
            if (is_direct) score_direct(s_.groups[i]);
            else score_turned(i);
        }
        for (const Rows& rows : s_.rows)
            for (int row = rows.first; row < rows.first + rows.num; row++) weigh(row, rows.head, rows.begin, rows.end);
        for (size_t i = num; i < 2 * num; i++) {
            look_ahead(i);
            if (is_direct) sum_direct(s_.groups[i]);
            else sum_packed(i);
        }
    }

    // Groups of four rows, and the rest. Each skips the keys that none of its queries sees.
    void list_rows() {
        s_.rows.clear();
        for (int head = 0; head < item_.num_heads; head++)
            for (int row = 0, num; row < rows_per_head_; row += num) {
                num = rows_per_head_ - row >= 4 ? 4 : rows_per_head_ - row >= 2 ? 2 : 1;
                const int64_t first = first_position_ + row / p_.repeat() - start_;
                const int64_t last = first_position_ + (row + num - 1) / p_.repeat() - start_;
                const int64_t lowest = p_.window ? std::clamp<int64_t>(first - p_.window + 1, 0, SPLIT) : 0;
                const int64_t end = std::clamp<int64_t>(last + 1, 0, SPLIT);
                const int begin = int(lowest) / LANES * LANES;
                s_.rows.push_back({head, head * rows_per_head_ + row, num, begin, (int(end) + LANES - 1) / LANES * LANES});
            }
        blocks_per_head_ = s_.rows.size() / item_.num_heads;
    }

    // The tile's keys, then its values, in the order of memory: panel by panel, all heads of a panel before the next.
    void list_groups() {
        s_.groups.clear();
        const int64_t plane = p_.block_size * p_.head_dim * sizeof(S);
        const int begin = int(first_seen_ - start_) / LANES * LANES, end = int(end_seen_ - start_);
        const char* keys[SPLIT / LANES];  // of head 0
        const float* scales[SPLIT / LANES] = {};
        for (int key = begin; key < end; key += LANES) {
            const int64_t position = start_ + key;
            const int64_t id = p_.tables[item_.request * p_.max_blocks + position / p_.block_size];
            const int64_t offset = position % p_.block_size * p_.head_dim * int64_t(sizeof(S));
            keys[key / LANES] = p_.kv + id * 2 * p_.num_kv_heads * plane + offset;
            if (HAS_SCALES)
                scales[key / LANES] = p_.kv_scales + id * 2 * p_.num_kv_heads * p_.block_size + position % p_.block_size;
        }
        const int panel = item_.num_heads > 1 ? int(std::min<int64_t>(PANEL, p_.block_size)) : PANEL;
        for (int is_value = 0; is_value < 2; is_value++)
            for (int first = begin / panel * panel; first < end; first += panel)
                for (int head = 0; head < item_.num_heads; head++)
                    for (int key = std::max(first, begin); key < std::min(first + panel, end); key += LANES) {
                        const int64_t planes = is_value * p_.num_kv_heads + item_.first_head + head;
                        const float* own = HAS_SCALES ? scales[key / LANES] + planes * p_.block_size : nullptr;
                        s_.groups.push_back({keys[key / LANES] + planes * plane, own, head, key});
                        if (HAS_SCALES && is_value) keep_value_scales(s_.groups.back());
                    }
    }

    // Zeros for values that no query sees, because 0 * NaN is NaN.
    void keep_value_scales(const Group& group) {
        float* place = &s_.value_scales[group.head * SPLIT + group.key];
        for (int i = 0; i < LANES; i++) {
            const int64_t position = start_ + group.key + i;
            place[i] = position >= first_seen_ && position < end_seen_ ? group.scales[i] : 0.0f;
        }
    }

    void look_ahead(size_t i) { ahead_ = s_.groups[std::min(i + GROUPS_AHEAD, s_.groups.size() - 1)].data; }

    // Sixteen lanes of the current group. Prefetches the same place of a later group to the second-level cache, line by
    // line beside the loads. Sixty lines at once, or to the first level, took a third longer (Zen 4, 2026-11-21).
    vi take(const S* data, int64_t element) const {
        __builtin_prefetch(ahead_ + element * sizeof(S), 0, 2);
        if constexpr (!HAS_SCALES) return load_i(data + element);
        else if constexpr (PER_LANE == 2) return load_pairs(data + element);
        else return (vi)load(data + element);
    }

    // The same for a group that was widened.
    template <class X>
    std::enable_if_t<!std::is_same_v<X, S>, vi> take(const X* data, int64_t element) const {
        return load_i(data + element);
    }

    // All of a group as T, if several blocks of rows take it: widening costs more than loading.
    const T* widened(const S* data) {
        T* place = reinterpret_cast<T*>(s_.widened.data());
        for (int64_t i = 0; i < LANES * p_.head_dim; i += LANES * PER_LANE) store_i(place + i, take(data, i));
        return place;
    }

    // One element, for the end of a head that is less than a vector.
    static T one(S x) {
        if constexpr (!HAS_SCALES) return x;
        else if constexpr (PER_LANE == 2) return {to_bf16_bits(x)};
        else return to_float(x);
    }

    // Keys that no query sees are masked after their products, so they may hold anything.
    const S* keys_of(const Group& group) const { return reinterpret_cast<const S*>(group.data); }

    // Zeros replace values that no query sees, because 0 * NaN is NaN.
    const S* values_of(const Group& group) {
        const S* data = reinterpret_cast<const S*>(group.data);
        const int64_t first = std::max<int64_t>(0, first_seen_ - start_ - group.key);
        const int64_t end = std::min<int64_t>(LANES, end_seen_ - start_ - group.key);
        if (first == 0 && end == LANES) return data;
        S* copy = reinterpret_cast<S*>(s_.partly_seen.data());
        std::memset(copy, 0, LANES * p_.head_dim * sizeof(S));
        std::memcpy(copy + first * p_.head_dim, data + first * p_.head_dim, (end - first) * p_.head_dim * sizeof(S));
        return copy;
    }

    // Calls f(how many, rows, from, to) for the rows of a head that see any of the keys from .. to.
    template <class F>
    void for_rows(int head, int begin, int end, F f) {
        for (size_t i = head * blocks_per_head_; i < (head + 1) * blocks_per_head_; i++) {
            const Rows& rows = s_.rows[i];
            const int from = std::max(begin, rows.begin), to = std::min(end, rows.end);
            if (from >= to) continue;
            if (rows.num == 4) f(std::integral_constant<int, 4>{}, rows.first, from, to);
            else if (rows.num == 2) f(std::integral_constant<int, 2>{}, rows.first, from, to);
            else f(std::integral_constant<int, 1>{}, rows.first, from, to);
        }
    }

    // -- few rows ------------------------------------------------------------------------------------------------------

    // In bfloat16 heads of 64, 96, 128 and 256; others go the way of many rows. Values are summed two vectors at a
    // time.
    bool can_be_direct() const {
        const int64_t vectors = lanes_ / LANES;
        const bool is_known = vectors == 2 || vectors == 3 || vectors == 4 || vectors == 8;
        return lanes_ % LANES == 0 && width_ % (2 * LANES) == 0 && is_known;
    }

    void score_direct(const Group& group) {
        if (HAS_SCALES && blocks_per_head_ > 1) score_direct(group, widened(keys_of(group)));
        else score_direct(group, keys_of(group));
    }

    template <class X>
    void score_direct(const Group& group, const X* keys) {
        for_rows(group.head, group.key, group.key + LANES, [&](auto R, int row, int key, int) {
            switch (lanes_ / LANES) {
                case 2: return score_direct<R, 2>(row, key, keys, group.scales);
                case 3: return score_direct<R, 3>(row, key, keys, group.scales);
                case 4: return score_direct<R, 4>(row, key, keys, group.scales);
                case 8: return score_direct<R, 8>(row, key, keys, group.scales);
            }
        });
    }

    // A head is N vectors.
    template <int R, int N, class X>
    void score_direct(int row, int key, const X* keys, const float* scales) {
        vi query[R][N], chains[R][LANES];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) query[r][n] = load_i(&s_.query[((row + r) * N + n) * LANES]);
        for (int i = 0; i < LANES; i++) {
            vf acc[R] = {};
            for (int n = 0; n < N; n++) {
                const vi one = take(keys, (i * N + n) * LANES * PER_LANE);
                for (int r = 0; r < R; r++) acc[r] = Element<T>::multiply(acc[r], query[r][n], one);
            }
            for (int r = 0; r < R; r++) chains[r][i] = (vi)acc[r];
        }
        for (int r = 0; r < R; r++) {
            transpose(chains[r]);
            vf total = {};
            for (int i = 0; i < LANES; i++) total = total + (vf)chains[r][i];
            if (HAS_SCALES) total = total * load(scales);
            store(&s_.scores[(row + r) * SPLIT + key], total);
        }
    }

    void sum_direct(const Group& group) {
        if (HAS_SCALES && blocks_per_head_ > 1) sum_direct(group, widened(values_of(group)));
        else sum_direct(group, values_of(group));
    }

    template <class X>
    void sum_direct(const Group& group, const X* values) {
        for_rows(group.head, group.key, group.key + LANES, [&](auto R, int row, int key, int) {
            constexpr int V = R == 4 ? 4 : 8;
            int64_t d = 0;
            for (; d + V * LANES <= width_; d += V * LANES) sum_direct<R, V>(row, d, key, values);
            for (; d + 4 * LANES <= width_; d += 4 * LANES) sum_direct<R, 4>(row, d, key, values);
            for (; d < width_; d += 2 * LANES) sum_direct<R, 2>(row, d, key, values);
        });
    }

    template <int R, int V, class X>
    void sum_direct(int row, int64_t d, int key, const X* values) {
        const int32_t* weights = reinterpret_cast<const int32_t*>(s_.weights.data()) + (row * SPLIT + key) / PER_LANE;
        vf acc[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) acc[r][v] = load(&s_.tile_sum[(row + r) * width_ + d + v * LANES]);
        for (int i = 0; i < LANES / PER_LANE; i++)
            for (int v = 0; v < V; v += 2) {
                vi low, high;
                const int64_t place = i * PER_LANE * p_.head_dim + d + v * LANES;
                if constexpr (PER_LANE == 1) low = take(values, place), high = take(values, place + LANES);
                else zip(take(values, place), take(values, place + p_.head_dim), low, high);
                for (int r = 0; r < R; r++) {
                    const vi one = splat_i(weights[r * (SPLIT / PER_LANE) + i]);
                    acc[r][v] = Element<T>::multiply(acc[r][v], one, low);
                    acc[r][v + 1] = Element<T>::multiply(acc[r][v + 1], one, high);
                }
            }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(&s_.tile_sum[(row + r) * width_ + d + v * LANES], acc[r][v]);
    }

    // -- many rows -----------------------------------------------------------------------------------------------------

    // Whether the next group belongs to another head or panel.
    bool ends_panel(size_t i) const {
        if (i + 1 == s_.groups.size() || i + 1 == s_.groups.size() / 2) return true;
        const Group &group = s_.groups[i], &next = s_.groups[i + 1];
        return group.head != next.head || group.key / PANEL != next.key / PANEL;
    }

    void score_turned(size_t i) {
        const Group& group = s_.groups[i];
        if (i == 0 || ends_panel(i - 1)) panel_begin_ = group.key;
        turn(keys_of(group), &s_.keys[group.key % PANEL]);
        if (HAS_SCALES) std::copy_n(group.scales, LANES, &s_.key_scales[group.key % PANEL]);
        if (!ends_panel(i)) return;
        for_rows(group.head, panel_begin_, group.key + LANES, [&](auto R, int row, int key, int to) {
            for (; key + 2 * LANES <= to; key += 2 * LANES) score_turned<R, 2>(row, key);
            for (; key < to; key += LANES) score_turned<R, 1>(row, key);
        });
    }

    void turn(const S* rows, int32_t* place) {
        int64_t c = 0;
        for (; (c + LANES) * PER_LANE <= p_.head_dim; c += LANES) {
            vi block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = take(rows, i * p_.head_dim + c * PER_LANE);
            transpose(block);
            for (int i = 0; i < LANES; i++) store_i(place + (c + i) * PANEL, block[i]);
        }
        for (; c < lanes_; c++)
            for (int i = 0; i < LANES; i++) {
                T lane[PER_LANE] = {};
                for (int64_t n = 0; n < PER_LANE && c * PER_LANE + n < p_.head_dim; n++)
                    lane[n] = one(rows[i * p_.head_dim + c * PER_LANE + n]);
                std::memcpy(&place[c * PANEL + i], lane, sizeof lane);
            }
    }

    template <int R, int V>
    void score_turned(int row, int key) {
        const int32_t* keys = &s_.keys[key % PANEL];
        vf total[R][V] = {};
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, lanes_); lane++) {
            vf chain[R][V] = {};
            multiply_panel<T, R, V>(&s_.query[row * lanes_], lanes_, keys, PANEL, lane, lanes_, LANES, chain);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) total[r][v] = total[r][v] + chain[r][v];
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                if (HAS_SCALES) total[r][v] = total[r][v] * load(&s_.key_scales[key % PANEL + v * LANES]);
                store(&s_.scores[(row + r) * SPLIT + key + v * LANES], total[r][v]);
            }
    }

    void sum_packed(size_t i) {
        const Group& group = s_.groups[i];
        const bool is_alone = item_.num_heads == 1;  // one head's values are packed for the whole tile
        if (i == s_.groups.size() / 2 || (!is_alone && ends_panel(i - 1))) panel_begin_ = group.key;
        pack_values(values_of(group), &s_.values[group.key / PER_LANE * width_]);
        if (is_alone ? i + 1 < s_.groups.size() : !ends_panel(i)) return;
        for_rows(group.head, panel_begin_, group.key + LANES, [&](auto R, int row, int from, int to) {
            int64_t d = 0;
            for (; d + 4 * LANES <= width_; d += 4 * LANES) sum_packed<R, 4>(row, d, from, to);
            for (; d + 2 * LANES <= width_; d += 2 * LANES) sum_packed<R, 2>(row, d, from, to);
            for (; d < width_; d += LANES) sum_packed<R, 1>(row, d, from, to);
        });
    }

    // Pairs of keys (single ones in fp32) by the elements of the head: [SPLIT / PER_LANE][width] lanes.
    void pack_values(const S* rows, int32_t* place) {
        for (int i = 0; i < LANES; i += PER_LANE, place += width_) {
            if constexpr (PER_LANE == 1) {
                spread(place, rows, i * p_.head_dim);
            } else {
                interleave(place, rows, i * p_.head_dim);
            }
        }
    }

    void spread(int32_t* place, const S* rows, int64_t first) const {
        int64_t d = 0;
        for (; d + LANES <= p_.head_dim; d += LANES) store_i(place + d, take(rows, first + d));
        for (; d < width_; d++) {
            const T value = d < p_.head_dim ? one(rows[first + d]) : T{};
            std::memcpy(place + d, &value, sizeof value);
        }
    }

    void interleave(int32_t* place, const S* rows, int64_t first) const {
        int64_t d = 0;
        for (; d + 2 * LANES <= p_.head_dim; d += 2 * LANES) {
            vi low, high;
            zip(take(rows, first + d), take(rows, first + p_.head_dim + d), low, high);
            store_i(place + d, low), store_i(place + d + LANES, high);
        }
        for (; d < width_; d++) {
            T pair[2] = {};
            if (d < p_.head_dim) pair[0] = one(rows[first + d]), pair[1] = one(rows[first + p_.head_dim + d]);
            std::memcpy(place + d, pair, sizeof(int32_t));
        }
    }

    template <int R, int V>
    void sum_packed(int row, int64_t d, int begin, int end) {
        vf acc[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) acc[r][v] = load(&s_.tile_sum[(row + r) * width_ + d + v * LANES]);
        const int32_t* weights = reinterpret_cast<const int32_t*>(s_.weights.data()) + (row * SPLIT + begin) / PER_LANE;
        const int32_t* values = &s_.values[begin / PER_LANE * width_ + d];
        multiply_panel<T, R, V>(weights, SPLIT / PER_LANE, values, width_, 0, (end - begin) / PER_LANE, 1, acc);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(&s_.tile_sum[(row + r) * width_ + d + v * LANES], acc[r][v]);
    }

    // -- both ----------------------------------------------------------------------------------------------------------

    // Turns the scores of one row into weights, relative to the tile's own peak; sets the row's tile_peak_ and
    // tile_total_.
    void weigh(int row, int head, int begin, int end) {
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
        // Every comparison with NaN is false, so the peak would lose it.
        float peak = largest(peaks);
        if (largest((vf)(is_nan & (vi)splat(1.0f))) != 0.0f) peak = std::numeric_limits<float>::quiet_NaN();
        tile_peak_[row] = peak;
        T* weights = reinterpret_cast<T*>(s_.weights.data()) + row * SPLIT;
        const bool is_hidden = peak == LOWEST;
        vf totals = {};
        for (int k = begin; k < end; k += LANES) {
            vf w = is_hidden ? vf{} : exp(load(scores + k) - peak);
            totals = totals + (HAS_SCALES ? w : Element<T>::rounded(w));
            if (HAS_SCALES) w = w * load(&s_.value_scales[head * SPLIT + k]);
            Element<T>::store_weights(weights + k, w);
        }
        tile_total_[row] = sum(totals);
    }

    // Adds a tile's result to the sum so far, after scaling both to their common peak.
    void merge(int row, float peak, float total, const float* tile_sum) {
        if (peak == LOWEST) return;
        const float common = s_.peak[row] >= peak ? s_.peak[row] : peak;
        const vf scales = exp(vf{s_.peak[row] - common, peak - common});
        const float old_scale = scales[0], new_scale = scales[1];
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

    void write() const {
        for_heads([&](int row, int64_t index) {
            T* place = reinterpret_cast<T*>(p_.out) + index;
            const float share = 1.0f / s_.total[row];
            for (int64_t d = 0; d < p_.head_dim; d += LANES) {
                const vf value = load(&s_.summed[row * width_ + d]) * share;
                if (d + LANES <= p_.head_dim)
                    store(place + d, value);
                else
                    store_part(place + d, value, int(p_.head_dim - d));
            }
        });
    }
};

// Waking a sleeping thread costs 10 to 66 us (2 cores, Zen 4, 2026-11-21). With fewer keys by heads one thread is
// faster.
constexpr int64_t KEYS_A_THREAD = 1024;

Scratch& own_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

template <class T, class S>
void attend_all(const Problem& p, int num_threads) {
    num_threads = int(std::min<int64_t>(num_threads, 1 + work(p) / KEYS_A_THREAD));
    const Schedule schedule = plan(p, num_threads);
    std::vector<float> partials(schedule.num_partials * Worker<T, S>::partial_size(p));
    const int team = int(std::min<int64_t>(num_threads, int64_t(schedule.items.size())));
    parallel_for_dynamic(int64_t(schedule.items.size()), team, [&](int64_t i) {
        Worker<T, S>(p, own_scratch()).run(schedule.items[i], partials.data());
    });
    parallel_for_dynamic(int64_t(schedule.cut.size()), team, [&](int64_t i) {
        const auto& [item, num_tiles] = schedule.cut[i];
        Worker<T, S>(p, own_scratch()).combine(item, num_tiles, partials.data());
    });
}

}  // namespace

// q, out [T, Hq, D]; kv [blocks, 2, G, block_size, D], in 8 bits if it has scales; see the Python signature. dtype 0:
// fp32, 1: bfloat16.
static void paged_attention(const void* q, const void* kv, const float* kv_scales, void* out, const int32_t* query_start,
                            const int32_t* seq_lens, const int32_t* tables, int64_t num_requests,
                            int64_t max_blocks, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                            int64_t block_size, int64_t window, float scale, float softcap, int64_t dtype,
                            int64_t num_threads) {
    Problem p{static_cast<const char*>(q), static_cast<const char*>(kv), kv_scales, static_cast<char*>(out),
              query_start, seq_lens, tables, num_requests, max_blocks,
              num_heads, num_kv_heads, head_dim, block_size, window, scale, softcap};
    const int threads = int(num_threads);
    if (dtype == 0) kv_scales ? attend_all<float, e4m3>(p, threads) : attend_all<float, float>(p, threads);
    else kv_scales ? attend_all<bf16, e4m3>(p, threads) : attend_all<bf16, bf16>(p, threads);
}
INFERD_EXPORT(paged_attention)
