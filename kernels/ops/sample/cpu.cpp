// The token with the largest score + Gumbel noise, exactly. A cheap bound rules out all but a dozen tokens of a row,
// and those get their noise in fp64.
//
// fp32 addition is monotone, so score + (a bound >= noise) is never below score + noise, rounding included. If a
// token's bounded total is below the total of some other token, it can neither win nor tie.

#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/call.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"

namespace {

using namespace lanes;

typedef uint32_t bits32 __attribute__((vector_size(4 * LANES)));
// 32-bit words in the low halves of 64-bit lanes; the high halves hold anything.
typedef uint64_t words __attribute__((vector_size(4 * LANES)));

constexpr int64_t CHUNK = 8192;  // tokens that a thread takes at a time
constexpr uint64_t LOW_HALF = 0xffffffff;
constexpr int32_t STEPS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr uint64_t EVEN_STEPS[8] = {0, 2, 4, 6, 8, 10, 12, 14};
constexpr float NOISE_MAX = 17.328680038452148f;  // the noise of 24 bits all set

struct Best {
    float total;  // score + noise; for a leader the score alone
    int64_t id;
};

struct Row {
    const float* scores;
    int64_t vocab_size;
    uint64_t seed, position;
};

// 64-bit products of the low halves.
inline words product(words a, uint32_t factor) {
    const words b = words{} + factor;
#if defined(__AVX512F__)
    // A mask of all ones costs nothing: GCC 12 warns of an uninitialised value inside the plain intrinsic.
    return (words)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (words)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (words)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & LOW_HALF) * b;
#endif
}

// The first word of Philox-4x32-10 with key (seed low, high) and counter (token id, position low, high, 0).
inline words philox(words token_ids, uint64_t seed, uint64_t position) {
    words c0 = token_ids, c1 = words{} + (position & LOW_HALF), c2 = words{} + (position >> 32), c3 = {};
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const words first = product(c0, 0xD2511F53), second = product(c2, 0xCD9E8D57);
        c0 = (second >> 32) ^ c1 ^ k0;
        c2 = (first >> 32) ^ c3 ^ k1;
        c1 = second, c3 = first;
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
    }
    return c0;
}

// The 24 random bits of tokens first .. first + LANES - 1.
inline ints random_bits(const Row& row, int64_t first) {
    const words even = load<words>(EVEN_STEPS) + uint64_t(first);
    const words a = philox(even, row.seed, row.position), b = philox(even + 1, row.seed, row.position);
    return (ints)((bits32)((a & LOW_HALF) | b << 32) >> 8);
}

// -log(-log(u)) for u = (bits + 0.5) / 2^24.
inline float noise(int32_t bits) { return float(-std::log(-std::log((bits + 0.5) * 0x1p-24))); }

// An upper bound of the noise; for a noise of 3 or more it is at most 0.1 above. -log(u) >= 1 - u, and the base-2
// logarithm of a float is at least its bits read as a fixed-point number. The last constant includes 1e-5 for rounding.
inline floats noise_bound(ints bits) {
    const floats gap = __builtin_convertvector(0x1ffffff - (bits << 1), floats);       // (1 - u) * 2^25
    const floats log2_gap = __builtin_convertvector((ints)gap - 0x3f800000, floats);  // * 2^23
    return 17.32869f - log2_gap * 0x1.62e43p-24f;                                     // 25 log 2 - log(gap)
}

inline void improve(Best& best, Best other) {
    if (other.total > best.total || (other.total == best.total && other.id < best.id)) best = other;
}

// A token with the highest score; {-inf, 0} if no score is above -inf.
Best leader(const Row& row, int64_t begin, int64_t end) {
    floats highest = floats{} + MINUS_INF;
    ints ids = {};
    for (int64_t first = begin; first < end; first += LANES) {
        const floats scores = scores_at(row.scores, first, row.vocab_size);
        const ints is_higher = scores > highest;
        highest = is_higher ? scores : highest;
        ids = is_higher ? load<ints>(STEPS) + int32_t(first) : ids;
    }
    Best best = {MINUS_INF, 0};
    for (int i = 0; i < LANES; i++) improve(best, {highest[i], ids[i]});
    return best;
}

// The token of this chunk that beats `best`, else `best`.
Best search(const Row& row, int64_t begin, int64_t end, Best best) {
    for (int64_t first = begin; first < end; first += LANES) {
        const floats scores = scores_at(row.scores, first, row.vocab_size);
        if (!lanes_of(scores + NOISE_MAX >= best.total)) continue;
        const ints bits = random_bits(row, first);
        uint32_t candidates = lanes_of(scores + noise_bound(bits) >= best.total);
        for (; candidates; candidates &= candidates - 1) {
            const int lane = __builtin_ctz(candidates);
            improve(best, {scores[lane] + noise(bits[lane]), first + lane});
        }
    }
    return best;
}

// Searches a chunk for a token that beats the row's leader with its noise.
Best search_chunk(const Row& row, const Best* leaders, int64_t chunks, int64_t chunk) {
    Best best = leaders[0];
    for (int64_t i = 1; i < chunks; i++) improve(best, leaders[i]);
    if (best.total == MINUS_INF) return best;
    best.total += noise(random_bits(row, best.id)[0]);
    const int64_t begin = chunk * CHUNK, end = begin + CHUNK;
    return search(row, begin, end < row.vocab_size ? end : row.vocab_size, best);
}

}  // namespace

// scores [rows, vocab_size] fp32; seeds, positions and ids [rows] int64. NaN never wins. A row that holds only NaN and
// -inf gives 0.
static void sample(const float* scores, const int64_t* seeds, const int64_t* positions, int64_t* ids,
                   int64_t rows, int64_t vocab_size, int64_t num_threads) {
    const int team = int(rows * vocab_size < 2 * TOKENS_A_THREAD ? 1 : num_threads);
    const int64_t chunks = (vocab_size + CHUNK - 1) / CHUNK, pieces = rows * chunks;
    std::vector<Best> leaders(pieces), found(pieces);
    const auto row_at = [&](int64_t row) {
        return Row{scores + row * vocab_size, vocab_size, uint64_t(seeds[row]), uint64_t(positions[row])};
    };
    parallel_for(pieces, team, [&](int64_t piece) {
        const int64_t begin = piece % chunks * CHUNK, end = begin + CHUNK;
        leaders[piece] = leader(row_at(piece / chunks), begin, end < vocab_size ? end : vocab_size);
    });
    parallel_for_dynamic(pieces, team, [&](int64_t piece) {
        const int64_t row = piece / chunks;
        found[piece] = search_chunk(row_at(row), &leaders[row * chunks], chunks, piece % chunks);
    });
    for (int64_t row = 0; row < rows; row++) {
        Best best = found[row * chunks];
        for (int64_t i = 1; i < chunks; i++) improve(best, found[row * chunks + i]);
        ids[row] = best.id;
    }
}
INFERD_EXPORT(sample)

// The noise and its bound, fp32, of each pattern of 24 bits in bits [size], size a multiple of 16. For tests.
static void sample_noise(const int32_t* bits, float* noises, float* bounds, int64_t size) {
    for (int64_t first = 0; first < size; first += LANES) {
        const floats bound = noise_bound(load<ints>(bits + first));
        std::memcpy(bounds + first, &bound, sizeof bound);
        for (int i = 0; i < LANES; i++) noises[first + i] = noise(bits[first + i]);
    }
}
INFERD_EXPORT(sample_noise)
