// What this processor's products give if every operand is in a register: the rate that no kernel can exceed.
//
// Each loop has as many independent sums as hide an instruction's latency, and does what the kernels must do besides
// the product itself: without VNNI, bytes are multiplied to 16 bits, and added up to 32.

#include <atomic>

#include "cpu/amx_tiles.h"
#include "cpu/call.h"
#include "cpu/int_lanes.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace int_product;

constexpr int SUMS = 10;  // AVX2 has 16 registers; 5 cycles of latency and two products a cycle need ten

std::atomic<int64_t> sink;  // so that the compiler keeps the sums

// A number that the compiler does not know.
template <class V>
inline V opaque(V v) {
#if defined(INT_DOT_AVX2) || defined(__AVX512F__)
    asm volatile("" : "+x"(v));
#else
    asm volatile("" : "+m"(v));  // of several registers
#endif
    return v;
}

void float_products(int64_t rounds) {
    floats sums[SUMS] = {};
    const floats a = opaque(splat_floats(0.5f)), b = opaque(splat_floats(0.25f));
    for (int64_t i = 0; i < rounds; i++)
        unrolled<SUMS>([&](auto s) ALWAYS_INLINE { sums[s] = opaque(fused(a, b, sums[s])); });
    float total = 0;
    for (const floats& sum : sums) total += sum[0];
    sink += int64_t(total);
}

#if defined(__AVX512BF16__)
void pair_products(int64_t rounds) {
    vf sums[SUMS] = {};
    const vi a = opaque(splat_ints(0x3f003f00)), b = opaque(splat_ints(0x3e803e80));
    for (int64_t i = 0; i < rounds; i++)
        unrolled<SUMS>([&](auto s) ALWAYS_INLINE { sums[s] = opaque(simd::dot2(sums[s], a, b)); });
    float total = 0;
    for (const vf& sum : sums) total += sum[0];
    sink += int64_t(total);
}
#endif

// Of unsigned bytes, or of nibbles in bytes. A round is a unit of 32 inputs, eight at a time.
template <Form F>
void byte_products(int64_t rounds) {
    constexpr int QUADS = 8, CHAINS = 8;
    ints totals[CHAINS] = {};
    const ints weights = opaque(splat_ints(0x01020304));
    for (int64_t i = 0; i < rounds; i++)
        unrolled<CHAINS>([&](auto s) ALWAYS_INLINE {
            Sum<F> sum;
            sum.begin(totals[s]);
            unrolled<QUADS>([&](auto) ALWAYS_INLINE { sum.add(opaque(weights), 0x01010101); });
            totals[s] = opaque(sum.total(totals[s]));
        });
    int64_t total = 0;
    for (const ints& each : totals) total += each[0];
    sink += total;
}

#if HAS_TILES
template <bool IS_BF16>
void tile_products(int64_t rounds) {
    tiles::Shape shape;
    for (int i = 0; i < 8; i++) shape.set(i, tiles::MAX_ROWS);
    tiles::Tiles tiles;
    tiles.set(shape);
    for (int64_t i = 0; i < rounds; i++) {
        if constexpr (IS_BF16) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 5, 6);
            _tile_dpbssd(2, 4, 7);
            _tile_dpbssd(3, 5, 7);
        }
    }
}
#endif

struct Kind {
    void (*run)(int64_t rounds);
    double operations;  // of a round: a product and its sum are two
};

// By number: float32, pairs of bfloat16, bytes, nibbles, tiles of bfloat16, tiles of bytes.
Kind kind_of(int64_t number) {
    switch (number) {
        case 0: return {float_products, 2.0 * SUMS * WIDTH};
#if defined(__AVX512BF16__)
        case 1: return {pair_products, 4.0 * SUMS * WIDTH};
#endif
        case 2: return {byte_products<SIXES>, 2.0 * 8 * 32 * WIDTH};
        case 3: return {byte_products<NIBBLES>, 2.0 * 8 * 32 * WIDTH};
#if HAS_TILES
        case 4: return {tile_products<true>, 2.0 * 4 * 16 * 16 * 32};
        case 5: return {tile_products<false>, 2.0 * 4 * 16 * 16 * 64};
#endif
        default: return {nullptr, 0.0};
    }
}

}  // namespace

// Does `rounds` of products of kind `kind` on each thread. operations: one fp64, of all threads; 0 if the processor has
// no such product.
static void product_rates(double* operations, int64_t kind, int64_t rounds, int64_t num_threads) {
    const Kind found = kind_of(kind);
    *operations = found.operations * double(rounds) * double(num_threads);
    if (found.run) parallel_for(num_threads, num_threads, [&](int64_t) { found.run(rounds); });
}
INFERD_EXPORT(product_rates)
