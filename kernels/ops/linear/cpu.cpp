// y = x W^T + b for a packed W: at the memory's bandwidth for few rows, near the processor's peak for many.
//
// Every output is one chain of fused products over the whole of K, in order, started from 0; the bias is added at its
// end. The blocks of rows, columns and K only decide which chains run side by side, so a row's bits do not depend on
// the number of rows. A block of K passes its unfinished chains on in fp32, which changes nothing.
//
// Weights in 16 bits may meet fp32 activations. Registers widen them exactly, so results are those of the wide weights.
// A buffer of widened weights for many rows was slower (Zen 3, 32 to 128 rows).
//
// W is packed in panels of 64 columns, which are vectors of 16. A vector is stored lane by lane of K: a lane is 16
// weights, or 16 pairs of bfloat16 that are multiplied as pairs. With AVX-512 the lanes of a panel's vectors alternate;
// else its vectors follow each other. The last panel has as many vectors as are left, filled up with zeros. With AMX,
// bfloat16 has its own form and products: see amx_product.h.

#include <algorithm>
#include <vector>

#include "cpu/amx_product.h"
#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

// A register of sums. GCC would keep simd.h's 16 lanes in memory if the processor's registers are smaller.
#if defined(__AVX512F__)
typedef vf reg;
constexpr int ROWS = 6;  // 6 x 4 accumulators, 4 columns and a broadcast: all 32 registers but three
constexpr bool ALTERNATE = true;
#elif defined(__AVX2__)
typedef float reg __attribute__((vector_size(32)));
constexpr int ROWS = 6;  // 6 x 2 accumulators, 2 columns and a broadcast: all 16 registers but one
constexpr bool ALTERNATE = false;
#else
typedef float reg __attribute__((vector_size(16)));
constexpr int ROWS = 3;
constexpr bool ALTERNATE = false;
#endif
typedef int32_t ireg __attribute__((vector_size(sizeof(reg))));
typedef uint32_t ureg __attribute__((vector_size(sizeof(reg))));
typedef uint16_t hreg __attribute__((vector_size(sizeof(reg) / 2)));

constexpr int WIDTH = sizeof(reg) / 4;
constexpr int REGISTERS = LANES / WIDTH;  // of a vector
constexpr int VECTORS = 4;
constexpr int PANEL = VECTORS * LANES;
constexpr int64_t K_LANES = 1024;  // of a block: 256 KiB of a panel, a quarter to half of the second-level cache
constexpr int64_t BYTES_AHEAD = 4096;
constexpr int64_t ROWS_TOGETHER = 96;  // rows of one piece of work if there are more threads than panels
constexpr int64_t MOST_ROWS = 192;     // of one piece: they stay in the second-level cache for all panels of a turn

template <class T>
inline T read(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

inline reg widened(const float* p) { return read<reg>(p); }
inline reg widened(const bf16* p) {
#if defined(__AVX512F__)
    return load(p);
#elif defined(__AVX2__)
    return (reg)((ureg)_mm256_cvtepu16_epi32(read<__m128i>(p)) << 16);  // GCC would widen by halves
#else
    return (reg)(__builtin_convertvector(read<hreg>(p), ureg) << 16);
#endif
}
inline reg widened(const fp16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_cvtph_ps(0xffff, read<__m256i>(p));
#elif defined(__F16C__)
    return (reg)_mm256_cvtph_ps(read<__m128i>(p));
#else
    // The exponent's bias differs by 112. Finite numbers, also the smallest, become exact.
    const ureg bits = __builtin_convertvector(read<hreg>(p), ureg);
    const reg magnitude = (reg)((bits & 0x7fff) << 13) * 0x1p112f;
    return (reg)((ureg)magnitude | (bits & 0x8000) << 16);
#endif
}

inline reg fused(reg a, reg b, reg c) {
#if defined(__AVX512F__)
    return mul_add(a, b, c);
#elif defined(__FMA__)
    return (reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// How weights of type W are stored and multiplied by activations of type X.
template <class X, class W>
struct Lane;
template <class W>
struct Lane<float, W> {
    static constexpr int SIZE = 1;
    typedef W Unit;
    static ireg columns(const W* p) { return (ireg)widened(p); }
    static reg multiply(reg acc, ireg a, ireg b) { return fused((reg)a, (reg)b, acc); }
};
template <>
struct Lane<bf16, bf16> {
    static constexpr int SIZE = 2;
    typedef int32_t Unit;
    static ireg columns(const int32_t* p) { return read<ireg>(p); }
    static reg multiply(reg acc, ireg a, ireg b) {
#if defined(__AVX512F__)
        return dot2(acc, a, b);
#else
        acc = fused((reg)(a & int32_t(0xffff0000)), (reg)(b & int32_t(0xffff0000)), acc);
        return fused((reg)(a << 16), (reg)(b << 16), acc);
#endif
    }
};

struct Problem {
    const void *x, *bias, *packed;
    void* out;
    int64_t rows, x_stride, k, n;
    bool is_wide;  // whether results are fp32, whatever the other dtypes
};

inline int64_t lanes_of(int64_t k, int size) { return (k + size - 1) / size; }

// Number of vectors that `rows` multiply at a time if vectors follow each other. A processor that begins two products a
// cycle and ends each after four needs eight chains.
constexpr int vectors_for(int rows) { return std::max(1, 8 / (rows * REGISTERS)); }

// R rows x V vectors of chains through `num_lanes`. Vectors that alternate prefetch `num_ahead` vectors a lane from
// `ahead`. Others lie `to_vector` units apart, and each prefetches its own.
template <class L, int R, int V>
__attribute__((always_inline)) inline void multiply(const int32_t* const* x, const typename L::Unit* weights,
                                                    int64_t to_vector, int64_t num_lanes, reg acc[R][V * REGISTERS],
                                                    const char* ahead, int num_ahead) {
    constexpr int64_t LANE_BYTES = LANES * sizeof(typename L::Unit);
    for (int64_t lane = 0; lane < num_lanes; lane++) {
        ireg columns[V * REGISTERS];
        for (int v = 0; v < V; v++) {
            const auto* vector = weights + (ALTERNATE ? (lane * V + v) * LANES : v * to_vector + lane * LANES);
            for (int i = 0; i < REGISTERS; i++) columns[v * REGISTERS + i] = L::columns(vector + i * WIDTH);
            if (!ALTERNATE) __builtin_prefetch(reinterpret_cast<const char*>(vector) + BYTES_AHEAD, 0, 2);
        }
        for (int i = 0; ALTERNATE && i < num_ahead; i++)
            __builtin_prefetch(ahead + (lane * num_ahead + i) * LANE_BYTES, 0, 2);
        for (int r = 0; r < R; r++) {
            const ireg one = x[r][lane] - ireg{};
            for (int v = 0; v < V * REGISTERS; v++) acc[r][v] = L::multiply(acc[r][v], one, columns[v]);
        }
    }
}

// Rows and lanes of K that are multiplied in one go, and the index of the row block.
struct Block {
    int64_t row, first_row, first_lane, num_lanes, index, num_blocks;
};

template <class Out>
void write(Out* place, vf value, int count) {
    if (count == LANES)
        store(place, value);
    else
        store_part(place, value, count);
}

// Writes the sums of 16 columns, with the bias. By itself: inlined, it takes half of the time to compile.
template <class X>
__attribute__((noinline)) void put(const Problem& p, int64_t row, int64_t column, const float* sums) {
    vf value = load(sums);
    const int64_t place = row * p.n + column;
    const X* bias = static_cast<const X*>(p.bias);
    const int left = int(std::min<int64_t>(LANES, p.n - column));
    if (bias) value += left == LANES ? load(bias + column) : load_part(bias + column, left);
    if (p.is_wide)
        write(static_cast<float*>(p.out) + place, value, left);
    else
        write(static_cast<X*>(p.out) + place, value, left);
}

template <class X>
class Panel {
  public:
    Panel(const Problem& p, int64_t index, std::vector<float>& chains) : p_(p), chains_(chains) {
        lanes_ = lanes_of(p.k, Lane<X, X>::SIZE);
        column_ = index * PANEL;
        vectors_ = int(std::min<int64_t>(VECTORS, (p.n - column_ + LANES - 1) / LANES));
        is_whole_ = column_ + vectors_ * LANES <= p.n;
    }

    // Multiplies rows by weights of type W.
    template <class W>
    void run(int64_t first_row, int64_t end_row) {
        if constexpr (!ALTERNATE) return run_blocks<W, VECTORS>(first_row, end_row);
        switch (vectors_) {
            case 4: return run_blocks<W, 4>(first_row, end_row);
            case 3: return run_blocks<W, 3>(first_row, end_row);
            case 2: return run_blocks<W, 2>(first_row, end_row);
            default: return run_blocks<W, 1>(first_row, end_row);
        }
    }

  private:
    const Problem& p_;
    std::vector<float>& chains_;
    int64_t lanes_, column_;
    int vectors_;
    bool is_whole_;  // whether all vectors are columns of the result

    template <class W, int V>
    void run_blocks(int64_t first_row, int64_t end_row) {
        if (lanes_ > K_LANES) chains_.resize((end_row - first_row) * PANEL);
        // Blocks of similar size: eight rows are four and four, not six and two.
        const int64_t num_blocks = (end_row - first_row + ROWS - 1) / ROWS;
        for (int64_t begin = 0; begin < lanes_; begin += K_LANES) {
            const int64_t num = std::min(K_LANES, lanes_ - begin);
            for (int64_t index = 0; index < num_blocks; index++) {
                const int64_t row = first_row + (end_row - first_row) * index / num_blocks;
                const int64_t size = first_row + (end_row - first_row) * (index + 1) / num_blocks - row;
                const Block block{row, first_row, begin, num, index, num_blocks};
                switch (size) {
                    case 6: run_rows<W, 6, V>(block); break;
                    case 5: run_rows<W, 5, V>(block); break;
                    case 4: run_rows<W, 4, V>(block); break;
                    case 3: run_rows<W, 3, V>(block); break;
                    case 2: run_rows<W, 2, V>(block); break;
                    case 1: run_rows<W, 1, V>(block); break;
                }
            }
        }
    }

    template <class W, int R, int V>
    void run_rows(const Block& block) {
        if constexpr (ALTERNATE) return run_block<W, R, V>(block, 0);
        constexpr int TOGETHER = vectors_for(R);
        int vector = 0;
        for (; vector + TOGETHER <= vectors_; vector += TOGETHER) run_block<W, R, TOGETHER>(block, vector);
        for (; vector < vectors_; vector++) run_block<W, R, 1>(block, vector);
    }

    // Writes the sums of whole vectors, with the bias. A call of `put` for each vector would take a tenth of the time of
    // a product: 256 rows, 7,168 x 1,024, 393 -> 434 GFLOP/s (2 cores, Zen 4, 2026-11-26).
    template <int R, int V, class Out>
    void put_block(Out* out, int64_t row, reg (&acc)[R][V * REGISTERS]) const {
        for (int v = 0; p_.bias && v < V; v++) {
            const reg bias = load(static_cast<const X*>(p_.bias) + column_ + v * LANES);
            for (int r = 0; r < R; r++) acc[r][v] += bias;
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(out + (row + r) * p_.n + column_ + v * LANES, acc[r][v]);
    }

    // By itself: in a function of many blocks GCC spills sums.
    template <class W, int R, int V>
    __attribute__((noinline)) void run_block(const Block& block, int vector) {
        typedef Lane<X, W> L;
        typedef typename L::Unit Unit;
        const int64_t row = block.row, num = block.num_lanes;
        const bool is_first = block.first_lane == 0, is_last = block.first_lane + num == lanes_;
        const int32_t* x[R];
        for (int r = 0; r < R; r++)
            x[r] = reinterpret_cast<const int32_t*>(static_cast<const X*>(p_.x) + (row + r) * p_.x_stride) +
                   block.first_lane;
        reg acc[R][V * REGISTERS] = {};
        float* chains = chains_.data() + (row - block.first_row) * PANEL + vector * LANES;
        if (!is_first)
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V * REGISTERS; v++) acc[r][v] = read<reg>(chains + r * PANEL + v * WIDTH);
        // One block of rows reads the weights once, and needs only a page prefetched. Several blocks have time to fetch
        // all of the next panel in memory, which this thread most likely takes, spread over the products of all blocks.
        const int num_ahead = int((V + block.num_blocks - 1) / block.num_blocks);
        const int64_t fetched = block.index * num_ahead;  // lines a lane that earlier blocks have fetched
        const bool is_alone = block.num_blocks == 1;
        const int64_t place = ALTERNATE ? block.first_lane * V : vector * lanes_ + block.first_lane;
        const Unit* weights = static_cast<const Unit*>(p_.packed) + column_ * lanes_ + place * LANES;
        const char* next = reinterpret_cast<const char*>(weights) +
                           (is_alone ? BYTES_AHEAD : num * (V + fetched) * int64_t(LANES * sizeof(Unit)));
        multiply<L, R, V>(x, weights, lanes_ * LANES, num, acc, next, fetched < V ? num_ahead : 0);
        if constexpr (ALTERNATE)
            if (is_last && is_whole_)
                return p_.is_wide ? put_block<R, V>(static_cast<float*>(p_.out), row, acc)
                                  : put_block<R, V>(static_cast<X*>(p_.out), row, acc);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                float sums[LANES];
                float* to = is_last ? sums : chains + r * PANEL + v * LANES;
                for (int i = 0; i < REGISTERS; i++)
                    std::memcpy(to + i * WIDTH, &acc[r][v * REGISTERS + i], sizeof(reg));
                if (is_last) put<X>(p_, row + r, column_ + (vector + v) * LANES, sums);
            }
    }
};

template <class X, class W>
void run(const Problem& p, int num_threads) {
    const int64_t panels = (p.n + PANEL - 1) / PANEL;
    const bool is_wide = panels >= 2 * num_threads;
    const int64_t together = is_wide ? std::clamp<int64_t>(p.rows, 1, MOST_ROWS) : ROWS_TOGETHER;
    const int64_t row_pieces = (p.rows + together - 1) / together;
    // One thread takes neighbouring panels, in four turns: if it is held up, others take some of its turns.
    const int64_t turn = std::max<int64_t>(1, panels / (4 * num_threads));
    const int64_t turns = (panels + turn - 1) / turn;
    const int team = int(std::min<int64_t>(num_threads, turns * row_pieces));
    parallel_for_dynamic(turns * row_pieces, team, [&](int64_t i) {
        static thread_local std::vector<float> chains;
        const int64_t first = i / row_pieces * turn, piece = i % row_pieces;
        for (int64_t index = first; index < std::min(panels, first + turn); index++)
            Panel<X>(p, index, chains).template run<W>(piece * together, std::min(p.rows, (piece + 1) * together));
    });
}

#if HAS_TILES
// Writes the sums of 32 columns, rounded once, with the bias.
inline void put_panel(const Problem& p, int64_t row, int64_t column, const float* sums) {
    vf first = load(sums), second = load(sums + LANES);
    const bf16* bias = static_cast<const bf16*>(p.bias);
    if (bias) first += load(bias + column), second += load(bias + column + LANES);
    store_i(static_cast<bf16*>(p.out) + row * p.n + column, narrow(first, second));
}
#endif

void run_tiles(const Problem& p, int num_threads) {
#if HAS_TILES
    const auto pack = [&](int64_t row, int64_t num, char* place) {
        amx::pack_rows(static_cast<const bf16*>(p.x) + row * p.x_stride, p.x_stride, num, p.k, place);
    };
    const auto put_sums = [&](int64_t row, int64_t column, const float* sums) {
        if (!p.is_wide && column + amx::COLUMNS <= p.n) return put_panel(p, row, column, sums);
        for (int64_t at = column; at < std::min(p.n, column + amx::COLUMNS); at += LANES)
            put<bf16>(p, row, at, sums + (at - column));
    };
    const int64_t steps = (p.k + amx::Bf16::STEP - 1) / amx::Bf16::STEP;
    amx::run<amx::Bf16>({p.packed, p.rows, steps, p.n}, num_threads, pack, put_sums);
#endif
}

template <class X, class W>
void pack(const W* weight, typename Lane<X, W>::Unit* packed, int64_t n, int64_t k, int num_threads) {
    typedef typename Lane<X, W>::Unit Unit;
    constexpr int64_t SIZE = Lane<X, W>::SIZE, PAIR = 4 / sizeof(W);  // weights of a lane, and of 32 bits
    constexpr bool IN_TILES = HAS_TILES && SIZE == 2;
    const int64_t lanes = IN_TILES ? (k + 31) / 32 * LANES : lanes_of(k, SIZE);
    const int64_t groups = (n + LANES - 1) / LANES, most = IN_TILES ? 2 : VECTORS;
    const int64_t whole = k / (LANES * PAIR) * LANES * PAIR;  // weights in whole blocks of sixteen times 32 bits
    parallel_for(groups, num_threads, [&](int64_t group) {
        const int64_t first = group / most * most;
        const int64_t vectors = ALTERNATE ? std::min<int64_t>(most, groups - first) : 1;
        const int64_t to_lane = IN_TILES ? LANES : vectors * LANES, to_vector = IN_TILES ? LANES * LANES : LANES;
        Unit* place = packed + (ALTERNATE ? first * lanes * LANES + (group - first) * to_vector : group * lanes * LANES);
        const int64_t left = std::min<int64_t>(LANES, n - group * LANES);
        const W* from = weight + group * LANES * k;
        for (int64_t at = 0; at < whole; at += LANES * PAIR) {
            vi rows[LANES];
            for (int64_t i = 0; i < LANES; i++) rows[i] = i < left ? load_i(from + i * k + at) : vi{};
            transpose(rows);
            Unit* to = place + at / SIZE * vectors * LANES;
            for (int i = 0; i < LANES; i++) {
                if constexpr (PAIR == SIZE) {
                    store_i(to + i * to_lane, rows[i]);
                } else {
                    const vh low = __builtin_convertvector((vu)rows[i], vh);
                    const vh high = __builtin_convertvector((vu)rows[i] >> 16, vh);
                    std::memcpy(to + 2 * i * to_lane, &low, sizeof low);
                    std::memcpy(to + (2 * i + 1) * to_lane, &high, sizeof high);
                }
            }
        }
        for (int64_t lane = whole / SIZE; lane < lanes; lane++) {
            Unit* to = place + lane / LANES * LANES * vectors * LANES + lane % LANES * to_lane;
            const int64_t at = lane * SIZE, count = std::clamp<int64_t>(k - at, 0, SIZE);
            for (int64_t i = 0; i < LANES; i++) {
                to[i] = {};
                if (i < left && count) std::memcpy(&to[i], from + i * k + at, count * sizeof(W));
            }
        }
    });
}

// Calls run(X, W) for activations of `dtype` and weights of `weight_dtype`. 0: fp32, 1: bfloat16, 2: fp16. Weights have
// the activations' dtype, or they have 16 bits and activations are fp32.
template <class Run>
void by_dtypes(int64_t dtype, int64_t weight_dtype, const Run& run) {
    if (dtype == 1) return run(bf16{}, bf16{});
    if (weight_dtype == 0) return run(float{}, float{});
    if (weight_dtype == 1) return run(float{}, bf16{});
    return run(float{}, fp16{});
}

}  // namespace

// weight [n, k] -> packed, ceil(n / 16) * 16 * ceil(k / lane size) lanes. A lane is a pair if activations are bfloat16.
// With AMX there are then ceil(k / 32) * 16 of them.
static void linear_pack(const void* weight, void* packed, int64_t n, int64_t k, int64_t dtype, int64_t weight_dtype,
                        int64_t num_threads) {
    by_dtypes(dtype, weight_dtype, [&](auto x, auto w) {
        typedef decltype(x) X;
        typedef decltype(w) W;
        typedef typename Lane<X, W>::Unit Unit;
        pack<X, W>(static_cast<const W*>(weight), static_cast<Unit*>(packed), n, k, int(num_threads));
    });
}
INFERD_EXPORT(linear_pack)

// x [rows, k], `x_stride` elements from row to row; the last lane of each row must be readable in full. bias [n] or
// null; out [rows, n] of `out_dtype`: that of x, or fp32.
static void linear(const void* x, void* out, int64_t rows, int64_t dtype, int64_t x_stride, const void* packed,
                   const void* bias, int64_t k, int64_t n, int64_t weight_dtype, int64_t out_dtype,
                   int64_t num_threads) {
    const Problem p{x, bias, packed, out, rows, x_stride, k, n, out_dtype == 0};
    by_dtypes(dtype, weight_dtype, [&](auto x, auto w) {
        if constexpr (HAS_TILES && sizeof x == 2) run_tiles(p, int(num_threads));
        else run<decltype(x), decltype(w)>(p, int(num_threads));
    });
}
INFERD_EXPORT(linear)
