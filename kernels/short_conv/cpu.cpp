// Causal convolution over W tokens, channel by channel. A thread takes some channels of a row through all its tokens,
// so each channel's sum is one chain from the oldest input to the newest, and its state has one writer.

#include "call.h"
#include "parallel.h"
#include "simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 16384;
constexpr int64_t CHANNELS = 64;  // a piece of work: 128 bytes or more of each token

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

// The channels `channel` .. `channel` + count - 1 of a row.
template <int W, class T>
void convolve(const Problem& p, int64_t row, int64_t channel, int count) {
    const int64_t first = p.query_start[row], end = p.query_start[row + 1], size = p.num_channels;
    T* state = static_cast<T*>(p.state) + p.slots[row] * (W - 1) * size + channel;
    const T* x = static_cast<const T*>(p.x) + channel;
    const auto gate = [&](const void* gates, int64_t token) {
        return load_some(static_cast<const T*>(gates) + token * p.stride + channel, count);
    };
    T* out = static_cast<T*>(p.out) + channel;
    const vf bias = p.bias ? load_some(p.bias + channel, count) : vf{};
    vf weight[W], inputs[W] = {};
    for (int j = 0; j < W; j++) weight[j] = load_some(p.weight + j * size + channel, count);
    if (p.positions[first])
        for (int j = 0; j < W - 1; j++) inputs[j] = load_some(state + j * size, count);
    for (int64_t token = first; token < end; token++) {
        inputs[W - 1] = load_some(x + token * p.stride, count);
        if (p.before) inputs[W - 1] = rounded<T>(inputs[W - 1] * gate(p.before, token), count);
        vf sum = inputs[0] * weight[0];
        for (int j = 1; j < W; j++) sum = mul_add(inputs[j], weight[j], sum);
        if (p.bias) sum += bias;
        if (p.has_silu) sum = sum / (1.0f + exp(-sum));
        if (p.behind) sum = sum * gate(p.behind, token);
        store_some(out + token * size, sum, count);
        for (int j = 0; j < W - 1; j++) inputs[j] = inputs[j + 1];
    }
    for (int j = 0; j < W - 1; j++) store_some(state + j * size, inputs[j], count);
}

template <int W, class T>
void run(const Problem& p, int64_t num_rows, int64_t num_tokens, int64_t num_threads) {
    const int64_t size = p.num_channels, pieces = (size + CHANNELS - 1) / CHANNELS;
    const int team = int(num_tokens * size < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    parallel_for(num_rows * pieces, team, [&](int64_t piece) {
        const int64_t row = piece / pieces, begin = piece % pieces * CHANNELS;
        if (p.query_start[row] == p.query_start[row + 1]) return;
        for (int64_t channel = begin; channel < begin + CHANNELS && channel < size; channel += LANES)
            convolve<W, T>(p, row, channel, int(size - channel < LANES ? size - channel : LANES));
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
                       void* state, const int32_t* query_start, const int64_t* positions, const int64_t* slots, void* out, int64_t num_rows, int64_t num_tokens,
                       int64_t num_channels, int64_t stride, int64_t width, int64_t has_silu, int64_t dtype,
                       int64_t num_threads) {
    const Problem p{x, before, behind, weight, bias, state, query_start, positions, slots, out, num_channels, stride, has_silu != 0};
    if (dtype == 0) run_width<float>(p, width, num_rows, num_tokens, num_threads);
    else run_width<bf16>(p, width, num_rows, num_tokens, num_threads);
}
INFERD_EXPORT(short_conv)
