// The gated delta rule, token by token, as recurrence.h runs it. First, for each token: q and k of each key head,
// normalised, and decay and beta of each value head.

#include <cmath>

#include "cpu/call.h"
#include "cpu/recurrence.h"

namespace {

using namespace recurrence;

constexpr int64_t TOKENS_A_THREAD = 4;  // fewer are not worth the start of a second thread
constexpr float NORM_EPS = 1e-6f;

struct Problem {
    const void* qkv;
    const void* b;
    const void* a;
    const float* a_log;
    const float* dt_bias;
    float* normed;
    float* factors;
    void* out;
    int64_t num_tokens, key_heads, value_heads, key_dim, value_dim, b_stride, a_stride;

    int64_t width() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// A head divided by its length, and then multiplied by `factor`.
template <class T>
void normalise(const T* head, float* out, int64_t size, float factor) {
    vf squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vf x = load(head + i);
        squares = mul_add(x, x, squares);
    }
    if (i < size) {
        const vf x = load_part(head + i, int(size - i));
        squares = mul_add(x, x, squares);
    }
    const float scale = factor / std::sqrt(sum(squares) + NORM_EPS);
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(head + i) * scale);
    if (i < size) store_part(out + i, load_part(head + i, int(size - i)) * scale, int(size - i));
}

template <class T>
void prepare(const Problem& p, int64_t token) {
    const T* qkv = static_cast<const T*>(p.qkv) + token * p.width();
    float* normed = p.normed + token * 2 * p.key_heads * p.key_dim;
    const float factor = 1.0f / std::sqrt(float(p.key_dim));
    for (int64_t h = 0; h < 2 * p.key_heads; h++)
        normalise(qkv + h * p.key_dim, normed + h * p.key_dim, p.key_dim, h < p.key_heads ? factor : 1.0f);
    float* factors = p.factors + token * 2 * p.value_heads;
    for (int64_t h = 0; h < p.value_heads; h++) {
        const float speed = to_float(static_cast<const T*>(p.a)[token * p.a_stride + h]) + p.dt_bias[h];
        const float softplus = speed > 20.0f ? speed : std::log1p(std::exp(speed));
        factors[2 * h] = std::exp(-std::exp(p.a_log[h]) * softplus);
        factors[2 * h + 1] = 1.0f / (1.0f + std::exp(-to_float(static_cast<const T*>(p.b)[token * p.b_stride + h])));
    }
}

// One token's effect on W vectors of columns of a head's state, with `stride` numbers from key to key. Even and odd keys
// are added up apart, and then together.
template <int W, class T>
inline void advance(float* state, int64_t stride, const float* k, const float* q, const T* v, T* out, int64_t key_dim,
                    float decay, float beta) {
    floats held[2][W], change[W], result[2][W];
    for (int half = 0; half < 2; half++)
        for (int w = 0; w < W; w++) held[half][w] = result[half][w] = splat_floats(0.0f);
    for (int64_t i = 0; i < key_dim; i += 2)
        for (int half = 0; half < 2; half++) {
            const floats key = splat_floats(k[i + half]);
            for (int w = 0; w < W; w++)
                held[half][w] = mul_add(load_floats(state + (i + half) * stride + w * LANES), key, held[half][w]);
        }
    for (int w = 0; w < W; w++)
        change[w] = mul_add(held[0][w] + held[1][w], splat_floats(-(decay * beta)), load_columns(v + w * LANES) * beta);
    for (int64_t i = 0; i < key_dim; i += 2)
        for (int half = 0; half < 2; half++) {
            const floats key = splat_floats(k[i + half]), query = splat_floats(q[i + half]);
            for (int w = 0; w < W; w++) {
                float* place = state + (i + half) * stride + w * LANES;
                const floats next = mul_add(change[w], key, load_floats(place) * decay);
                store(static_cast<void*>(place), next);
                result[half][w] = mul_add(next, query, result[half][w]);
            }
        }
    for (int w = 0; w < W; w++) store_columns(out + w * LANES, result[0][w] + result[1][w]);
}

template <class T>
void run_all(const Problem& p, const Rows& rows, int64_t num_threads) {
    const int64_t team = p.num_tokens < 2 * TOKENS_A_THREAD ? 1 : num_threads;
    parallel_for(p.num_tokens, team, [&](int64_t token) { prepare<T>(p, token); });
    const int64_t size = p.value_dim, heads_a_key = p.value_heads / p.key_heads;
    run(rows, num_threads, [&](auto w, float* state, int64_t stride, int64_t token, int64_t head, int64_t column) {
        const float* q = p.normed + (token * 2 * p.key_heads + head / heads_a_key) * p.key_dim;
        const float* factors = p.factors + (token * p.value_heads + head) * 2;
        const T* v = static_cast<const T*>(p.qkv) + token * p.width() + 2 * p.key_heads * p.key_dim + head * size;
        T* out = static_cast<T*>(p.out) + (token * p.value_heads + head) * size;
        advance<decltype(w)::value>(state, stride, q + p.key_heads * p.key_dim, q, v + column, out + column, p.key_dim,
                                    factors[0], factors[1]);
    });
}

}  // namespace

// qkv [tokens, q | k | v]; b, a [tokens, value_heads] with strides from token to token; a_log, dt_bias [value_heads];
// state [slots, value_heads, key_dim, value_dim]; query_start [rows + 1]; positions [tokens]; slots and num_kept [rows]; out [tokens,
// value_heads, value_dim]. normed [tokens, 2 key_heads, key_dim] and factors [tokens, value_heads, 2] hold numbers
// between the two parts. dtypes 0: fp32, 1: bfloat16.
static void gated_delta(const void* qkv, const void* b, const void* a, const float* a_log, const float* dt_bias,
                        float* state, const int32_t* query_start, const int64_t* positions, const int64_t* slots,
                        const int32_t* num_kept,
                        float* normed, float* factors, void* out, int64_t num_rows, int64_t num_tokens,
                        int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t b_stride,
                        int64_t a_stride, int64_t dtype, int64_t num_threads) {
    const Problem p{qkv, b, a, a_log, dt_bias, normed, factors, out, num_tokens,
                    key_heads, value_heads, key_dim, value_dim, b_stride, a_stride};
    const Rows rows{state, query_start, positions, slots, num_kept, num_rows, value_heads, key_dim, value_dim};
    if (dtype == 0) run_all<float>(p, rows, num_threads);
    else run_all<bf16>(p, rows, num_threads);
}
INFERD_EXPORT(gated_delta)
