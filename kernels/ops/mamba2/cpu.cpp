// The recurrence of Mamba-2 layers, token by token, as recurrence.h runs it. First, for each token: B and C in fp32, and
// decay and step of each head.

#include <cmath>

#include "cpu/call.h"
#include "cpu/recurrence.h"

namespace {

using namespace recurrence;

constexpr int64_t TOKENS_A_THREAD = 4;  // fewer are not worth the start of a second thread

struct Problem {
    const void* xbc;
    const void* dt;
    const float* a_log;
    const float* dt_bias;
    const float* d;
    float* wide;  // [tokens, 2, groups, key_dim]: B and C
    float* factors;  // [tokens, heads, 2]: decay and step
    float* out;
    int64_t num_tokens, groups, dt_stride;

    int64_t bc_size(const Rows& rows) const { return 2 * groups * rows.key_dim; }
    int64_t width(const Rows& rows) const { return rows.heads * rows.value_dim + bc_size(rows); }
};

template <class T>
void prepare(const Problem& p, const Rows& rows, int64_t token) {
    const int64_t size = p.bc_size(rows);
    const T* bc = static_cast<const T*>(p.xbc) + token * p.width(rows) + rows.heads * rows.value_dim;
    float* wide = p.wide + token * size;
    for (int64_t i = 0; i < size; i++) wide[i] = to_float(bc[i]);
    float* factors = p.factors + token * 2 * rows.heads;
    for (int64_t h = 0; h < rows.heads; h++) {
        const float given = to_float(static_cast<const T*>(p.dt)[token * p.dt_stride + h]) + p.dt_bias[h];
        const float step = given > 20.0f ? given : std::log1p(std::exp(given));
        factors[2 * h] = std::exp(-std::exp(p.a_log[h]) * step);
        factors[2 * h + 1] = step;
    }
}

// One token's effect on W vectors of columns of a head's state, with `stride` numbers from row to row. Even and odd rows
// are added up apart, and then together.
template <int W, class T>
inline void advance(float* state, int64_t stride, const float* b, const float* c, const T* x, float* out,
                    int64_t key_dim, float decay, float step, float d) {
    floats input[W], change[W], result[2][W];
    for (int w = 0; w < W; w++) {
        input[w] = load_columns(x + w * LANES);
        change[w] = input[w] * step;
        result[0][w] = input[w] * d, result[1][w] = splat_floats(0.0f);
    }
    for (int64_t i = 0; i < key_dim; i += 2)
        for (int half = 0; half < 2; half++) {
            const floats written = splat_floats(b[i + half]), read = splat_floats(c[i + half]);
            for (int w = 0; w < W; w++) {
                float* place = state + (i + half) * stride + w * LANES;
                const floats next = mul_add(change[w], written, load_floats(place) * decay);
                store(static_cast<void*>(place), next);
                result[half][w] = mul_add(next, read, result[half][w]);
            }
        }
    for (int w = 0; w < W; w++) store(static_cast<void*>(out + w * LANES), result[0][w] + result[1][w]);
}

template <class T>
void run_all(const Problem& p, const Rows& rows, int64_t num_threads) {
    const int64_t team = p.num_tokens < 2 * TOKENS_A_THREAD ? 1 : num_threads;
    parallel_for(p.num_tokens, team, [&](int64_t token) { prepare<T>(p, rows, token); });
    const int64_t size = rows.value_dim, heads_a_group = rows.heads / p.groups;
    run(rows, num_threads, [&](auto w, float* state, int64_t stride, int64_t token, int64_t head, int64_t column) {
        const float* b = p.wide + token * p.bc_size(rows) + head / heads_a_group * rows.key_dim;
        const float* factors = p.factors + (token * rows.heads + head) * 2;
        const T* x = static_cast<const T*>(p.xbc) + token * p.width(rows) + head * size + column;
        float* out = p.out + (token * rows.heads + head) * size + column;
        advance<decltype(w)::value>(state, stride, b, b + p.groups * rows.key_dim, x, out, rows.key_dim, factors[0],
                                    factors[1], p.d[head]);
    });
}

}  // namespace

// xbc [tokens, x | B | C]; dt [tokens, heads] with a stride from token to token; a_log, dt_bias, d [heads]; state [slots,
// heads, key_dim, value_dim]; query_start [rows + 1]; positions [tokens]; slots and num_kept [rows]; out [tokens, heads, value_dim].
// `wide` and `factors` hold numbers between the two parts. dtypes of xbc and dt 0: fp32, 1: bfloat16.
static void mamba2(const void* xbc, const void* dt, const float* a_log, const float* dt_bias, const float* d,
                   float* state, const int32_t* query_start, const int64_t* positions, const int64_t* slots,
                   const int32_t* num_kept,
                   float* wide, float* factors, float* out, int64_t num_rows, int64_t num_tokens, int64_t groups,
                   int64_t heads, int64_t key_dim, int64_t value_dim, int64_t dt_stride, int64_t dtype,
                   int64_t num_threads) {
    const Problem p{xbc, dt, a_log, dt_bias, d, wide, factors, out, num_tokens, groups, dt_stride};
    const Rows rows{state, query_start, positions, slots, num_kept, num_rows, heads, key_dim, value_dim};
    if (dtype == 0) run_all<float>(p, rows, num_threads);
    else run_all<bf16>(p, rows, num_threads);
}
INFERD_EXPORT(mamba2)
