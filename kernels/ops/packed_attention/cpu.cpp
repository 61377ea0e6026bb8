// Attention within packed sequences: every query sees all keys of its own sequence, or those at most a window away
// (flash attention, Dao et al. 2022, arXiv:2205.14135, with keys in tiles that begin at the sequence's start).
//
// A query's bits depend on its own sequence alone. A score is one chain of products over the head's lanes. Within a tile
// an output element is one chain over the keys. Tiles are combined in order. Keys that a query may not see have weight 0.
// So the division into pieces of work, and what else the batch has, change nothing.
//
// A tile's keys are transposed, and its values copied side by side (bfloat16: by pairs of keys), once for all queries of
// a piece of work. Weights are rounded to the element's type before they are summed and multiplied, so that their sum is
// exactly the divisor.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/attention.h"
#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int KEYS = 256;   // of a tile
constexpr int PANEL = 64;   // keys side by side, for each lane of the head
constexpr int ROWS = 24;    // queries that are computed together
constexpr int BESIDE = 48;  // queries side by side, for each lane of the head
constexpr int MAX_QUERIES = 8 * BESIDE;  // of a piece of work
// Most sums of sixteen that registers hold beside the numbers that are multiplied.
#if defined(__AVX512F__)
constexpr int SUMS = 24;
#else
constexpr int SUMS = MOST_SUMS;
#endif

// Waking a sleeping thread costs 10 to 66 us (2 cores, Zen 4, 2026-11-21). Pairs of a query and a key of one head that
// one thread computes in about that time.
constexpr int64_t PAIRS_A_THREAD = 8192;
constexpr int64_t PIECES_A_THREAD = 8;

struct Problem {
    const char *q, *k, *v;
    char* out;
    const int32_t* starts;  // [sequences + 1]
    const float* bias;      // [heads, 2 * reach + 1] or null
    const float* pairs;     // [heads, tokens, pair_stride] of the one sequence, or null
    int64_t num_sequences, num_heads, share, head_dim;  // `share` heads of q read one head of k and v
    int64_t q_stride, k_stride, v_stride;               // elements from token to token
    int64_t reach, pair_stride, window;                 // window 0: none
    float scale;
};

// Consecutive queries of one sequence, for some heads.
struct Item {
    int32_t sequence, first_head, num_heads, first_query, num_queries;
    int64_t cost;
};

struct Scratch {
    Buffer<int32_t> keys, values, query;
    Buffer<float> scores, sums, summed, peak, total, line;
    Buffer<char> weights;
};

template <class T>
class Attention {
    typedef typename Element<T>::Lanes Lanes;
    typedef typename Element<T>::Sums Sums;
    static constexpr int PER_LANE = Element<T>::PER_LANE;
    static constexpr bool IN_PLACE = sizeof(T) == sizeof(float);  // whether a weight takes the place of its score

  public:
    Attention(const Problem& problem, Scratch& scratch)
        : p_(problem),
          s_(scratch),
          num_lanes_(p_.head_dim / PER_LANE),
          width_((p_.head_dim + LANES - 1) / LANES * LANES) {
        s_.keys.resize(KEYS * num_lanes_);
        s_.values.resize(KEYS / PER_LANE * width_);
        s_.query.resize(MAX_QUERIES * num_lanes_);
        s_.scores.resize(ROWS * KEYS);
        if (!IN_PLACE) s_.weights.resize(ROWS * KEYS * sizeof(T));
        s_.sums.resize(ROWS * width_);
        s_.summed.resize(MAX_QUERIES * width_);
        s_.peak.resize(MAX_QUERIES), s_.total.resize(MAX_QUERIES);
    }

    void run(const Item& item) {
        item_ = item;
        begin_ = p_.starts[item.sequence];
        length_ = p_.starts[item.sequence + 1] - begin_;
        const auto [from, to] = seen(0, item.num_queries);
        int64_t packed = -1;  // head of k and v whose only tile is packed
        for (head_ = item.first_head; head_ < item.first_head + item.num_heads; head_++) {
            kv_head_ = head_ / p_.share;
            gather_queries();
            if (p_.bias) stretch_bias();
            for (tile_ = from / KEYS * KEYS; tile_ < to; tile_ += KEYS) {
                if (packed != kv_head_) pack(std::max(from, tile_), std::min<int64_t>(to, tile_ + KEYS));
                if (to - from / KEYS * KEYS <= KEYS) packed = kv_head_;
                for (int first = 0; first < item.num_queries; first += ROWS)
                    attend(first, std::min(ROWS, item.num_queries - first), tile_ == from / KEYS * KEYS);
            }
            write();
        }
    }

  private:
    const Problem& p_;
    Scratch& s_;
    const int64_t num_lanes_, width_;  // of a head; the latter in whole vectors of elements
    Item item_;
    int64_t begin_, length_, head_, kv_head_, tile_;  // the sequence's first token, its tokens; the tile's first key

    // The keys that any of the queries first .. first + num of the item sees.
    std::pair<int64_t, int64_t> seen(int first, int num) const {
        if (!p_.window) return {0, length_};
        const int64_t query = item_.first_query + first;
        return {std::max<int64_t>(0, query - p_.window), std::min(length_, query + num + p_.window)};
    }

    const T* row_of(const char* data, int64_t token, int64_t stride, int64_t head) const {
        return reinterpret_cast<const T*>(data) + (begin_ + token) * stride + head * p_.head_dim;
    }
    const T* values_of(int64_t token) const { return row_of(p_.v, token, p_.v_stride, kv_head_); }

    float* scores(int row) const { return &s_.scores[row * KEYS]; }
    T* weights(int row) const {
        if constexpr (IN_PLACE) return scores(row);
        else return reinterpret_cast<T*>(s_.weights.data()) + row * KEYS;
    }
    // The first lane of a query of the item.
    int32_t* lanes_of(int row) const { return &s_.query[row / BESIDE * BESIDE * num_lanes_ + row % BESIDE]; }
    int32_t* panel_of(int key) const { return &s_.keys[key / PANEL * PANEL * num_lanes_ + key % PANEL]; }

    void gather_queries() const {
        for (int row = 0; row < item_.num_queries; row += LANES) {
            const int num = std::min(LANES, item_.num_queries - row);
            turn(p_.q, item_.first_query + row, num, p_.q_stride, head_, lanes_of(row), BESIDE);
        }
    }

    // The head's bias for each distance from a query to a key. That of distance 0 is at `length_ - 1`.
    void stretch_bias() const {
        const float* bias = p_.bias + head_ * (2 * p_.reach + 1) + p_.reach;
        s_.line.resize(2 * length_ - 1 + 2 * LANES);
        for (int64_t distance = 1 - length_; distance < length_; distance++)
            s_.line[distance + length_ - 1] = bias[std::clamp(distance, -p_.reach, p_.reach)];
    }

    // Packs the keys and values from .. to, with zeros up to whole vectors.
    void pack(int64_t from, int64_t to) const {
        for (int64_t key = from / LANES * LANES; key < to; key += LANES) {
            const int num = int(std::min<int64_t>(LANES, length_ - key)), place = int(key - tile_);
            turn(p_.k, key, num, p_.k_stride, kv_head_, panel_of(place), PANEL);
            int32_t* values = &s_.values[place / PER_LANE * width_];
            for (int i = 0; i < LANES; i += PER_LANE, values += width_) {
                const T* first = i < num ? values_of(key + i) : nullptr;
                if constexpr (PER_LANE == 1) copy(values, first);
                else interleave(values, first, i + 1 < num ? values_of(key + i + 1) : nullptr);
            }
        }
    }

    // Lane by lane, each `to_lane` behind the last, of sixteen tokens from `first` on, of which there are `num`.
    void turn(const char* data, int64_t first, int num, int64_t stride, int64_t head, int32_t* place, int to_lane) const {
        for (int64_t lane = 0; lane < num_lanes_; lane += LANES) {
            const int64_t left = std::min<int64_t>(LANES, num_lanes_ - lane);
            vi block[LANES];
            for (int i = 0; i < LANES; i++) {
                const T* row = row_of(data, first + i, stride, head) + lane * PER_LANE;
                if (i < num && left == LANES) {
                    block[i] = load_i(row);
                } else {
                    block[i] = vi{};
                    if (i < num) std::memcpy(&block[i], row, left * sizeof(int32_t));
                }
            }
            transpose(block);
            for (int64_t i = 0; i < left; i++) store_i(place + (lane + i) * to_lane, block[i]);
        }
    }

    void copy(int32_t* place, const T* row) const {
        std::fill(place + (row ? p_.head_dim : 0), place + width_, 0);
        if (row) std::memcpy(place, row, p_.head_dim * sizeof(T));
    }

    void interleave(int32_t* place, const T* first, const T* second) const {
        if (!first) return void(std::fill_n(place, width_, 0));
        int64_t d = 0;
        for (; d + 2 * LANES <= p_.head_dim; d += 2 * LANES) {
            vi low, high;
            zip(load_i(first + d), second ? load_i(second + d) : vi{}, low, high);
            store_i(place + d, low), store_i(place + d + LANES, high);
        }
        for (; d < width_; d++) {
            T pair[2] = {};
            if (d < p_.head_dim) pair[0] = first[d];
            if (d < p_.head_dim && second) pair[1] = second[d];
            std::memcpy(place + d, pair, sizeof(int32_t));
        }
    }

    // The part of the tile for the queries first .. first + num of the item.
    void attend(int first, int num, bool is_first_tile) const {
        const auto [low, high] = seen(first, num);
        const int from = int(std::clamp<int64_t>(low - tile_, 0, KEYS)) / LANES * LANES;
        const int end = int(std::clamp<int64_t>(high - tile_, 0, KEYS)), to = (end + LANES - 1) / LANES * LANES;
        if (from >= to) {
            if (is_first_tile) clear(first, num);
            return;
        }
        for (int key = from; key < to;) {
            const int next = std::min(to, key / PANEL * PANEL + PANEL);
            score(first, num, key, next);
            key = next;
        }
        float* sums = is_first_tile ? &s_.summed[first * width_] : s_.sums.data();
        float peaks[ROWS], totals[ROWS];
        for_rows<1>(num, [&](auto R, int row) { weigh<R>(first, row, from, to, peaks, totals); });
        sum(num, from, to, sums);
        for (int row = 0; row < num; row++) {
            if (is_first_tile) s_.peak[first + row] = peaks[row], s_.total[first + row] = totals[row];
            else merge(first + row, peaks[row], totals[row], sums + row * width_);
        }
    }

    void clear(int first, int num) const {
        std::fill_n(&s_.summed[first * width_], num * width_, 0.0f);
        std::fill_n(&s_.peak[first], num, LOWEST);
        std::fill_n(&s_.total[first], num, 0.0f);
    }

    // Calls f(R, first of R rows) for all rows, with as many at a time as registers hold the sums of, V vectors a row.
    template <int V, class F>
    static void for_rows(int num, F f) {
        int row = 0;
        if constexpr (12 * V <= SUMS)
            for (; row + 12 <= num; row += 12) f(std::integral_constant<int, 12>(), row);
        if constexpr (8 * V <= SUMS)
            for (; row + 8 <= num; row += 8) f(std::integral_constant<int, 8>(), row);
        if constexpr (6 * V <= SUMS && 8 * V > SUMS)
            for (; row + 6 <= num; row += 6) f(std::integral_constant<int, 6>(), row);
        if constexpr (4 * V <= SUMS)
            for (; row + 4 <= num; row += 4) f(std::integral_constant<int, 4>(), row);
        if constexpr (2 * V <= SUMS)
            for (; row + 2 <= num; row += 2) f(std::integral_constant<int, 2>(), row);
        for (; row < num; row++) f(std::integral_constant<int, 1>(), row);
    }

    // acc[r][v] += row[r][c] * column[c][v] for c = 0 .. count - 1, with the numbers of rows so far apart. As a call it
    // would keep `acc` in memory.
    template <int R, int V, int TO_ROW, int TO_NEXT>
    [[gnu::always_inline]] static void multiply(const int32_t* rows, const int32_t* columns, int64_t column_stride,
                                                int64_t count, Sums acc[R][V]) {
        for (int64_t c = 0; c < count; c++) {
            Lanes column[V];
            for (int v = 0; v < V; v++) column[v] = Element<T>::load(columns + c * column_stride + v * LANES);
            for (int r = 0; r < R; r++) {
                const Lanes one = Element<T>::splat(rows[r * TO_ROW + c * TO_NEXT]);
                for (int v = 0; v < V; v++) acc[r][v] = Element<T>::multiply(acc[r][v], one, column[v]);
            }
        }
    }

    // Scores of the keys from .. to, which are in one panel.
    void score(int first, int num, int from, int to) const {
        int key = from;
        if (to - from == 4 * LANES) score<4>(first, num, key), key += 4 * LANES;
        for (; key + 2 * LANES <= to; key += 2 * LANES) score<2>(first, num, key);
        for (; key < to; key += LANES) score<1>(first, num, key);
    }

    template <int V>
    void score(int first, int num, int key) const {
        const int32_t* keys = panel_of(key);
        for_rows<V>(num, [&](auto R, int row) {
            Sums acc[R][V] = {};
            multiply<R, V, 1, BESIDE>(lanes_of(first + row), keys, PANEL, num_lanes_, acc);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) store(scores(row + r) + key + v * LANES, acc[r][v]);
        });
    }

    // sums [num, width] = weights [num, from .. to] x values.
    void sum(int num, int from, int to, float* sums) const {
        int64_t d = 0;
        for (; d + 4 * LANES <= width_; d += 4 * LANES) sum<4>(num, from, to, d, sums);
        for (; d + 2 * LANES <= width_; d += 2 * LANES) sum<2>(num, from, to, d, sums);
        for (; d < width_; d += LANES) sum<1>(num, from, to, d, sums);
    }

    template <int V>
    void sum(int num, int from, int to, int64_t d, float* sums) const {
        const int32_t* values = &s_.values[from / PER_LANE * width_ + d];
        for_rows<V>(num, [&](auto R, int row) {
            Sums acc[R][V] = {};
            const int32_t* own = reinterpret_cast<const int32_t*>(weights(row) + from);
            multiply<R, V, KEYS / PER_LANE, 1>(own, values, width_, (to - from) / PER_LANE, acc);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) store(sums + (row + r) * width_ + d + v * LANES, acc[r][v]);
        });
    }

    // Turns the scores of R rows into weights, relative to the tile's own peaks. Rows side by side hide the latency of
    // their sums.
    template <int R>
    void weigh(int first, int row, int from, int to, float* tile_peaks, float* tile_totals) const {
        const float scale = has_bias() ? 1.0f : p_.scale;
        vf peaks[R], totals[R];
        typename Element<T>::Weights weigh[R];
        for (int r = 0; r < R; r++) {
            peaks[r] = splat(LOWEST), totals[r] = vf{};
            if (has_bias()) add_bias(first, row + r, from, to);
            hide(first, row + r, from, to);
        }
        for (int k = from; k < to; k += LANES)
            for (int r = 0; r < R; r++) peaks[r] = max(peaks[r], load(scores(row + r) + k));
        for (int r = 0; r < R; r++) {
            float highest = largest(peaks[r]);
            // Every comparison with NaN is false, so the highest score may lose it.
            if (highest == LOWEST && has_nan(row + r, from, to)) highest = std::numeric_limits<float>::quiet_NaN();
            tile_peaks[row + r] = highest * scale;
            weigh[r] = {scale, highest == LOWEST ? 0 : highest};
        }
        int k = from;
        for (; k + LANES < to; k += 2 * LANES)
            for (int r = 0; r < R; r++) {
                const float* place = scores(row + r) + k;
                const vf low = weigh[r].of(load(place)), high = weigh[r].of(load(place + LANES));
                totals[r] = Element<T>::add(totals[r], low, high);
                Element<T>::store(weights(row + r) + k, low, high);
            }
        if (k < to)
            for (int r = 0; r < R; r++) {
                const vf last = weigh[r].of(load(scores(row + r) + k));
                totals[r] = Element<T>::add(totals[r], last, vf{});
                simd::store(weights(row + r) + k, last);
            }
        for (int r = 0; r < R; r++) tile_totals[row + r] = simd::sum(totals[r]);
    }

    bool has_nan(int row, int from, int to) const {
        return std::any_of(scores(row) + from, scores(row) + to, [](float score) { return score != score; });
    }

    bool has_bias() const { return p_.bias || p_.pairs; }

    // The biases of the keys of the tile, for a query of the item.
    const float* biases(int row) const {
        const int64_t query = item_.first_query + row;
        if (p_.bias) return &s_.line[tile_ - query + length_ - 1];
        return p_.pairs + (head_ * length_ + query) * p_.pair_stride + tile_;
    }

    void add_bias(int first, int row, int from, int to) const {
        const float* line = biases(first + row);
        float* place = scores(row);
        for (int k = from; k < to; k += LANES) store(place + k, load(place + k) * p_.scale + load(line + k));
    }

    // Gives the keys that the row may not see, and those behind the sequence's end, the lowest score.
    void hide(int first, int row, int from, int to) const {
        const int64_t query = item_.first_query + first + row - tile_;
        int64_t low = 0, high = length_ - tile_;  // the first that is seen, and behind the last
        if (p_.window) low = std::max(low, query - p_.window), high = std::min(high, query + p_.window + 1);
        if (low <= from && high >= to) return;
        const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int least = int(std::clamp<int64_t>(low, 0, KEYS)), end = int(std::clamp<int64_t>(high, 0, KEYS));
        for (int k = from; k < to; k += LANES) {
            if (k >= least && k + LANES <= end) continue;
            const vi index = lane + k;
            store(scores(row) + k, (index >= least) & (index < end) ? load(scores(row) + k) : splat(LOWEST));
        }
    }

    // Adds a tile's result to the sum so far, after scaling both to their common peak.
    void merge(int row, float peak, float total, const float* tile_sum) const {
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

    void write() const {
        for (int row = 0; row < item_.num_queries; row++) {
            const int64_t token = begin_ + item_.first_query + row;
            T* place = reinterpret_cast<T*>(p_.out) + (token * p_.num_heads + head_) * p_.head_dim;
            const float share = 1.0f / s_.total[row];
            for (int64_t d = 0; d < p_.head_dim; d += LANES) {
                const vf value = load(&s_.summed[row * width_ + d]) * share;
                if (d + LANES <= p_.head_dim) store(place + d, value);
                else store_part(place + d, value, int(p_.head_dim - d));
            }
        }
    }
};

int64_t seen_by_all(const Problem& p, int64_t length) {
    return length * (p.window ? std::min(length, 2 * p.window + 1) : length);
}

// The pieces of work, those that take longest first.
std::vector<Item> plan(const Problem& p, int64_t num_pairs, int num_threads) {
    const int64_t fair = std::max<int64_t>(1, num_pairs / (PIECES_A_THREAD * num_threads));
    std::vector<Item> items;
    for (int64_t sequence = 0; sequence < p.num_sequences; sequence++) {
        const int64_t length = p.starts[sequence + 1] - p.starts[sequence];
        if (!length) continue;
        const int64_t per_query = std::max<int64_t>(1, seen_by_all(p, length) / length);
        const int64_t blocks = std::clamp<int64_t>(fair / (per_query * ROWS), 1, MAX_QUERIES / ROWS);
        const int64_t queries = std::min(length, blocks * ROWS);
        const int64_t heads = std::clamp<int64_t>(fair / (per_query * queries), 1, p.num_heads);
        for (int64_t head = 0; head < p.num_heads; head += heads)
            for (int64_t first = 0; first < length; first += queries) {
                const int64_t num = std::min(queries, length - first), own = std::min(heads, p.num_heads - head);
                items.push_back({int32_t(sequence), int32_t(head), int32_t(own), int32_t(first), int32_t(num),
                                 num * own * per_query});
            }
    }
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    return items;
}

Scratch& own_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

template <class T>
void attend_all(const Problem& p, int64_t num_threads) {
    int64_t num_pairs = 0;
    for (int64_t i = 0; i < p.num_sequences; i++) num_pairs += seen_by_all(p, p.starts[i + 1] - p.starts[i]);
    num_pairs *= p.num_heads;
    num_threads = std::min(num_threads, 1 + num_pairs / PAIRS_A_THREAD);
    const std::vector<Item> items = plan(p, num_pairs, int(num_threads));
    const int64_t team = std::min(num_threads, int64_t(items.size()));
    parallel_for_dynamic(int64_t(items.size()), team, [&](int64_t i) { Attention<T>(p, own_scratch()).run(items[i]); });
}

}  // namespace

// q, out [T, H, D]; k, v [T, G, D]; with strides in elements from token to token, out contiguous; starts
// [sequences + 1]; bias [H, 2 * reach + 1] or null; pairs [H, T, pair_stride] or null, for a single sequence, with a
// stride of whole vectors; window 0: none. dtype 0: fp32, 1: bfloat16.
static void packed_attention(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                             const float* bias, const float* pairs, int64_t num_sequences, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, int64_t q_stride, int64_t k_stride,
                             int64_t v_stride, int64_t reach, int64_t pair_stride, int64_t window, float scale,
                             int64_t dtype, int64_t num_threads) {
    const Problem p{static_cast<const char*>(q), static_cast<const char*>(k), static_cast<const char*>(v),
                    static_cast<char*>(out), starts, bias, pairs, num_sequences, num_heads, num_heads / num_kv_heads,
                    head_dim, q_stride, k_stride, v_stride, reach, pair_stride, window, scale};
    if (dtype == 0) attend_all<float>(p, num_threads);
    else attend_all<bf16>(p, num_threads);
}
INFERD_EXPORT(packed_attention)
