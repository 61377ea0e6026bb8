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
// Two ways to compute products give the same bits: few_rows.h and many_rows.h. With AMX bfloat16 has another order of
// sums, and two other ways: amx.h.
//
// Weights are rounded to the element's type before they are summed and multiplied, so that their sum is exactly the
// divisor.
//
// K and V in 8 bits are multiplied by their scales when they are loaded, and rounded to the element's type. So results
// have the bits of those over a pool of such elements.

#include <cmath>

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "ops/paged_attention/amx.h"
#include "ops/paged_attention/few_rows.h"
#include "ops/paged_attention/many_rows.h"

namespace {

template <class T>
struct Products {
    typedef FewRows<T> Few;
    typedef ManyRows<T> Many;
};
#if HAS_TILES
template <>
struct Products<bf16> {
    typedef FewRowsInTiles Few;
    typedef ManyRowsInTiles Many;
};
#endif

template <class T>
class Attention {
  public:
    Attention(const Problem& problem, Scratch& scratch)
        : p_(problem), s_(scratch), t_(problem, scratch), few_(t_), many_(t_) {}

    static int64_t partial_size(const Problem& p) { return (p.head_dim + LANES - 1) / LANES * LANES + 2; }

    void run(const Item& item, float* partials) {
        t_.start_item(item);
        partials_ = item.partial < 0 ? nullptr : partials + item.partial * partial_size(p_);
        clear();
        gather_queries();
        const bool is_few = few_.can_run();
        for (int tile = item.first_tile; tile < item.end_tile; tile++) {
            t_.start_tile(tile);
            if (is_few) attend_few();
            else attend_many();
            if (partials_) partials_ += t_.num_rows * partial_size(p_);
        }
        if (!partials_) write();
    }

    // Combine the partial results of a group of tiles, which are in order, and write the output.
    void combine(const Item& item, int num_tiles, const float* partials) {
        t_.start_item(item);
        const int64_t size = partial_size(p_);
        clear();
        for (int r = 0; r < t_.num_rows; r++)
            for (int tile = 0; tile < num_tiles; tile++) {
                const float* place = partials + (item.partial + int64_t(tile) * t_.num_rows + r) * size;
                merge(r, place[0], place[1], place + 2);
            }
        write();
    }

  private:
    const Problem& p_;
    Scratch& s_;
    Tile<T> t_;
    typename Products<T>::Few few_;
    typename Products<T>::Many many_;
    float* partials_;  // of the tile's rows, if they are kept

    // A sink is a key before all others whose values are 0, so tiles are added to it.
    void clear() {
        std::fill_n(s_.summed.begin(), t_.num_rows * t_.width, 0.0f);
        std::fill_n(s_.peak.begin(), t_.num_rows, LOWEST);
        std::fill_n(s_.total.begin(), t_.num_rows, p_.sinks ? 1.0f : 0.0f);
        if (p_.sinks)
            t_.for_heads([&](int row, int64_t place) { s_.peak[row] = p_.sinks[place / p_.head_dim % p_.num_heads]; });
    }

    void gather_queries() {
        std::fill_n(s_.query.begin(), t_.num_rows * t_.num_lanes, 0);
        const T* q = reinterpret_cast<const T*>(p_.q);
        t_.for_heads([&](int row, int64_t place) {
            std::memcpy(&s_.query[row * t_.num_lanes], q + place, p_.head_dim * sizeof(T));
        });
    }

    void attend_few() {
        t_.first_row = 0;
        few_.score();
        for (const Rows& rows : s_.rows) weigh(rows);
        std::fill_n(s_.tile_sum.begin(), t_.num_rows * t_.width, 0.0f);
        few_.sum();
        for (const Rows& rows : s_.rows) finish(rows);
    }

    void attend_many() {
        const size_t per_head = t_.groups_per_head(), per_block = BLOCK_ROWS / 4;
        for (int head = 0; head < t_.item.num_heads; head++) {
            many_.pack(head);
            for (size_t first = head * per_head; first < (head + 1) * per_head; first += per_block) {
                const size_t last = std::min(first + per_block, (head + 1) * per_head);
                t_.first_row = s_.rows[first].first;
                many_.score(first, last);
                for (size_t i = first; i < last; i++) weigh(s_.rows[i]);
                many_.sum(first, last);
                for (size_t i = first; i < last; i++) finish(s_.rows[i]);
            }
        }
    }

    void weigh(const Rows& rows) {
        for (int row = rows.first; row < rows.first + rows.num; row++) {
            const int64_t position = t_.first_position + t_.query_of(row) - t_.start;
            const int last = int(std::clamp<int64_t>(position, -1, SPLIT));
            const int first = p_.window ? int(std::clamp<int64_t>(position - p_.window + 1, 0, SPLIT)) : 0;
            if (p_.softcap > 0) cap(row, rows.begin, rows.end);
            if (first > rows.begin || last < rows.end - 1) hide(row, rows.begin, rows.end, first, last);
        }
        if (rows.num == 4) weigh<4>(rows.first, rows.begin, rows.end);
        else if (rows.num == 2) weigh<2>(rows.first, rows.begin, rows.end);
        else weigh<1>(rows.first, rows.begin, rows.end);
    }

    void cap(int row, int begin, int end) {
        float* scores = t_.scores(row);
        for (int k = begin; k < end; k += LANES)
            store(scores + k, tanh(load(scores + k) * p_.scale / p_.softcap) * p_.softcap);
    }

    // Masks the keys outside first .. last.
    void hide(int row, int begin, int end, int first, int last) {
        const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        float* scores = t_.scores(row);
        for (int k = begin; k < end; k += LANES) {
            const vi index = lane + k;
            store(scores + k, (index <= last) & (index >= first) ? load(scores + k) : splat(LOWEST));
        }
    }

    // Turns the scores of R rows into weights, relative to the tile's own peaks. A NaN makes a total NaN. Rows side by side
    // hide the latency of their sums.
    template <int R>
    void weigh(int row, int begin, int end) {
        const float scale = p_.softcap > 0 ? 1 : p_.scale;
        const float* scores[R];
        T* weights[R];
        vf peaks[R], totals[R];
        for (int r = 0; r < R; r++) {
            scores[r] = t_.scores(row + r), weights[r] = t_.weights(row + r);
            peaks[r] = splat(LOWEST), totals[r] = vf{};
        }
        for (int k = begin; k < end; k += LANES)
            for (int r = 0; r < R; r++) peaks[r] = max(peaks[r], load(scores[r] + k));
        typename Element<T>::Weights weigh[R];
        for (int r = 0; r < R; r++) {
            float highest = largest(peaks[r]);
            // Every comparison with NaN is false, so the highest score may lose it.
            if (highest == LOWEST && has_nan(scores[r], begin, end)) highest = std::numeric_limits<float>::quiet_NaN();
            s_.tile_peak[row + r - t_.first_row] = highest * scale;
            // Keys that are hidden weigh nothing beside any finite score.
            weigh[r] = {scale, highest == LOWEST ? 0 : highest};
        }
        int k = begin;
        for (; k + LANES < end; k += 2 * LANES)
            for (int r = 0; r < R; r++) {
                const vf first = weigh[r].of(load(scores[r] + k)), second = weigh[r].of(load(scores[r] + k + LANES));
                totals[r] = Element<T>::add(totals[r], first, second);
                Element<T>::store(weights[r] + k, first, second);
            }
        if (k < end)
            for (int r = 0; r < R; r++) {
                const vf last = weigh[r].of(load(scores[r] + k));
                totals[r] = Element<T>::add(totals[r], last, vf{});
                simd::store(weights[r] + k, last);
            }
        for (int r = 0; r < R; r++) s_.tile_total[row + r - t_.first_row] = sum(totals[r]);
    }

    static bool has_nan(const float* scores, int begin, int end) {
        return std::any_of(scores + begin, scores + end, [](float score) { return score != score; });
    }

    // Adds the tile's results of rows, or keeps them.
    void finish(const Rows& rows) {
        for (int row = rows.first; row < rows.first + rows.num; row++) {
            const float peak = s_.tile_peak[row - t_.first_row], total = s_.tile_total[row - t_.first_row];
            if (!partials_) {
                merge(row, peak, total, t_.sums(row));
            } else {
                float* place = partials_ + row * partial_size(p_);
                place[0] = peak, place[1] = total;
                std::copy_n(t_.sums(row), t_.width, place + 2);
            }
        }
    }

    // Adds a tile's result to the sum so far, after scaling both to their common peak.
    void merge(int row, float peak, float total, const float* tile_sum) {
        if (peak == LOWEST) return;
        const float common = s_.peak[row] >= peak ? s_.peak[row] : peak;
        const vf scales = exp(vf{s_.peak[row] - common, peak - common});
        const float old_scale = scales[0], new_scale = scales[1];
        s_.total[row] = s_.total[row] * old_scale + total * new_scale;
        s_.peak[row] = common;
        for (int64_t d = 0; d < t_.width; d += LANES) {
            float* place = &s_.summed[row * t_.width + d];
            store(place, load(place) * old_scale + load(tile_sum + d) * new_scale);
        }
    }

    void write() const {
        t_.for_heads([&](int row, int64_t index) {
            T* place = reinterpret_cast<T*>(p_.out) + index;
            const float share = 1.0f / s_.total[row];
            for (int64_t d = 0; d < p_.head_dim; d += LANES) {
                const vf value = load(&s_.summed[row * t_.width + d]) * share;
                if (d + LANES <= p_.head_dim) store(place + d, value);
                else store_part(place + d, value, int(p_.head_dim - d));
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

template <class T>
void attend_all(const Problem& p, int num_threads) {
    num_threads = int(std::min<int64_t>(num_threads, 1 + work(p) / KEYS_A_THREAD));
    const Schedule schedule = plan(p, num_threads);
    std::vector<float> partials(schedule.num_partials * Attention<T>::partial_size(p));
    const int team = int(std::min<int64_t>(num_threads, int64_t(schedule.items.size())));
    parallel_for_dynamic(int64_t(schedule.items.size()), team, [&](int64_t i) {
        Attention<T>(p, own_scratch()).run(schedule.items[i], partials.data());
    });
    parallel_for_dynamic(int64_t(schedule.cut.size()), team, [&](int64_t i) {
        const auto& [item, num_tiles] = schedule.cut[i];
        Attention<T>(p, own_scratch()).combine(item, num_tiles, partials.data());
    });
}

}  // namespace

// q, out [T, Hq, D]; kv [blocks, 2, G, block_size, D], with scales if it has 8 bits; sinks [Hq] or null; see the Python
// signature. Blocks lie `kv_stride` and `scale_stride` elements apart. dtype 0: fp32, 1: bfloat16. kv_format 0: that of
// q; else as in kv_numbers.h.
static void paged_attention(const void* q, const void* kv, const void* kv_scales, const float* sinks, void* out,
                            const int32_t* query_start, const int32_t* seq_lens, const int32_t* tables, int64_t num_requests,
                            int64_t max_blocks, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                            int64_t block_size, int64_t kv_stride, int64_t scale_stride, int64_t window, float scale,
                            float softcap, int64_t dtype, int64_t kv_format, int64_t num_threads) {
    Problem p{static_cast<const char*>(q), static_cast<const char*>(kv), static_cast<const bf16*>(kv_scales),
              static_cast<char*>(out), query_start, seq_lens, tables, num_requests, max_blocks,
              num_heads, num_kv_heads, head_dim, block_size, kv_stride, scale_stride, window, scale, softcap, sinks,
              kv_format};
    if (dtype == 0) attend_all<float>(p, int(num_threads));
    else attend_all<bf16>(p, int(num_threads));
}
INFERD_EXPORT(paged_attention)
