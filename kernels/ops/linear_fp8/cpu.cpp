// y = x W^T + b with W in e4m3, with a scale for each row of W, or for each 128 inputs of a row or of 128 rows.
//
// Weights are widened in registers and multiplied by activations as they are. The products of 128 inputs that share a
// scale are one chain of fused products in fp32, started from 0, in order. The chains of a row, each multiplied by its
// scale, are another. The blocks of rows and columns only decide which chains run side by side, so a row's bits do not
// depend on the number of rows.
//
// W is packed in panels of 64 columns. For each input a panel has a line of 64 bytes; the last is filled up with zeros.
// For few rows the floor is reading the lines, a byte for each weight.

#include <algorithm>
#include <vector>

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int VECTORS = 4;
constexpr int PANEL = VECTORS * LANES;
constexpr int ROWS = 6;  // with AVX-512 6 x 4 sums, 4 vectors of weights and a broadcast: all 32 registers but three
constexpr int64_t BYTES_AHEAD = 4096;
constexpr int64_t ROWS_TOGETHER = 96;  // rows of one piece of work if there are more threads than panels

// Vectors that `rows` multiply at a time. With AVX2 a vector takes two registers of 16, and eight chains keep both of
// its multipliers busy.
constexpr int vectors_for(int rows) {
#if defined(__AVX512F__)
    return rows > 0 ? VECTORS : 0;
#else
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#endif
}

// Sixteen numbers / 2^8. Moved to the places of float16's sign, exponent and mantissa, whose exponent's bias is 15 and
// not 7, they are exact. The shift leaves a copy of the sign in the exponent's highest bit.
inline floats widened(const uint8_t* p) {
#if defined(__F16C__)
    __m128i bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                            _mm256_set1_epi16(int16_t(0xbfff)));
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_cvtph_ps(0xffff, halves);
#else
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
#else
    float values[LANES];
    for (int i = 0; i < LANES; i++) {
        const uint32_t bits = uint32_t(p[i] & 0x7f) << 20;
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        values[i] = p[i] & 0x80 ? magnitude * -0x1p112f : magnitude * 0x1p112f;
    }
    return load_floats(values);
#endif
}

struct Problem {
    const uint8_t* packed;
    const float *x, *scales, *bias;
    void* out;
    int64_t rows, k, n, group_size, num_groups, rows_a_scale;
    bool is_narrow;  // whether results are bfloat16
};

// Sums of R rows and V vectors of a panel, from vector `vector` on, into `sums` [R, PANEL]. By itself: in a function of
// many blocks GCC spills sums.
template <int R, int V>
__attribute__((noinline)) void multiply(const Problem& p, int64_t panel, int vector, int64_t row, float* sums) {
    const uint8_t* weights = p.packed + panel * p.k * PANEL + vector * LANES;
    const float* x = p.x + row * p.k;
    const float* scales = p.scales + (p.rows_a_scale == 1 ? panel * p.num_groups * PANEL + vector * LANES
                                                          : panel * PANEL / p.rows_a_scale * p.num_groups);
    for (int64_t group = 0; group < p.num_groups; group++) {
        const int64_t end = std::min(p.k, (group + 1) * p.group_size);
        floats acc[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) acc[r][v] = splat_floats(0.0f);
        for (int64_t i = group * p.group_size; i < end; i++) {
            const uint8_t* line = weights + i * PANEL;
            __builtin_prefetch(line + BYTES_AHEAD, 0, 2);
            floats columns[V];
            for (int v = 0; v < V; v++) columns[v] = widened(line + v * LANES);
            for (int r = 0; r < R; r++) {
                const floats one = splat_floats(x[r * p.k + i]);
                for (int v = 0; v < V; v++) acc[r][v] = mul_add(one, columns[v], acc[r][v]);
            }
        }
        for (int v = 0; v < V; v++) {
            const floats scale = p.rows_a_scale == 1 ? load_floats(scales + group * PANEL + v * LANES)
                                                     : splat_floats(scales[group]);
            for (int r = 0; r < R; r++) {
                float* to = sums + r * PANEL + (vector + v) * LANES;
                store(to, mul_add(acc[r][v], scale, group ? load_floats(to) : splat_floats(0.0f)));
            }
        }
    }
}

template <class T>
void put(const Problem& p, int64_t row, int64_t column, const float* sums) {
    for (int64_t at = column; at < std::min(p.n, column + PANEL); at += LANES) {
        const int count = int(std::min<int64_t>(LANES, p.n - at));
        vf value = load(sums + (at - column));
        if (p.bias) value += count == LANES ? load(p.bias + at) : load_part(p.bias + at, count);
        T* place = static_cast<T*>(p.out) + row * p.n + at;
        if (count == LANES)
            store(place, value);
        else
            store_part(place, value, count);
    }
}

template <int R>
void run_rows(const Problem& p, int64_t panel, int64_t row) {
    float sums[R * PANEL];
    constexpr int V = vectors_for(R);
    for (int vector = 0; vector < VECTORS; vector += V) multiply<R, V>(p, panel, vector, row, sums);
    for (int r = 0; r < R; r++)
        if (p.is_narrow)
            put<bf16>(p, row + r, panel * PANEL, sums + r * PANEL);
        else
            put<float>(p, row + r, panel * PANEL, sums + r * PANEL);
}

void run_panel(const Problem& p, int64_t panel, int64_t first_row, int64_t end_row) {
    // Blocks of similar size: eight rows are four and four, not six and two.
    const int64_t num_blocks = (end_row - first_row + ROWS - 1) / ROWS;
    for (int64_t index = 0; index < num_blocks; index++) {
        const int64_t row = first_row + (end_row - first_row) * index / num_blocks;
        switch (first_row + (end_row - first_row) * (index + 1) / num_blocks - row) {
            case 6: run_rows<6>(p, panel, row); break;
            case 5: run_rows<5>(p, panel, row); break;
            case 4: run_rows<4>(p, panel, row); break;
            case 3: run_rows<3>(p, panel, row); break;
            case 2: run_rows<2>(p, panel, row); break;
            case 1: run_rows<1>(p, panel, row); break;
        }
    }
}

}  // namespace

// weight [n, k] in e4m3 -> packed [ceil(n / 64), k, 64].
static void linear_fp8_pack(const uint8_t* weight, uint8_t* packed, int64_t n, int64_t k, int64_t num_threads) {
    parallel_for((n + PANEL - 1) / PANEL, num_threads, [&](int64_t panel) {
        for (int64_t i = 0; i < k; i++)
            for (int64_t column = 0; column < PANEL; column++) {
                const int64_t row = panel * PANEL + column;
                packed[(panel * k + i) * PANEL + column] = row < n ? weight[row * k + i] : 0;
            }
    });
}
INFERD_EXPORT(linear_fp8_pack)

// x [rows, k], out [rows, n], both of dtype 0: fp32, 1: bfloat16; bias [n] fp32 or null. Scales are 2^8 times the
// weights', because that is how small the widened numbers are: [panels, groups, 64] if `rows_a_scale` is 1, else
// [blocks of so many rows, groups].
static void linear_fp8(const void* x, void* out, int64_t rows, int64_t dtype, const uint8_t* packed,
                       const float* scales, const float* bias, int64_t k, int64_t n, int64_t group_size,
                       int64_t rows_a_scale, int64_t num_threads) {
    static thread_local std::vector<float> wide;
    const float* numbers = static_cast<const float*>(x);
    if (dtype == 1) {
        wide.resize(rows * k);
        float* to = wide.data();
        parallel_for(rows, num_threads, [&](int64_t row) {
            const bf16* from = static_cast<const bf16*>(x) + row * k;
            for (int64_t i = 0; i < k; i++) to[row * k + i] = to_float(from[i]);
        });
        numbers = to;
    }
    const Problem p{packed, numbers, scales, bias, out, rows, k, n, group_size, (k + group_size - 1) / group_size,
                    rows_a_scale, dtype == 1};
    const int64_t panels = (n + PANEL - 1) / PANEL;
    const int64_t together = panels >= 2 * num_threads ? std::max<int64_t>(rows, 1) : ROWS_TOGETHER;
    const int64_t pieces = (rows + together - 1) / together;
    parallel_for_dynamic(panels * pieces, num_threads, [&](int64_t i) {
        const int64_t first = i % pieces * together;
        run_panel(p, i / pieces, first, std::min(rows, first + together));
    });
}
INFERD_EXPORT(linear_fp8)
