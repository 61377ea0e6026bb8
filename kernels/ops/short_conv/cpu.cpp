// Causal convolution over W tokens, channel by channel. A thread takes some channels of a row through all its tokens,
// so each channel's sum is one chain from the oldest input to the newest, and its state has one writer.

#include <algorithm>

#include "cpu/call.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 16384;
constexpr int64_t CHANNELS = 64;  // a piece of work: 128 bytes or more of each token
constexpr int TOGETHER = 2;  // vectors of channels: a cache line of 16-bit numbers

struct Problem {
    const void* x;
    const void* before;  // gates, or null
    const void* behind;
    const float* weight;
    const float* bias;  // or null
    void* state;
    const int32_t* query_start;
    const int64_t* positions;
    const int64_t* slots;
    const int32_t* num_kept;  // or null: all tokens
    void* out;
    int64_t num_channels, stride;
    bool has_silu;
};

template <class T>
inline vf load_some(const T* p, int count) {
    return count == LANES ? load(p) : load_part(p, count);
}
template <class T>
inline void store_some(T* p, vf v, int count) {
    if (count == LANES) store(p, v);
    else store_part(p, v, count);
}

// As T holds it: a product is an input of later steps too, which find it in the state.
template <class T>
inline vf rounded(vf v, int count) {
    T kept[LANES];
    store_some(kept, v, count);
    return load_some(kept, count);
}

// V vectors of a row's channels, from `channel` on. The last one has `count` of them.
template <int W, int V, class T>
void convolve(const Problem& p, int64_t row, int64_t channel, int count) {
    const int64_t first = p.query_start[row], end = p.query_start[row + 1], size = p.num_channels;
    T* state = static_cast<T*>(p.state) + p.slots[row] * (W - 1) * size + channel;
    const T* x = static_cast<const T*>(p.x) + channel;
    const auto part = [&](int v) { return v < V - 1 ? LANES : count; };
    const auto gate = [&](const void* gates, int64_t token, int v) {
        return load_some(static_cast<const T*>(gates) + token * p.stride + channel + v * LANES, part(v));
    };
    T* out = static_cast<T*>(p.out) + channel;
    vf weight[W][V], inputs[W][V] = {};
    for (int j = 0; j < W; j++)
        for (int v = 0; v < V; v++) weight[j][v] = load_some(p.weight + j * size + channel + v * LANES, part(v));
    if (p.positions[first])
        for (int j = 0; j < W - 1; j++)
            for (int v = 0; v < V; v++) inputs[j][v] = load_some(state + j * size + v * LANES, part(v));
    const int64_t last = (p.num_kept ? first + p.num_kept[row] : end) - 1;
    for (int64_t token = first; token < end; token++)
        for (int v = 0; v < V; v++) {
            inputs[W - 1][v] = load_some(x + token * p.stride + v * LANES, part(v));
            if (p.before) inputs[W - 1][v] = rounded<T>(inputs[W - 1][v] * gate(p.before, token, v), part(v));
            vf sum = inputs[0][v] * weight[0][v];
            for (int j = 1; j < W; j++) sum = mul_add(inputs[j][v], weight[j][v], sum);
            if (p.bias) sum += load_some(p.bias + channel + v * LANES, part(v));
            if (p.has_silu) sum = sum / (1.0f + exp(-sum));
            if (p.behind) sum = sum * gate(p.behind, token, v);
            store_some(out + token * size + v * LANES, sum, part(v));
            for (int j = 0; j < W - 1; j++) inputs[j][v] = inputs[j + 1][v];
            if (token == last)
                for (int j = 0; j < W - 1; j++) store_some(state + j * size + v * LANES, inputs[j][v], part(v));
        }
}

template <int W, class T>
void run(const Problem& p, int64_t num_rows, int64_t num_tokens, int64_t num_threads) {
    const int64_t size = p.num_channels, pieces = (size + CHANNELS - 1) / CHANNELS;
    const int team = int(num_tokens * size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    parallel_for(num_rows * pieces, team, [&](int64_t piece) {
        const int64_t row = piece / pieces, end = std::min(size, (piece % pieces + 1) * CHANNELS);
        if (p.query_start[row] == p.query_start[row + 1] || p.slots[row] < 0) return;
        int64_t channel = piece % pieces * CHANNELS;
        for (; channel + TOGETHER * LANES <= end; channel += TOGETHER * LANES)
            convolve<W, TOGETHER, T>(p, row, channel, LANES);
        for (; channel < end; channel += LANES)
            convolve<W, 1, T>(p, row, channel, int(std::min<int64_t>(LANES, end - channel)));
    });
}

template <class T>
void run_width(const Problem& p, int64_t width, int64_t num_rows, int64_t num_tokens, int64_t num_threads) {
    if (width == 2) run<2, T>(p, num_rows, num_tokens, num_threads);
    if (width == 3) run<3, T>(p, num_rows, num_tokens, num_threads);
    if (width == 4) run<4, T>(p, num_rows, num_tokens, num_threads);
}

}  // namespace

// x and the gates `before` and `behind`, or null, [tokens, channels] with `stride` elements from token to token; weight [width, channels] fp32; bias [channels] fp32,
// or null; state [slots, width - 1, channels]; query_start [rows + 1]; positions [tokens]; slots [rows]; out [tokens, channels]. dtypes 0: fp32, 1:
// bfloat16.
static void short_conv(const void* x, const void* before, const void* behind, const float* weight, const float* bias,
                       void* state, const int32_t* query_start, const int64_t* positions, const int64_t* slots,
                       const int32_t* num_kept, void* out, int64_t num_rows, int64_t num_tokens,
                       int64_t num_channels, int64_t stride, int64_t width, int64_t has_silu, int64_t dtype,
                       int64_t num_threads) {
    const Problem p{x, before, behind, weight, bias, state, query_start, positions, slots, num_kept, out, num_channels, stride, has_silu != 0};
    if (dtype == 0) run_width<float>(p, width, num_rows, num_tokens, num_threads);
    else run_width<bf16>(p, width, num_rows, num_tokens, num_threads);
}
INFERD_EXPORT(short_conv)
