// Layer normalisation of rows, alone or after a residual add. A row's sums run in four vectors of lanes, in order, for
// any number of rows. The variance is computed from the centred row, as the definition says.

#include <cmath>

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ROWS_A_THREAD = 16;  // with fewer, waking a thread costs more than it saves

// Sums the results of `take(offset, vector of the row)` over the whole row. Lanes behind its end are zeros.
template <class T, class Take>
float sum_over(const T* row, int64_t size, Take take) {
    vf totals[4] = {};
    int turn = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES, turn = (turn + 1) % 4) totals[turn] = totals[turn] + take(load(row + i), LANES);
    if (i < size) totals[turn] = totals[turn] + take(load_part(row + i, int(size - i)), int(size - i));
    return sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

inline vf first_lanes(vf v, int count) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)((vi)v & (lane < count));
}

template <class T>
void normalise_row(const T* x, const T* weight, const T* bias, T* out, int64_t size, float eps) {
    const float mean = sum_over(x, size, [](vf v, int) { return v; }) / float(size);
    const float variance = sum_over(x, size, [mean](vf v, int count) {
        const vf centred = first_lanes(v - mean, count);
        return centred * centred;
    });
    const float scale = 1.0f / std::sqrt(variance / float(size) + eps);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(out + i, (load(x + i) - mean) * scale * load(weight + i) + load(bias + i));
    if (i < size) {
        const int left = int(size - i);
        const vf centred = load_part(x + i, left) - mean;
        store_part(out + i, centred * scale * load_part(weight + i, left) + load_part(bias + i, left), left);
    }
}

template <class T>
void add_row(const T* x, const T* residual, T* total, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(total + i, load(x + i) + load(residual + i));
    if (i < size) {
        const int left = int(size - i);
        store_part(total + i, load_part(x + i, left) + load_part(residual + i, left), left);
    }
}

template <class T>
void normalise(const T* x, const T* residual, const T* weight, const T* bias, T* total, T* out, int64_t rows,
               int64_t stride, int64_t size, float eps, int64_t num_threads) {
    const int team = int(rows < 2 * ROWS_A_THREAD ? 1 : num_threads);
    parallel_for(rows, team, [&](int64_t row) {
        const T* source = x + row * stride;
        if (residual) {
            add_row(source, residual + row * size, total + row * size, size);
            source = total + row * size;
        }
        normalise_row(source, weight, bias, out + row * size, size, eps);
    });
}

}  // namespace

// x [rows, size] with `stride` elements from row to row; residual, total [rows, size] or null; out [rows, size];
// weight, bias [size]. dtype 0: fp32, 1: bfloat16.
static void layer_norm(const void* x, const void* residual, const void* weight, const void* bias, void* total, void* out,
                       int64_t rows, int64_t stride, int64_t size, float eps, int64_t dtype, int64_t num_threads) {
    auto run = [&](auto element) {
        using T = decltype(element);
        normalise(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
                  static_cast<const T*>(bias), static_cast<T*>(total), static_cast<T*>(out), rows, stride, size, eps,
                  num_threads);
    };
    if (dtype == 0)
        run(float());
    else
        run(bf16());
}
INFERD_EXPORT(layer_norm)
