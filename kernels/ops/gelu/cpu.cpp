// gelu in both forms, in fp32, rounded once.

#include "cpu/call.h"
#include "cpu/gelu.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 16384;
constexpr int64_t CHUNK = 4096;

template <class T, class Activate>
void run(const void* from, void* to, int64_t size, int64_t num_threads, Activate activate) {
    const T* x = static_cast<const T*>(from);
    T* out = static_cast<T*>(to);
    const int team = int(size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    parallel_for((size + CHUNK - 1) / CHUNK, team, [&](int64_t chunk) {
        const int64_t begin = chunk * CHUNK, end = begin + CHUNK < size ? begin + CHUNK : size;
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) store(out + i, activate(load(x + i)));
        if (i < end) store_part(out + i, activate(load_part(x + i, int(end - i))), int(end - i));
    });
}

}  // namespace

// x, out [size]; is_exact: the exact form, else the tanh form; dtype 0: fp32, 1: bfloat16.
static void gelu(const void* x, void* out, int64_t size, int64_t is_exact, int64_t dtype, int64_t num_threads) {
    auto run_form = [&](auto activate) {
        if (dtype == 0) run<float>(x, out, size, num_threads, activate);
        else run<bf16>(x, out, size, num_threads, activate);
    };
    if (is_exact) run_form([](vf v) { return gelu_erf(v); });
    else run_form([](vf v) { return gelu_tanh(v); });
}
INFERD_EXPORT(gelu)
