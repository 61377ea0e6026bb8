// Mixture of experts: chooses experts for each row, multiplies the rows of each expert by its matrix, and adds up the
// results of each row.
//
// A pair is a row and one of its experts. Pairs lie by expert, then by row, so an expert's rows follow one another. Only
// the matrices of chosen experts are read. Each is multiplied by the kernel of its own format, which gives a row the
// same bits among any others. A row's results are added in the order of its choices.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ROWS_A_THREAD = 8;  // to route
constexpr int64_t ELEMENTS_A_THREAD = 16384;  // to add up
constexpr int64_t MAX_ARGUMENTS = 32;

// As reference.py's `Router`.
struct Router {
    const float *bias, *scales;  // or null
    int64_t num_experts, num_chosen;
    bool normalizes, has_sigmoid;
    int64_t num_groups, num_chosen_groups;
    float factor, added;
    bool compares_scores;
};

// Writes e^(logit - largest) for each expert, or the sigmoid of each logit.
void write_scores(const float* logits, const Router& router, float* out) {
    const int64_t num_experts = router.num_experts;
    float largest = logits[0];
    for (int64_t e = 1; e < num_experts; e++)
        if (logits[e] > largest) largest = logits[e];
    for (int64_t i = 0; i < num_experts; i += LANES) {
        const int left = int(std::min<int64_t>(LANES, num_experts - i));
        const vf x = load_part(logits + i, left);
        store_part(out + i, router.has_sigmoid ? 1.0f / (1.0f + exp(-x)) : exp(x - largest), left);
    }
}

// The index of the largest number that is not taken; the lowest of equal ones. NaN is no larger than any number.
int64_t best_of(const float* numbers, const char* is_taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!is_taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
    return best;
}

// Takes all experts but those of the groups whose two largest numbers have the largest sums.
void take_other_groups(const float* numbers, const Router& router, char* is_taken) {
    static thread_local std::vector<float> sums;
    static thread_local std::vector<char> is_chosen;
    const int64_t size = router.num_experts / router.num_groups;
    sums.resize(router.num_groups), is_chosen.assign(router.num_groups, 0);
    for (int64_t g = 0; g < router.num_groups; g++) {
        const float* own = numbers + g * size;
        char* own_taken = is_taken + g * size;
        const int64_t first = best_of(own, own_taken, size);
        own_taken[first] = 1;
        sums[g] = own[first] + own[best_of(own, own_taken, size)];
    }
    for (int64_t i = 0; i < router.num_chosen_groups; i++)
        is_chosen[best_of(sums.data(), is_chosen.data(), router.num_groups)] = 1;
    for (int64_t e = 0; e < router.num_experts; e++) is_taken[e] = !is_chosen[e / size];
}

// Chooses the experts of a row, the largest scores first. A row of NaN gets valid experts too, with weights of NaN.
void choose(const float* logits, const Router& router, float* weights, int32_t* experts) {
    static thread_local std::vector<float> scores, biased;
    static thread_local std::vector<char> is_taken;
    const int64_t num_experts = router.num_experts;
    is_taken.assign(num_experts, 0), scores.resize(num_experts);
    write_scores(logits, router, scores.data());
    float all = 1;
    if (!router.has_sigmoid && (router.compares_scores || !router.normalizes))
        all = std::accumulate(scores.begin(), scores.end(), 0.0f);
    const float* compared = logits;
    if (router.compares_scores) {
        biased.resize(num_experts);
        for (int64_t e = 0; e < num_experts; e++) {
            scores[e] /= all;
            biased[e] = scores[e] + (router.bias ? router.bias[e] : 0.0f);
        }
        all = 1, compared = biased.data();
        if (router.num_groups > 1) take_other_groups(compared, router, is_taken.data());
    }
    float chosen = 0;
    for (int64_t i = 0; i < router.num_chosen; i++) {
        const int64_t best = best_of(compared, is_taken.data(), num_experts);
        is_taken[best] = 1, experts[i] = int32_t(best);
        chosen += scores[best];
    }
    const float total = router.normalizes ? chosen + router.added : all;
    for (int64_t i = 0; i < router.num_chosen; i++) {
        weights[i] = scores[experts[i]] / total * router.factor;
        if (router.scales) weights[i] *= router.scales[experts[i]];
    }
}

// Sorts the pairs by expert: their experts in `places` become their places.
void sort_pairs(int64_t rows, int64_t num_experts, int64_t num_chosen, int32_t* places, int32_t* pair_rows,
                int32_t* offsets) {
    static thread_local std::vector<int32_t> next;
    std::fill_n(offsets, num_experts + 1, 0);
    for (int64_t pair = 0; pair < rows * num_chosen; pair++) offsets[places[pair] + 1]++;
    for (int64_t e = 0; e < num_experts; e++) offsets[e + 1] += offsets[e];
    next.assign(offsets, offsets + num_experts);
    for (int64_t pair = 0; pair < rows * num_chosen; pair++) {
        places[pair] = next[places[pair]]++;
        pair_rows[places[pair]] = int32_t(pair / num_chosen);
    }
}

// An expert's matrix: its kernel, and the kernel's arguments as native.py's `Product` describes them.
struct Matrix {
    void (*kernel)(const call::Argument*);
    const call::Argument* arguments;
    int64_t num_arguments;
};

struct Products {
    const char* x;
    char* out;
    const int32_t* pair_rows;  // or null, if x has a row for each pair
    const int32_t* offsets;
    const Matrix* matrices;
    int64_t x_bytes, out_bytes;  // of a row

    int64_t rows_of(int64_t expert) const { return offsets[expert + 1] - offsets[expert]; }

    void run(int64_t expert, int64_t num_threads) const {
        const Matrix& matrix = matrices[expert];
        const int64_t first = offsets[expert], rows = rows_of(expert);
        call::Argument arguments[MAX_ARGUMENTS];
        std::copy_n(matrix.arguments, matrix.num_arguments, arguments);
        arguments[0].integer = reinterpret_cast<int64_t>(inputs(first, rows));
        arguments[1].integer = reinterpret_cast<int64_t>(out + first * out_bytes);
        arguments[2].integer = rows;
        arguments[matrix.num_arguments - 1].integer = num_threads;
        matrix.kernel(arguments);
    }

  private:
    // The rows of these pairs, one after another.
    const char* inputs(int64_t first, int64_t rows) const {
        if (!pair_rows) return x + first * x_bytes;
        if (rows == 1) return x + pair_rows[first] * x_bytes;
        static thread_local Buffer<char> copied;
        copied.resize(std::max<size_t>(copied.size(), rows * x_bytes));
        for (int64_t i = 0; i < rows; i++)
            std::memcpy(copied.data() + i * x_bytes, x + pair_rows[first + i] * x_bytes, x_bytes);
        return copied.data();
    }
};

template <class T>
void add_up(const T* parts, const float* weights, const int32_t* places, T* out, int64_t rows, int64_t num_chosen,
            int64_t size, int num_threads) {
    const int team = rows * num_chosen * size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads;
    parallel_for(rows, team, [&](int64_t row) {
        const float* own = weights + row * num_chosen;
        for (int64_t at = 0; at < size; at += LANES) {
            const int left = int(std::min<int64_t>(LANES, size - at));
            vf total = {};
            for (int64_t i = 0; i < num_chosen; i++) {
                const T* part = parts + places[row * num_chosen + i] * size + at;
                total += own[i] * (left == LANES ? load(part) : load_part(part, left));
            }
            if (left == LANES) store(out + row * size + at, total);
            else store_part(out + row * size + at, total, left);
        }
    });
}

}  // namespace

// logits [rows, num_experts] fp32 -> weights [rows, num_chosen] fp32, and of the pairs sorted by expert: places [rows,
// num_chosen], pair_rows [rows * num_chosen], and offsets [num_experts + 1] of each expert's first pair, all int32.
// Adds each expert's number of pairs to `loads` [num_experts]. bias and scales [num_experts] fp32, or null.
static void experts_route(const float* logits, const float* bias, const float* scales, int64_t rows,
                          int64_t num_experts, int64_t num_chosen, int64_t normalizes, int64_t has_sigmoid, int64_t num_groups,
                          int64_t num_chosen_groups, float factor, float added, int64_t compares_scores, float* weights,
                          int32_t* places, int32_t* pair_rows, int32_t* offsets, int64_t* loads, int64_t num_threads) {
    const Router router{bias, scales, num_experts, num_chosen, normalizes != 0, has_sigmoid != 0, num_groups, num_chosen_groups,
                        factor, added, compares_scores != 0};
    parallel_for(rows, rows < 2 * ROWS_A_THREAD ? 1 : num_threads, [&](int64_t row) {
        choose(logits + row * num_experts, router, weights + row * num_chosen, places + row * num_chosen);
    });
    sort_pairs(rows, num_experts, num_chosen, places, pair_rows, offsets);
    for (int64_t e = 0; e < num_experts; e++) loads[e] += offsets[e + 1] - offsets[e];
}
INFERD_EXPORT(experts_route)

// out [pairs, ...] = x W^T of each pair's expert. x has a row of `x_bytes` for each pair, or `pair_rows` says which row.
// If there are few experts for each thread, all threads share each matrix.
static void experts_product(const char* x, char* out, const int32_t* pair_rows, const int32_t* offsets,
                            int64_t num_experts, const Matrix* matrices, int64_t x_bytes, int64_t out_bytes,
                            int64_t num_threads) {
    const Products products{x, out, pair_rows, offsets, matrices, x_bytes, out_bytes};
    static thread_local std::vector<int64_t> chosen;
    chosen.clear();
    for (int64_t e = 0; e < num_experts; e++)
        if (products.rows_of(e)) chosen.push_back(e);
    if (int64_t(chosen.size()) < 2 * num_threads) {
        for (const int64_t expert : chosen) products.run(expert, num_threads);
        return;
    }
    std::stable_sort(chosen.begin(), chosen.end(),
                     [&](int64_t a, int64_t b) { return products.rows_of(a) > products.rows_of(b); });
    const int64_t* in_order = chosen.data();
    parallel_for_dynamic(chosen.size(), num_threads, [&](int64_t i) { products.run(in_order[i], 1); });
}
INFERD_EXPORT(experts_product)

// parts [pairs, size], out [rows, size], both of dtype 0: fp32, 1: bfloat16: the weighted sums of the rows' results.
static void experts_add(const void* parts, const float* weights, const int32_t* places, void* out, int64_t rows,
                        int64_t num_chosen, int64_t size, int64_t dtype, int64_t num_threads) {
    if (dtype == 0)
        add_up(static_cast<const float*>(parts), weights, places, static_cast<float*>(out), rows, num_chosen, size,
               int(num_threads));
    else
        add_up(static_cast<const bf16*>(parts), weights, places, static_cast<bf16*>(out), rows, num_chosen, size,
               int(num_threads));
}
INFERD_EXPORT(experts_add)
