// y = x W^T + b for a packed W: at the memory's bandwidth for few rows, near the processor's peak for many.
//
// Every output is one chain of fused products over the whole of K, in order, started from 0; the bias is added at its
// end. The blocks of rows, columns and K only decide which chains run side by side, so a row's bits do not depend on
// the number of rows. A block of K passes its unfinished chains on in fp32, which changes nothing.
//
// W is packed in panels of 64 columns. A panel is stored lane by lane of K (a lane is one fp32 or two bfloat16), with
// its 64 columns side by side. The last panel has as many vectors of 16 columns as are left, filled up with zeros.

#include <algorithm>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "call.h"
#include "parallel.h"
#include "simd.h"

namespace {

using namespace simd;

constexpr int VECTORS = 4;
constexpr int PANEL = VECTORS * LANES;
constexpr int ROWS = 6;               // 6 x 4 accumulators, 4 columns and a broadcast: all 32 registers but three
constexpr int64_t K_LANES = 1024;     // of a block: 256 KiB of a panel, a quarter of the second-level cache
constexpr int64_t BYTES_AHEAD = 4096;
constexpr int64_t ROWS_TOGETHER = 96;  // rows of one piece of work if there are more threads than panels

template <class T>
struct Lane;
template <>
struct Lane<float> {
    static constexpr int SIZE = 1;
    static vf multiply(vf acc, vi a, vi b) { return mul_add((vf)a, (vf)b, acc); }
};
template <>
struct Lane<bf16> {
    static constexpr int SIZE = 2;
    static vf multiply(vf acc, vi a, vi b) { return dot2(acc, a, b); }
};

struct Problem {
    const void *x, *bias;
    const int32_t* packed;
    void* out;
    int64_t rows, x_stride, k, n;
    bool is_wide;  // whether results are fp32, whatever the other dtypes
};

inline int64_t lanes_of(int64_t k, int size) { return (k + size - 1) / size; }

// `rows` x V vectors of chains through lanes begin .. end. Prefetches `num_ahead` lines a lane from `ahead`.
template <class T, int R, int V>
void multiply(const int32_t* const* x, const int32_t* panel, int64_t num_lanes, vf acc[R][V], const char* ahead,
              int num_ahead) {
    for (int64_t lane = 0; lane < num_lanes; lane++) {
        vi columns[V];
        for (int v = 0; v < V; v++) columns[v] = load_i(panel + (lane * V + v) * LANES);
        for (int i = 0; i < num_ahead; i++) __builtin_prefetch(ahead + (lane * num_ahead + i) * 64, 0, 2);
        for (int r = 0; r < R; r++) {
            vi one = splat_i(x[r][lane]);
            for (int v = 0; v < V; v++) acc[r][v] = Lane<T>::multiply(acc[r][v], one, columns[v]);
        }
    }
}

// Rows and lanes of K that are multiplied in one go, and the index of the row block.
struct Block {
    int64_t row, first_row, first_lane, num_lanes, index, num_blocks;
};

template <class T>
class Panel {
  public:
    Panel(const Problem& p, int64_t index, std::vector<float>& chains) : p_(p), chains_(chains) {
        lanes_ = lanes_of(p.k, Lane<T>::SIZE);
        column_ = index * PANEL;
        data_ = p.packed + column_ * lanes_;
        vectors_ = int(std::min<int64_t>(VECTORS, (p.n - column_ + LANES - 1) / LANES));
    }

    void run(int64_t first_row, int64_t end_row) {
        switch (vectors_) {
            case 4: return run_blocks<4>(first_row, end_row);
            case 3: return run_blocks<3>(first_row, end_row);
            case 2: return run_blocks<2>(first_row, end_row);
            default: return run_blocks<1>(first_row, end_row);
        }
    }

  private:
    const Problem& p_;
    std::vector<float>& chains_;
    int64_t lanes_, column_;
    const int32_t* data_;
    int vectors_;

    template <int V>
    void run_blocks(int64_t first_row, int64_t end_row) {
        if (lanes_ > K_LANES) chains_.resize((end_row - first_row) * PANEL);
        for (int64_t begin = 0; begin < lanes_; begin += K_LANES) {
            const int64_t num = std::min(K_LANES, lanes_ - begin);
            // Blocks of similar size: eight rows are four and four, not six and two.
            const int64_t num_blocks = (end_row - first_row + ROWS - 1) / ROWS;
            for (int64_t index = 0; index < num_blocks; index++) {
                const int64_t row = first_row + (end_row - first_row) * index / num_blocks;
                const int64_t size = first_row + (end_row - first_row) * (index + 1) / num_blocks - row;
                const Block block{row, first_row, begin, num, index, num_blocks};
                switch (size) {
                    case 6: run_block<6, V>(block); break;
                    case 5: run_block<5, V>(block); break;
                    case 4: run_block<4, V>(block); break;
                    case 3: run_block<3, V>(block); break;
                    case 2: run_block<2, V>(block); break;
                    case 1: run_block<1, V>(block); break;
                }
            }
        }
    }

    template <int R, int V>
    void run_block(const Block& block) {
        const int64_t row = block.row, begin = block.first_lane, num = block.num_lanes;
        const bool is_first = begin == 0, is_last = begin + num == lanes_;
        const int32_t* x[R];
        for (int r = 0; r < R; r++)
            x[r] = reinterpret_cast<const int32_t*>(static_cast<const T*>(p_.x) + (row + r) * p_.x_stride) + begin;
        vf acc[R][V] = {};
        float* chains = chains_.data() + (row - block.first_row) * PANEL;
        if (!is_first)
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) acc[r][v] = load(chains + r * PANEL + v * LANES);
        // One block of rows reads the weights once, and needs only a page prefetched. Several blocks have time to fetch
        // all of the next panel in memory, which this thread most likely takes, spread over the products of all blocks.
        const int num_ahead = int((V + block.num_blocks - 1) / block.num_blocks);
        const int64_t fetched = block.index * num_ahead;  // lines a lane that earlier blocks have fetched
        const bool is_alone = block.num_blocks == 1;
        const int32_t* lanes = data_ + begin * V * LANES;
        const char* next = reinterpret_cast<const char*>(lanes) + (is_alone ? BYTES_AHEAD : num * (V + fetched) * 64);
        multiply<T, R, V>(x, lanes, num, acc, next, fetched < V ? num_ahead : 0);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                if (is_last)
                    put(row + r, column_ + v * LANES, acc[r][v]);
                else
                    store(chains + r * PANEL + v * LANES, acc[r][v]);
            }
    }

    void put(int64_t row, int64_t column, vf value) {
        const int64_t place = row * p_.n + column;
        const T* bias = static_cast<const T*>(p_.bias);
        const int left = int(std::min<int64_t>(LANES, p_.n - column));
        if (bias) value += left == LANES ? load(bias + column) : load_part(bias + column, left);
        if (p_.is_wide)
            write(static_cast<float*>(p_.out) + place, value, left);
        else
            write(static_cast<T*>(p_.out) + place, value, left);
    }

    template <class Out>
    static void write(Out* place, vf value, int count) {
        if (count == LANES)
            store(place, value);
        else
            store_part(place, value, count);
    }
};

template <class T>
void run(const Problem& p, int num_threads) {
    const int64_t panels = (p.n + PANEL - 1) / PANEL;
    const bool is_wide = panels >= 2 * num_threads;
    const int64_t together = is_wide ? std::max<int64_t>(p.rows, 1) : ROWS_TOGETHER;
    const int64_t row_pieces = (p.rows + together - 1) / together;
    // One thread takes neighbouring panels, in four turns: if it is held up, others take some of its turns.
    const int64_t turn = std::max<int64_t>(1, panels / (4 * num_threads));
    const int64_t turns = (panels + turn - 1) / turn;
    const int team = int(std::min<int64_t>(num_threads, turns * row_pieces));
    parallel_for_dynamic(turns * row_pieces, team, [&](int64_t i) {
        static thread_local std::vector<float> chains;
        const int64_t first = i / row_pieces * turn, piece = i % row_pieces;
        for (int64_t index = first; index < std::min(panels, first + turn); index++)
            Panel<T>(p, index, chains).run(piece * together, std::min(p.rows, (piece + 1) * together));
    });
}

// Every step reads the weights from end to end: larger pages take fewer address translations.
void use_huge_pages(void* begin, int64_t num_bytes) {
#if defined(__linux__)
    const uintptr_t page = 4096, start = (uintptr_t(begin) + page - 1) / page * page;
    const uintptr_t end = (uintptr_t(begin) + num_bytes) / page * page;
    if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
}

template <class T>
void pack(const T* weight, int32_t* packed, int64_t n, int64_t k, int num_threads) {
    const int64_t lanes = lanes_of(k, Lane<T>::SIZE);
    use_huge_pages(packed, (n + LANES - 1) / LANES * LANES * lanes * 4);
    const int64_t groups = (n + LANES - 1) / LANES;
    const int64_t whole = k / (LANES * Lane<T>::SIZE) * LANES;  // lanes in whole blocks of sixteen
    parallel_for(groups, num_threads, [&](int64_t group) {
        const int64_t first = group / VECTORS * VECTORS;
        const int64_t vectors = std::min<int64_t>(VECTORS, groups - first);
        int32_t* place = packed + first * LANES * lanes + (group - first) * LANES;
        const int64_t left = std::min<int64_t>(LANES, n - group * LANES);
        for (int64_t lane = 0; lane < whole; lane += LANES) {
            vi rows[LANES];
            for (int64_t i = 0; i < LANES; i++)
                rows[i] = i < left ? load_i(weight + (group * LANES + i) * k + lane * Lane<T>::SIZE) : vi{};
            transpose(rows);
            for (int i = 0; i < LANES; i++) store_i(place + (lane + i) * vectors * LANES, rows[i]);
        }
        for (int64_t lane = whole; lane < lanes; lane++)
            for (int64_t i = 0; i < LANES; i++) {
                int32_t element = 0;
                const int64_t size = std::min<int64_t>(Lane<T>::SIZE, k - lane * Lane<T>::SIZE) * sizeof(T);
                if (i < left) std::memcpy(&element, weight + (group * LANES + i) * k + lane * Lane<T>::SIZE, size);
                place[lane * vectors * LANES + i] = element;
            }
    });
}

}  // namespace

// weight [n, k] -> packed, ceil(n / 16) * 16 * ceil(k / lane size) lanes of 4 bytes. dtype 0: fp32, 1: bfloat16.
static void linear_pack(const void* weight, void* packed, int64_t n, int64_t k, int64_t dtype,
                        int64_t num_threads) {
    if (dtype == 0)
        pack(static_cast<const float*>(weight), static_cast<int32_t*>(packed), n, k, int(num_threads));
    else
        pack(static_cast<const bf16*>(weight), static_cast<int32_t*>(packed), n, k, int(num_threads));
}
INFERD_EXPORT(linear_pack)

// x [rows, k], `x_stride` elements from row to row; the last lane of each row must be readable in full. bias [n] or
// null; out [rows, n] of `out_dtype`: that of x, or fp32.
static void linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t x_stride,
                   int64_t k, int64_t n, int64_t dtype, int64_t out_dtype, int64_t num_threads) {
    Problem p{x, bias, static_cast<const int32_t*>(packed), out, rows, x_stride, k, n, out_dtype == 0};
    if (dtype == 0)
        run<float>(p, int(num_threads));
    else
        run<bf16>(p, int(num_threads));
}
INFERD_EXPORT(linear)
