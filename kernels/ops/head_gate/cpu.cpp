// Heads multiplied by the sigmoid of a gate, or by its silu behind or before their norm. A head is summed in one vector
// of lanes, in order. Also sums in which one part is multiplied by the sigmoid of its token's gate.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 16384;

// With a weight the normed head times silu(gate), otherwise the head times sigmoid(gate).
template <class T>
void gate_head(const T* x, const T* gate, const float* weight, T* out, int64_t size, float eps) {
    float scale = 1.0f;
    int64_t i = 0;
    if (weight) {
        vf squares = {};
        for (; i + LANES <= size; i += LANES) {
            const vf v = load(x + i);
            squares = mul_add(v, v, squares);
        }
        if (i < size) {
            const vf v = load_part(x + i, int(size - i));
            squares = mul_add(v, v, squares);
        }
        scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    }
    const auto gated = [&](vf v, vf g, vf w) {
        const vf open = 1.0f + exp(-g);
        return weight ? v * scale * w * (g / open) : v / open;
    };
    for (i = 0; i + LANES <= size; i += LANES)
        store(out + i, gated(load(x + i), load(gate + i), weight ? load(weight + i) : vf{}));
    if (i < size) {
        const int left = int(size - i);
        store_part(out + i, gated(load_part(x + i, left), load_part(gate + i, left),
                                  weight ? load_part(weight + i, left) : vf{}), left);
    }
}

// The head times silu(gate), and then its norm.
template <class T>
void norm_gated(const float* x, const T* gate, const float* weight, T* out, int64_t size, float eps) {
    static thread_local std::vector<float> kept;
    kept.resize(size);
    vf squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const int left = int(std::min<int64_t>(LANES, size - i));
        const vf g = load_part(gate + i, left);
        const vf gated = load_part(x + i, left) * (g / (1.0f + exp(-g)));
        store_part(kept.data() + i, gated, left);
        squares = mul_add(gated, gated, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (int64_t i = 0; i < size; i += LANES) {
        const int left = int(std::min<int64_t>(LANES, size - i));
        store_part(out + i, load_part(kept.data() + i, left) * scale * load_part(weight + i, left), left);
    }
}

template <class X, class T, class Head>
void run(const void* x, const void* gate, void* out, int64_t tokens, int64_t heads, int64_t size,
         int64_t token_stride, int64_t head_stride, int64_t num_threads, const Head& run_head) {
    const int team = int(tokens * heads * size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    parallel_for(tokens, team, [&](int64_t token) {
        for (int64_t head = 0; head < heads; head++) {
            const int64_t place = (token * heads + head) * size;
            run_head(static_cast<const X*>(x) + place,
                     static_cast<const T*>(gate) + token * token_stride + head * head_stride,
                     static_cast<T*>(out) + place, head);
        }
    });
}

template <class T>
void add(const void* x, const void* y, const float* gate, void* out, int64_t tokens, int64_t size,
         int64_t num_threads) {
    const int team = int(tokens * size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    parallel_for(tokens, team, [&](int64_t token) {
        const T *own = static_cast<const T*>(x) + token * size, *other = static_cast<const T*>(y) + token * size;
        T* goal = static_cast<T*>(out) + token * size;
        const vf share = 1.0f / (1.0f + exp(splat(-gate[token])));
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(goal + i, mul_add(load(other + i), share, load(own + i)));
        if (i < size) {
            const int left = int(size - i);
            store_part(goal + i, mul_add(load_part(other + i, left), share, load_part(own + i, left)), left);
        }
    });
}

}  // namespace

// x, out [tokens, heads, size]; gate with strides from token to token and from head to head; weight [size] or null.
// dtypes 0: fp32, 1: bfloat16.
static void head_gate(const void* x, const void* gate, const float* weight, void* out, int64_t tokens, int64_t heads,
                      int64_t size, int64_t token_stride, int64_t head_stride, float eps, int64_t dtype,
                      int64_t num_threads) {
    const auto run_as = [&](auto one) {
        using T = decltype(one);
        run<T, T>(x, gate, out, tokens, heads, size, token_stride, head_stride, num_threads,
               [&](const T* own, const T* opened, T* goal, int64_t) { gate_head(own, opened, weight, goal, size, eps); });
    };
    if (dtype == 0) run_as(float());
    else run_as(bf16());
}
INFERD_EXPORT(head_gate)

// As above, with x in fp32 and weight [heads, size].
static void silu_gate_norm(const void* x, const void* gate, const float* weight, void* out, int64_t tokens,
                           int64_t heads, int64_t size, int64_t token_stride, int64_t head_stride, float eps,
                           int64_t dtype, int64_t num_threads) {
    const auto run_as = [&](auto one) {
        using T = decltype(one);
        run<float, T>(x, gate, out, tokens, heads, size, token_stride, head_stride, num_threads,
               [&](const float* own, const T* opened, T* goal, int64_t head) {
                   norm_gated(own, opened, weight + head * size, goal, size, eps);
               });
    };
    if (dtype == 0) run_as(float());
    else run_as(bf16());
}
INFERD_EXPORT(silu_gate_norm)

// x, y, out [tokens, size]; gate [tokens] fp32. dtypes as above.
static void add_gated(const void* x, const void* y, const float* gate, void* out, int64_t tokens, int64_t size,
                      int64_t dtype, int64_t num_threads) {
    if (dtype == 0) add<float>(x, y, gate, out, tokens, size, num_threads);
    else add<bf16>(x, y, gate, out, tokens, size, num_threads);
}
INFERD_EXPORT(add_gated)
