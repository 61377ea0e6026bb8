// The first of the largest logits of each row. Each thread takes part of a row: it finds the peak, and then, in its
// cache, where the peak comes first.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/call.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"

namespace {

using namespace lanes;

constexpr int64_t CHUNK = 8192;  // tokens that a thread takes at a time
constexpr float LARGEST = __FLT_MAX__;

struct Peak {
    float value;
    int64_t id;
    bool is_finite;  // no NaN and no +inf
};

Peak peak_of(const float* logits, int64_t first, int64_t end, int64_t size) {
    floats best = floats{} + MINUS_INF;
    ints is_finite = ~ints{};
    for (int64_t i = first; i < end; i += LANES) {
        const floats now = scores_at(logits, i, size);
        best = now > best ? now : best;
        is_finite &= (ints)(now <= LARGEST);
    }
    Peak peak{MINUS_INF, first, true};
    for (int lane = 0; lane < LANES; lane++) {
        peak.value = std::max(peak.value, best[lane]);
        peak.is_finite = peak.is_finite && is_finite[lane];
    }
    for (int64_t i = first; i < end; i += LANES) {
        const uint32_t found = lanes_of((ints)(scores_at(logits, i, size) == peak.value));
        if (found) {
            peak.id = i + __builtin_ctz(found);
            break;
        }
    }
    return peak;
}

}  // namespace

// logits [rows, size] fp32 with `stride` between rows; ids [rows] int64; is_none [rows] bytes.
static void argmax(const float* logits, int64_t* ids, uint8_t* is_none, int64_t rows, int64_t size, int64_t stride,
                   int64_t threads) {
    const int64_t chunks = (size + CHUNK - 1) / CHUNK;
    std::vector<Peak> peaks(rows * chunks);
    const int64_t team = std::max<int64_t>(1, std::min(threads, rows * size / TOKENS_A_THREAD));
    parallel_for(rows * chunks, team, [&](int64_t turn) {
        const int64_t row = turn / chunks, first = turn % chunks * CHUNK;
        peaks[turn] = peak_of(logits + row * stride, first, std::min(size, first + CHUNK), size);
    });
    for (int64_t row = 0; row < rows; row++) {
        const Peak* parts = peaks.data() + row * chunks;
        Peak peak = parts[0];
        for (int64_t chunk = 1; chunk < chunks; chunk++) {
            peak.is_finite = peak.is_finite && parts[chunk].is_finite;
            if (parts[chunk].value > peak.value) peak.value = parts[chunk].value, peak.id = parts[chunk].id;
        }
        is_none[row] = !peak.is_finite || peak.value == MINUS_INF;
        ids[row] = std::min(peak.id, size - 1);
    }
}
INFERD_EXPORT(argmax)
