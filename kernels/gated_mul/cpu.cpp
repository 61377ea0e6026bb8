// activation(gate) * up on rows of [gate | up], in fp32, rounded once.

#include "call.h"
#include "parallel.h"
#include "simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 16384;

enum Activation { SILU = 0, GELU_TANH = 1 };

template <int ACTIVATION>
inline vf activate(vf x) {
    if constexpr (ACTIVATION == SILU) return x / (1.0f + exp(-x));
    // (1 + tanh t) / 2 is the sigmoid of 2 t, here with 2 sqrt(2 / pi). It is precise even when tanh is near -1.
    return x / (1.0f + exp((x + x * x * x * 0.044715f) * -1.5957691f));
}

template <class T, int ACTIVATION>
void multiply(const void* gate_up, void* out, int64_t rows, int64_t size, int64_t num_threads) {
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
        for (; i + LANES <= end; i += LANES) store(place + i, activate<ACTIVATION>(load(gate + i)) * load(up + i));
        if (i < end) {
            const int left = int(end - i);
            store_part(place + i, activate<ACTIVATION>(load_part(gate + i, left)) * load_part(up + i, left), left);
        }
    });
}

}  // namespace

// gate_up [rows, 2 * size], out [rows, size]; dtype 0: fp32, 1: bfloat16; activation 0: silu, 1: gelu (tanh form).
static void gated_mul(const void* gate_up, void* out, int64_t rows, int64_t size, int64_t activation,
                      int64_t dtype, int64_t num_threads) {
    if (dtype == 0 && activation == SILU) multiply<float, SILU>(gate_up, out, rows, size, num_threads);
    if (dtype == 0 && activation == GELU_TANH) multiply<float, GELU_TANH>(gate_up, out, rows, size, num_threads);
    if (dtype == 1 && activation == SILU) multiply<bf16, SILU>(gate_up, out, rows, size, num_threads);
    if (dtype == 1 && activation == GELU_TANH) multiply<bf16, GELU_TANH>(gate_up, out, rows, size, num_threads);
}
INFERD_EXPORT(gated_mul)
