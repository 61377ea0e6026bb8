// activation(gate) * up on rows of [gate | up], or with limits, in fp32, rounded once.

#include "cpu/call.h"
#include "cpu/gelu.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 16384;

enum Activation { SILU = 0, GELU_TANH = 1, LIMITED = 2, GELU_ERF = 3 };

struct Limits {
    float limit, alpha;  // of LIMITED
};

template <int ACTIVATION>
inline vf activate(vf x) {
    if constexpr (ACTIVATION == SILU) return x / (1.0f + exp(-x));
    if constexpr (ACTIVATION == GELU_ERF) return gelu_erf(x);
    return gelu_tanh(x);
}

// A comparison with NaN is false, so NaN stays.
inline vf at_most(vf x, float limit) { return x > limit ? splat(limit) : x; }
inline vf at_least(vf x, float limit) { return x < limit ? splat(limit) : x; }

template <int ACTIVATION>
inline vf product(vf gate, vf up, Limits limits) {
    if constexpr (ACTIVATION != LIMITED) return activate<ACTIVATION>(gate) * up;
    gate = at_most(gate, limits.limit);
    up = at_least(at_most(up, limits.limit), -limits.limit);
    return gate / (1.0f + exp(gate * -limits.alpha)) * (up + 1.0f);
}

template <class T, int ACTIVATION>
void multiply(const void* gate_up, void* out, int64_t rows, int64_t size, Limits limits, int64_t num_threads) {
    const int team = int(rows * size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    const int64_t chunk = 1024;
    const int64_t chunks = (size + chunk - 1) / chunk;
    parallel_for(rows * chunks, team, [&](int64_t piece) {
        const int64_t row = piece / chunks, begin = piece % chunks * chunk;
        const int64_t end = begin + chunk < size ? begin + chunk : size;
        const T* gate = static_cast<const T*>(gate_up) + row * 2 * size;
        const T* up = gate + size;
        T* place = static_cast<T*>(out) + row * size;
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) store(place + i, product<ACTIVATION>(load(gate + i), load(up + i), limits));
        if (i < end) {
            const int left = int(end - i);
            store_part(place + i, product<ACTIVATION>(load_part(gate + i, left), load_part(up + i, left), limits), left);
        }
    });
}

}  // namespace

template <class T>
static void multiply_all(const void* gate_up, void* out, int64_t rows, int64_t size, int64_t activation, Limits limits,
                         int64_t num_threads) {
    if (activation == SILU) multiply<T, SILU>(gate_up, out, rows, size, limits, num_threads);
    if (activation == GELU_TANH) multiply<T, GELU_TANH>(gate_up, out, rows, size, limits, num_threads);
    if (activation == LIMITED) multiply<T, LIMITED>(gate_up, out, rows, size, limits, num_threads);
    if (activation == GELU_ERF) multiply<T, GELU_ERF>(gate_up, out, rows, size, limits, num_threads);
}

// gate_up [rows, 2 * size], out [rows, size]; dtype 0: fp32, 1: bfloat16; activation 0: silu, 1: gelu (tanh form), 2:
// (up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit`, and the up from -limit to limit; 3: gelu (exact
// form).
static void gated_mul(const void* gate_up, void* out, int64_t rows, int64_t size, int64_t activation, float limit,
                      float alpha, int64_t dtype, int64_t num_threads) {
    const Limits limits{limit, alpha};
    if (dtype == 0) multiply_all<float>(gate_up, out, rows, size, activation, limits, num_threads);
    else multiply_all<bf16>(gate_up, out, rows, size, activation, limits, num_threads);
}
INFERD_EXPORT(gated_mul)
