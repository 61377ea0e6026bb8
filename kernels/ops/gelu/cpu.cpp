// gelu in its tanh form, in fp32, rounded once.

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 16384;
constexpr int64_t CHUNK = 4096;

// (1 + tanh t) / 2 is the sigmoid of 2 t, here with 2 sqrt(2 / pi). It is precise even when tanh is near -1.
inline vf activate(vf x) { return x / (1.0f + exp((x + x * x * x * 0.044715f) * -1.5957691f)); }

template <class T>
void run(const T* x, T* out, int64_t size, int64_t num_threads) {
    const int team = int(size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    parallel_for((size + CHUNK - 1) / CHUNK, team, [&](int64_t chunk) {
        const int64_t begin = chunk * CHUNK, end = begin + CHUNK < size ? begin + CHUNK : size;
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) store(out + i, activate(load(x + i)));
        if (i < end) store_part(out + i, activate(load_part(x + i, int(end - i))), int(end - i));
    });
}

}  // namespace

// x, out [size]; dtype 0: fp32, 1: bfloat16.
static void gelu(const void* x, void* out, int64_t size, int64_t dtype, int64_t num_threads) {
    if (dtype == 0)
        run(static_cast<const float*>(x), static_cast<float*>(out), size, num_threads);
    else
        run(static_cast<const bf16*>(x), static_cast<bf16*>(out), size, num_threads);
}
INFERD_EXPORT(gelu)
