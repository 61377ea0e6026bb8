// The thresholds of top-k, top-p and min-p, exactly, without sorting. One pass over a row measures how much lies above
// each of a few depths. A second collects everything above the first depth that is deep enough. A radix search, a byte
// of the scores' integer image at a time, finds the threshold among those. Sums are of whole numbers, so their order is
// free.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/call.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"

namespace {

using namespace lanes;

typedef float half_floats __attribute__((vector_size(2 * LANES)));
typedef int32_t half_ints __attribute__((vector_size(2 * LANES)));
typedef int64_t sums __attribute__((vector_size(4 * LANES)));  // half as many lanes

constexpr int FRACTION_BITS = 42;  // of a weight
constexpr int DEPTHS = 7;
constexpr float DEPTH[DEPTHS] = {-1, -2, -4, -7, -11, -16, -23};  // below the likeliest token

// An integer with the order of the scores, from 0 up; both zeros have one image.
inline uint32_t image_of(float score) {
    score += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return uint32_t(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000;
}
inline float score_of(uint32_t image) {
    int32_t bits = int32_t(image ^ 0x80000000);
    bits ^= (bits >> 31) & 0x7fffffff;
    float score;
    std::memcpy(&score, &bits, sizeof score);
    return score;
}

// A token's weight times 2^-42: e^score, by the operations of `weights.py`, one by one and unfused.
inline floats weight_of(floats x) {
    constexpr float WHOLE = 12582912.0f;
    x = x > -32.0f ? x : floats{} - 32.0f;
    const floats exponent = (x * 1.44269504f + WHOLE) - WHOLE;
    const floats r = (x - exponent * 0.693359375f) - exponent * -2.12194440e-4f;
    floats power = r * 1.3818296e-3f;
    power = (power + 8.3685322e-3f) * r;
    power = (power + 4.1668292e-2f) * r;
    power = (power + 1.6666523e-1f) * r;
    power = (power + 4.9999994e-1f) * r;
    power = (power + 1.0f) * r;
    power = power + 1.0f;
    const ints shift = (__builtin_convertvector(exponent, ints) + FRACTION_BITS) << 23;
    return (floats)((ints)power + shift);
}

// The lower or the upper half of the lanes as whole numbers, rounded down.
inline sums whole(floats weight, int half) {
    return __builtin_convertvector(load<half_floats>((const char*)&weight + half * sizeof(half_floats)), sums);
}
inline sums widened(ints mask, int half) {
    return __builtin_convertvector(load<half_ints>((const char*)&mask + half * sizeof(half_ints)), sums);
}

inline int64_t sum(sums v) {
    int64_t total = 0;
    for (int i = 0; i < LANES / 2; i++) total += v[i];
    return total;
}

struct Row {
    float* scores;
    int64_t size;

    floats at(int64_t first) const { return scores_at(scores, first, size); }
};

// How much of a row lies at or above each depth; the last entry is all of it.
struct Survey {
    int64_t above[DEPTHS + 1] = {};

    // The lowest score that can be the threshold of `target`.
    float depth_for(int64_t target) const {
        for (int i = 0; i < DEPTHS; i++)
            if (above[i] >= target) return DEPTH[i];
        return MINUS_INF;
    }
};

Survey count(const Row& row) {
    Survey survey;
    for (int64_t first = 0; first < row.size; first += LANES) {
        const floats scores = row.at(first);
        for (int i = DEPTHS - 1; i >= 0; i--) {
            const uint32_t lanes = lanes_of(scores >= DEPTH[i]);
            if (!lanes) break;
            survey.above[i] += __builtin_popcount(lanes);
        }
    }
    survey.above[DEPTHS] = row.size;
    return survey;
}

Survey weigh(const Row& row) {
    sums above[DEPTHS] = {}, all = {};
    for (int64_t first = 0; first < row.size; first += LANES) {
        const floats scores = row.at(first);
        if (!lanes_of(scores >= -32.0f)) continue;
        const floats weight = weight_of(scores);
        const sums low = whole(weight, 0), high = whole(weight, 1);
        all += low + high;
        for (int i = DEPTHS - 1; i >= 0; i--) {
            const ints is_above = scores >= DEPTH[i];
            if (!lanes_of(is_above)) break;
            above[i] += (low & widened(is_above, 0)) + (high & widened(is_above, 1));
        }
    }
    Survey survey;
    for (int i = 0; i < DEPTHS; i++) survey.above[i] = sum(above[i]);
    survey.above[DEPTHS] = sum(all);
    return survey;
}

// A token that may be the last to stay, and its count or weight.
struct Candidate {
    uint32_t image;
    int64_t amount;
};
typedef std::vector<Candidate> Candidates;

// Collects every token at or above `floor`, each with a count of one.
void collect(const Row& row, float floor, Candidates& found) {
    found.clear();
    for (int64_t first = 0; first < row.size; first += LANES) {
        const floats scores = row.at(first);
        uint32_t lanes = lanes_of(scores >= floor);
        if (first + LANES > row.size) lanes &= (1u << (row.size - first)) - 1;
        for (; lanes; lanes &= lanes - 1) found.push_back({image_of(scores[__builtin_ctz(lanes)]), 1});
    }
}

// Drops tokens below `floor`, replaces counts by weights and returns their sum.
int64_t weigh(Candidates& found, float floor) {
    const uint32_t lowest = image_of(floor);
    const auto is_below = [&](const Candidate& candidate) { return candidate.image < lowest; };
    found.erase(std::remove_if(found.begin(), found.end(), is_below), found.end());
    int64_t total = 0;
    for (size_t first = 0; first < found.size(); first += LANES) {
        const size_t count = std::min(found.size() - first, size_t(LANES));
        floats scores = floats{} + MINUS_INF;
        for (size_t i = 0; i < count; i++) scores[i] = score_of(found[first + i].image);
        const floats weight = weight_of(scores);
        for (size_t i = 0; i < count; i++) total += found[first + i].amount = int64_t(weight[i]);
    }
    return total;
}

// The largest score such that the tokens at or above it add up to `target` or more, as all of them together do.
float reaching(Candidates found, int64_t target) {
    uint32_t image = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t amounts[256] = {};
        for (const Candidate& candidate : found) amounts[candidate.image >> shift & 255] += candidate.amount;
        uint32_t digit = 255;
        for (; digit && amounts[digit] < target; digit--) target -= amounts[digit];
        image |= digit << shift;
        const auto is_other = [&](const Candidate& candidate) { return (candidate.image >> shift & 255) != digit; };
        found.erase(std::remove_if(found.begin(), found.end(), is_other), found.end());
    }
    return score_of(image);
}

int64_t mass_target(double top_p, int64_t total) {
    return std::min(std::max(int64_t(std::ceil(top_p * double(total))), int64_t(1)), total);
}

// The lowest score that stays after top-k and top-p.
float floor_of(const Row& row, int64_t top_k, double top_p, Candidates& found) {
    const bool has_top_k = top_k > 0 && top_k < row.size;
    if (!has_top_k) {
        const Survey masses = weigh(row);
        const int64_t target = mass_target(top_p, masses.above[DEPTHS]);
        const float depth = masses.depth_for(target);
        collect(row, depth, found);
        weigh(found, depth);
        return reaching(found, target);
    }
    collect(row, count(row).depth_for(top_k), found);
    const float floor = reaching(found, top_k);
    return top_p < 1 ? reaching(found, mass_target(top_p, weigh(found, floor))) : floor;
}

void cut(const Row& row, float floor) {
    for (int64_t i = 0; i < row.size; i++) row.scores[i] = row.scores[i] < floor ? MINUS_INF : row.scores[i];
}

}  // namespace

// scores [rows, size] fp32; slots [rows] int64, or null: row r's is r; top_k int64, top_p and log_min_p fp64 by slot.
static void top_k_top_p(float* scores, const int64_t* top_k, const double* top_p, const double* log_min_p,
                     const int64_t* slots, int64_t rows, int64_t size, int64_t num_threads) {
    const int team = int(rows * size < 2 * TOKENS_A_THREAD ? 1 : std::min(rows, num_threads));
    parallel_for_dynamic(rows, team, [&](int64_t i) {
        static thread_local Candidates found;
        const int64_t slot = slots ? slots[i] : i;
        if (slot < 0) return;
        const Row row = {scores + i * size, size};
        float floor = float(log_min_p[slot]);
        if ((top_k[slot] > 0 && top_k[slot] < size) || top_p[slot] < 1) {
            const float least = floor_of(row, top_k[slot], top_p[slot], found);
            if (least > floor) floor = least;
        }
        if (floor > MINUS_INF) cut(row, floor);
    });
}
INFERD_EXPORT(top_k_top_p)

// The weight of each score in scores [size], size a multiple of 16. For tests.
static void top_k_top_p_weights(const float* scores, int64_t* weights, int64_t size) {
    for (int64_t first = 0; first < size; first += LANES) {
        const floats weight = weight_of(load<floats>(scores + first));
        for (int i = 0; i < LANES; i++) weights[first + i] = int64_t(weight[i]);
    }
}
INFERD_EXPORT(top_k_top_p_weights)
