// RMS normalisation of rows, alone or after a residual add. A row is summed in four vectors of lanes, in order, for any
// number of rows.

#include <cmath>

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ROWS_A_THREAD = 16;  // with fewer, waking a thread costs more than it saves

// total = x + residual, rounded to T, if there is a residual; out = total / rms(total) * weight.
template <class T, class W>
void normalise_row(const T* x, const T* residual, const W* weight, T* total, T* out, int64_t size, float eps) {
    vf squares[4] = {};
    int64_t i = 0;
    int turn = 0;
    for (; i + LANES <= size; i += LANES, turn = (turn + 1) % 4) {
        vf v = load(x + i);
        if (residual) {
            store(total + i, v + load(residual + i));
            v = load(total + i);
        }
        squares[turn] = squares[turn] + v * v;
    }
    if (i < size) {
        const int left = int(size - i);
        vf v = load_part(x + i, left);
        if (residual) {
            store_part(total + i, v + load_part(residual + i, left), left);
            v = load_part(total + i, left);
        }
        squares[turn] = squares[turn] + v * v;
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(size);
    const float scale = 1.0f / std::sqrt(mean + eps);
    const T* source = residual ? total : x;
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(source + i) * scale * load(weight + i));
    if (i < size) {
        const int left = int(size - i);
        store_part(out + i, load_part(source + i, left) * scale * load_part(weight + i, left), left);
    }
}

template <class T, class W>
void normalise(const void* x, const void* residual, const void* weight, void* total, void* out, int64_t rows,
               int64_t stride, int64_t size, float eps, int64_t num_threads) {
    const int team = int(rows < 2 * ROWS_A_THREAD ? 1 : num_threads);
    parallel_for(rows, team, [&](int64_t row) {
        const T* from = static_cast<const T*>(residual);
        T* to = static_cast<T*>(total);
        normalise_row<T, W>(static_cast<const T*>(x) + row * stride, from ? from + row * size : nullptr,
                            static_cast<const W*>(weight), to ? to + row * size : nullptr,
                            static_cast<T*>(out) + row * size, size, eps);
    });
}

}  // namespace

// x [rows, size] with `stride` elements from row to row; residual, total [rows, size] or null; out [rows, size];
// weight [size]. dtypes 0: fp32, 1: bfloat16.
static void rms_norm(const void* x, const void* residual, const void* weight, void* total, void* out,
                     int64_t rows, int64_t stride, int64_t size, float eps, int64_t dtype,
                     int64_t weight_dtype, int64_t num_threads) {
    if (dtype == 0)
        normalise<float, float>(x, residual, weight, total, out, rows, stride, size, eps, num_threads);
    else if (weight_dtype == 0)
        normalise<bf16, float>(x, residual, weight, total, out, rows, stride, size, eps, num_threads);
    else
        normalise<bf16, bf16>(x, residual, weight, total, out, rows, stride, size, eps, num_threads);
}
INFERD_EXPORT(rms_norm)
