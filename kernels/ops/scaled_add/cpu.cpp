// x * multiplier + residual, rounded to the dtype after each operation, like a model that computes in that dtype.

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 32768;
constexpr int64_t CHUNK = 8192;

inline vf rounded(vf v, const float*) { return v; }
inline vf rounded(vf v, const bf16*) { return widen(narrow(v)); }

template <class T>
void run(const T* x, const T* residual, T* out, int64_t size, float multiplier, int64_t num_threads) {
    const int team = int(size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    parallel_for((size + CHUNK - 1) / CHUNK, team, [&](int64_t chunk) {
        const int64_t begin = chunk * CHUNK, end = begin + CHUNK < size ? begin + CHUNK : size;
        for (int64_t i = begin; i < end; i += LANES) {
            const int count = int(end - i < LANES ? end - i : LANES);
            vf v = rounded((count == LANES ? load(x + i) : load_part(x + i, count)) * multiplier, x);
            if (residual) v = v + (count == LANES ? load(residual + i) : load_part(residual + i, count));
            if (count == LANES)
                store(out + i, v);
            else
                store_part(out + i, v, count);
        }
    });
}

}  // namespace

// x, out [size]; residual [size] or null; dtype 0: fp32, 1: bfloat16.
static void scaled_add(const void* x, const void* residual, void* out, int64_t size, float multiplier, int64_t dtype,
                       int64_t num_threads) {
    auto run_as = [&](auto element) {
        using T = decltype(element);
        run(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<T*>(out), size, multiplier, num_threads);
    };
    if (dtype == 0)
        run_as(float());
    else
        run_as(bf16());
}
INFERD_EXPORT(scaled_add)
