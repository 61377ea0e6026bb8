// y += B (scale * A x) for rows with an adapter, in place. Both products are sums in fp32; y is rounded once.
//
// The first product is sixteen chains over the inputs, one a lane, added in a fixed tree. The second is one chain over
// the rank for each output. Rows that follow one another with one adapter are multiplied together, four at a time, and
// share nothing but loads: a row's bits depend on its own numbers alone.

#include <algorithm>
#include <vector>

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int ROWS = 4;           // of a block
constexpr int TOGETHER = 4;       // rows of A that a block is multiplied by at a time
constexpr int PANEL = 64;         // outputs whose weights lie side by side
constexpr int VECTORS = PANEL / LANES;
constexpr int64_t PRODUCTS_A_THREAD = 16384;

inline floats numbers(const float* p) { return load_floats(p); }
inline floats numbers(const bf16* p) {
#if defined(__FMA__) && !defined(__AVX512F__)
    const auto half = [](const bf16* from) {
        return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
    };
    return {half(p), half(p + 8)};
#else
    return load(p);
#endif
}

// The first n < LANES numbers, with zeros behind them.
template <class T>
inline floats numbers_part(const T* p, int n) {
    T padded[LANES] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return numbers(padded);
}

inline float sum_of(floats v) {
    float lanes[LANES];
    store(lanes, v);
    return sum(load(lanes));
}

// Outputs first .. first + count - 1 belong to one part of the matrix.
struct Panel {
    int32_t first, count, part;
};

// Rows that follow one another and have one adapter.
struct Block {
    int64_t first, adapter;
    int num;
};

struct Problem {
    const void *x, *down, *up;
    void* y;
    float* shrunk;
    const Panel* panels;
    const int32_t* ranks;
    const float* scales;
    int64_t x_stride, k, n, num_parts, num_panels, rank;

    int64_t rank_of(int64_t adapter, int64_t part) const { return ranks[adapter * num_parts + part]; }
    float* shrunk_of(int64_t row, int64_t part) const { return shrunk + (row * num_parts + part) * rank; }
};

// R rows of x times up to `TOGETHER` rows of A.
template <int R, class X, class W>
void shrink(const Problem& p, const Block& block, int64_t part, int64_t first, int count) {
    const W* a[TOGETHER];
    const X* x[R];
    for (int i = 0; i < TOGETHER; i++) {
        const int64_t row = (block.adapter * p.num_parts + part) * p.rank + first + std::min(i, count - 1);
        a[i] = static_cast<const W*>(p.down) + row * p.k;
    }
    for (int r = 0; r < R; r++) x[r] = static_cast<const X*>(p.x) + (block.first + r) * p.x_stride;
    floats acc[R][TOGETHER];
    for (auto& row : acc)
        for (floats& one : row) one = splat_floats(0);
    const int64_t whole = p.k / LANES * LANES;
    const int left = int(p.k - whole);
    for (int64_t k = 0; k < whole; k += LANES) {
        floats columns[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) columns[i] = numbers(a[i] + k);
        for (int r = 0; r < R; r++) {
            const floats one = numbers(x[r] + k);
            for (int i = 0; i < TOGETHER; i++) acc[r][i] = mul_add(one, columns[i], acc[r][i]);
        }
    }
    for (int r = 0; left && r < R; r++)
        for (int i = 0; i < TOGETHER; i++)
            acc[r][i] = mul_add(numbers_part(x[r] + whole, left), numbers_part(a[i] + whole, left), acc[r][i]);
    const float scale = p.scales[block.adapter * p.num_parts + part];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < count; i++) p.shrunk_of(block.first + r, part)[first + i] = scale * sum_of(acc[r][i]);
}

// Adds R rows' products with a panel of B to y.
template <int R, class X, class W>
void expand(const Problem& p, const Block& block, int64_t index) {
    const Panel panel = p.panels[index];
    const int64_t rank = p.rank_of(block.adapter, panel.part);
    const W* weights = static_cast<const W*>(p.up) + (block.adapter * p.num_panels + index) * p.rank * PANEL;
    floats acc[R][VECTORS];
    for (auto& row : acc)
        for (floats& one : row) one = splat_floats(0);
    const float* shrunk[R];
    for (int r = 0; r < R; r++) shrunk[r] = p.shrunk_of(block.first + r, panel.part);
    for (int64_t i = 0; i < rank; i++) {
        floats columns[VECTORS];
        for (int v = 0; v < VECTORS; v++) columns[v] = numbers(weights + i * PANEL + v * LANES);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) acc[r][v] = mul_add(splat_floats(shrunk[r][i]), columns[v], acc[r][v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) {
            const int left = std::min(panel.count - v * LANES, LANES);
            if (left <= 0) break;
            X* place = static_cast<X*>(p.y) + (block.first + r) * p.n + panel.first + v * LANES;
            float sums[LANES];
            store(sums, acc[r][v]);
            if (left == LANES)
                store(place, load(place) + load(sums));
            else
                store_part(place, load_part(place, left) + load(sums), left);
        }
}

template <class Do>
inline void of_rows(int num, const Do& run) {
    switch (num) {
        case 4: return run(std::integral_constant<int, 4>());
        case 3: return run(std::integral_constant<int, 3>());
        case 2: return run(std::integral_constant<int, 2>());
        default: return run(std::integral_constant<int, 1>());
    }
}

// Blocks of the rows that have an adapter, in order.
void find_blocks(const int64_t* slots, const int64_t* adapters, int64_t num_rows, std::vector<Block>& blocks) {
    blocks.clear();
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t adapter = slots[row] < 0 ? -1 : adapters[slots[row]];
        if (adapter < 0) continue;
        if (!blocks.empty()) {
            Block& last = blocks.back();
            if (last.adapter == adapter && last.first + last.num == row && last.num < ROWS) {
                last.num++;
                continue;
            }
        }
        blocks.push_back({row, adapter, 1});
    }
}

template <class X, class W>
void run(const Problem& p, const std::vector<Block>& blocks, int64_t num_threads) {
    const int64_t groups = (p.rank + TOGETHER - 1) / TOGETHER, num_blocks = int64_t(blocks.size());
    const auto threads = [&](int64_t products) { return products < 2 * PRODUCTS_A_THREAD ? 1 : num_threads; };
    const int64_t shrinks = p.num_parts * groups;
    parallel_for(num_blocks * shrinks, threads(num_blocks * p.num_parts * p.rank * p.k), [&](int64_t i) {
        const Block& block = blocks[i / shrinks];
        const int64_t part = i % shrinks / groups, first = i % groups * TOGETHER;
        const int64_t count = std::min<int64_t>(TOGETHER, p.rank_of(block.adapter, part) - first);
        if (count > 0) of_rows(block.num, [&](auto r) { shrink<r(), X, W>(p, block, part, first, int(count)); });
    });
    parallel_for(num_blocks * p.num_panels, threads(num_blocks * p.num_panels * p.rank * PANEL), [&](int64_t i) {
        const Block& block = blocks[i / p.num_panels];
        const int64_t panel = i % p.num_panels;
        if (p.rank_of(block.adapter, p.panels[panel].part) > 0)
            of_rows(block.num, [&](auto r) { expand<r(), X, W>(p, block, panel); });
    });
}

}  // namespace

// x [rows, x_stride]; y [rows, n]; down [adapters, parts, rank, k]; up [adapters, panels, rank, 64]; panels [panels, 3]
// int32; ranks, scales [adapters, parts]; slots [rows], negative for padding; adapters [slots], negative for none;
// shrunk [rows, parts, rank] for use in here. dtype of x and y, dtype of the weights 0: fp32, 1: bfloat16.
static void lora(const void* x, void* y, const void* down, const void* up, const void* panels, const int32_t* ranks,
                 const float* scales, const int64_t* slots, const int64_t* adapters, float* shrunk, int64_t num_rows,
                 int64_t x_stride, int64_t k, int64_t n, int64_t num_parts, int64_t num_panels, int64_t rank,
                 int64_t dtype, int64_t weight_dtype, int64_t num_threads) {
    static thread_local std::vector<Block> blocks;
    find_blocks(slots, adapters, num_rows, blocks);
    const Problem p{x, down, up, y, shrunk, static_cast<const Panel*>(panels), ranks, scales,
                    x_stride, k, n, num_parts, num_panels, rank};
    if (dtype == 1)
        run<bf16, bf16>(p, blocks, num_threads);
    else if (weight_dtype == 1)
        run<float, bf16>(p, blocks, num_threads);
    else
        run<float, float>(p, blocks, num_threads);
}
INFERD_EXPORT(lora)
