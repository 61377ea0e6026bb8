// RMS norm of each head (optional, of v without weights), rotation of q and k by their positions, and the write of k and v into the paged
// pool: one pass over a token's heads, in fp32, rounded once. In a pool of 8 bits each group of a head has a scale.

#include <cmath>
#include <cstdlib>

#include "cpu/call.h"
#include "cpu/kv_numbers.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace {

using namespace simd;

constexpr int64_t ELEMENTS_A_THREAD = 32768;
constexpr int64_t MAX_HEAD_DIM = 512;

template <class T>
void widen_head(const T* from, float* to, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(from + i));
    if (i < size) store_part(to + i, load_part(from + i, int(size - i)), int(size - i));
}

template <class T>
void narrow_head(const float* from, T* to, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(from + i));
    if (i < size) store_part(to + i, load_part(from + i, int(size - i)), int(size - i));
}

float find_scale(const float* head, int64_t size, float eps) {
    vf squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares = squares + load(head + i) * load(head + i);
    if (i < size) {
        vf v = load_part(head + i, int(size - i));
        squares = squares + v * v;
    }
    return 1.0f / std::sqrt(sum(squares) / float(size) + eps);
}

template <class W>
void normalise(float* head, const W* weight, int64_t size, float eps) {
    const float scale = find_scale(head, size, eps);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(head + i, load(head + i) * scale * load(weight + i));
    if (i < size) {
        const int left = int(size - i);
        store_part(head + i, load_part(head + i, left) * scale * load_part(weight + i, left), left);
    }
}

// Rotates the pairs (head[i], head[i + half]) by the angle of column i.
void rotate(float* head, const float* cos_sin, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf c = load(cos_sin + i), s = load(cos_sin + half + i), first = load(head + i), second = load(head + half + i);
        store(head + i, first * c - second * s);
        store(head + half + i, second * c + first * s);
    }
    for (; i < half; i++) {
        float c = cos_sin[i], s = cos_sin[half + i], first = head[i], second = head[half + i];
        head[i] = first * c - second * s;
        head[half + i] = second * c + first * s;
    }
}

struct Problem {
    const void *q, *k, *v;
    const float* cos_sin;
    const int64_t *positions, *write_slots;
    void* kv;
    bf16* kv_scales;  // [blocks, 2, G, block_size, groups], or null: the pool has the heads' dtype
    void* out;
    const void *q_norm, *k_norm;
    const float* smoothing;  // factors of q and then of k, [2, KV heads that q reads, D], or null
    int64_t num_tokens, num_heads, num_kv_heads;
    int64_t num_sharing;  // heads of q that share a KV head; only with smoothing
    int64_t head_dim, rotary_dim, block_size;
    int64_t q_stride, k_stride, v_stride;  // elements from token to token
    int64_t q_head_stride;                 // elements from head to head; those of k and v lie side by side
    int64_t kv_stride, scale_stride;       // elements from block to block
    float eps;
    int64_t norms_v;    // whether each head of v is divided by its RMS
    int64_t kv_format;  // as in kv_numbers.h; 0: K and V have the heads' type
};

template <int N, class T>
inline void load_head(const T* from, vf* head) {
    for (int i = 0; i < N; i++) head[i] = load(from + i * LANES);
}

// 1 / rms of up to 16 heads of N vectors, `stride` elements from one to the next. All are computed first, so that no head waits for its own square root.
template <int N, class T>
inline void find_scales(const T* from, int64_t stride, int num_heads, float eps, float* scales) {
    float mean[LANES] = {};
    for (int h = 0; h < num_heads; h++) {
        vf head[N], squares = {};
        load_head<N>(from + h * stride, head);
        for (int i = 0; i < N; i++) squares = squares + head[i] * head[i];
        mean[h] = sum(squares) / float(N * LANES);
    }
    for (int h = 0; h < LANES; h++) scales[h] = 1.0f / std::sqrt(mean[h] + eps);
}

// Heads of N whole vectors that rotate whole; each stays in registers from its load to its store.
template <int N, class T, class O, class W>
void turn_heads(const T* from, O* to, int64_t num_heads, int64_t from_stride, int64_t to_stride, const W* norm,
                const float* cos_sin, float eps) {
    vf angles[N], weight[N];
    load_head<N>(cos_sin, angles);
    if (norm) load_head<N>(norm, weight);
    float scales[LANES];
    for (int64_t h = 0; h < num_heads; h++, from += from_stride, to += to_stride) {
        const int64_t left = num_heads - h;
        if (norm && h % LANES == 0) find_scales<N>(from, from_stride, int(left < LANES ? left : LANES), eps, scales);
        vf head[N];
        load_head<N>(from, head);
        if (norm)
            for (int i = 0; i < N; i++) head[i] = head[i] * scales[h % LANES] * weight[i];
        for (int i = 0; i < N / 2; i++) {
            const vf first = head[i], second = head[N / 2 + i], c = angles[i], s = angles[N / 2 + i];
            store(to + i * LANES, first * c - second * s);
            store(to + (N / 2 + i) * LANES, second * c + first * s);
        }
    }
}

// Heads of any size, through a buffer.
template <class T, class O, class W>
void turn_any_heads(const Problem& p, const T* from, O* to, int64_t num_heads, int64_t from_stride, int64_t to_stride,
                    const W* norm, const float* cos_sin) {
    float head[MAX_HEAD_DIM];
    for (int64_t h = 0; h < num_heads; h++) {
        widen_head(from + h * from_stride, head, p.head_dim);
        if (norm) normalise(head, norm, p.head_dim, p.eps);
        rotate(head, cos_sin, p.rotary_dim / 2);
        narrow_head(head, to + h * to_stride, p.head_dim);
    }
}

// A value of fp32 in a buffer, normed if the model norms its values.
template <class T>
void widen_value(const Problem& p, const T* from, float* to, int64_t size) {
    widen_head(from, to, size);
    if (!p.norms_v) return;
    const float scale = find_scale(to, size, p.eps);
    for (int64_t i = 0; i < size; i++) to[i] *= scale;
}

// Multiplies a head by powers of two, so the order of this and a rounding does not matter.
template <class T>
void smooth(T* head, const float* factors, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(head + i, load(head + i) * load(factors + i));
    if (i < size) {
        const int left = int(size - i);
        store_part(head + i, load_part(head + i, left) * load_part(factors + i, left), left);
    }
}

// N: vectors in a head; 0 for heads of any size.
template <int N, class T, class W>
void run_token(const Problem& p, int64_t token) {
    const float* cos_sin = p.cos_sin + p.positions[token] * p.rotary_dim;
    const int64_t size = N ? N * LANES : p.head_dim;
    auto turn = [&](const T* from, auto* to, int64_t num_heads, int64_t from_stride, int64_t to_stride,
                    const void* norm) {
        const W* weight = static_cast<const W*>(norm);
        if constexpr (N > 0)
            turn_heads<N>(from, to, num_heads, from_stride, to_stride, weight, cos_sin, p.eps);
        else
            turn_any_heads(p, from, to, num_heads, from_stride, to_stride, weight, cos_sin);
    };
    const int64_t block = p.write_slots[token] / p.block_size, offset = p.write_slots[token] % p.block_size;
    const T* k = static_cast<const T*>(p.k) + token * p.k_stride;
    const T* v = static_cast<const T*>(p.v) + token * p.v_stride;
    T* out = static_cast<T*>(p.out) + token * p.num_heads * size;
    turn(static_cast<const T*>(p.q) + token * p.q_stride, out, p.num_heads, p.q_head_stride, size, p.q_norm);
    if (p.smoothing)
        for (int64_t h = 0; h < p.num_heads; h++)
            smooth(out + h * size, p.smoothing + h / p.num_sharing * size, size);
    const int64_t plane = p.block_size * size, heads = p.num_kv_heads, place = block * p.kv_stride + offset * size;
    float head[MAX_HEAD_DIM];
    if (!p.kv_format) {
        T* keys = static_cast<T*>(p.kv) + place;
        T* values = keys + heads * plane;
        turn(k, keys, heads, size, plane, p.k_norm);
        for (int64_t h = 0; h < heads; h++) {
            if (p.smoothing) smooth(keys + h * plane, p.smoothing + (heads + h) * size, size);
            if (p.norms_v) {
                widen_value(p, v + h * size, head, size);
                narrow_head(head, values + h * plane, size);
            } else {
                std::memcpy(values + h * plane, v + h * size, size * sizeof(T));
            }
        }
        return;
    }
    const int64_t num_scales = num_kv_groups(size), scales = block * p.scale_stride + offset * num_scales;
    for (int64_t h = 0; h < 2 * heads; h++) {
        if (h < heads) {
            turn(k + h * size, head, 1, size, size, p.k_norm);
            if (p.smoothing) smooth(head, p.smoothing + (heads + h) * size, size);
        } else widen_value(p, v + (h - heads) * size, head, size);
        QUANTIZE[p.kv_format](head, static_cast<char*>(p.kv) + place + h * plane,
                              p.kv_scales + scales + h * p.block_size * num_scales, size);
    }
}

template <int N, class T, class W>
void run_tokens(const Problem& p, int64_t num_threads) {
    const int64_t elements = p.num_tokens * (p.num_heads + p.num_kv_heads) * p.head_dim;
    const int team = int(elements < 2 * ELEMENTS_A_THREAD ? 1 : num_threads);
    parallel_for(p.num_tokens, team, [&](int64_t token) { run_token<N, T, W>(p, token); });
}

template <class T, class W>
void run(const Problem& p, int64_t num_threads) {
    const int64_t size = p.head_dim == p.rotary_dim ? p.head_dim : 0;
    if (size == 64)
        run_tokens<64 / LANES, T, W>(p, num_threads);
    else if (size == 128)
        run_tokens<128 / LANES, T, W>(p, num_threads);
    else if (size == 256)
        run_tokens<256 / LANES, T, W>(p, num_threads);
    else
        run_tokens<0, T, W>(p, num_threads);
}

}  // namespace

// Arguments as in the Python signature; dtypes 0: fp32, 1: bfloat16. kv_format 0: that of q; else as in kv_numbers.h.
static void rope_and_cache(const void* q, const void* k, const void* v, const float* cos_sin,
                           const int64_t* positions, const int64_t* write_slots, void* kv, void* kv_scales, void* out,
                           const void* q_norm, const void* k_norm, const float* smoothing, int64_t num_tokens,
                           int64_t num_heads, int64_t num_kv_heads, int64_t num_sharing, int64_t head_dim, int64_t rotary_dim, int64_t block_size,
                           int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t q_head_stride,
                           int64_t kv_stride, int64_t scale_stride, float eps, int64_t norms_v, int64_t dtype,
                           int64_t norm_dtype, int64_t kv_format, int64_t num_threads) {
    Problem p{q, k, v, cos_sin, positions, write_slots, kv, static_cast<bf16*>(kv_scales), out, q_norm, k_norm,
              smoothing, num_tokens, num_heads, num_kv_heads, num_sharing, head_dim, rotary_dim, block_size,
              q_stride, k_stride, v_stride, q_head_stride, kv_stride, scale_stride, eps, norms_v, kv_format};
    if (dtype == 0)
        run<float, float>(p, num_threads);
    else if (norm_dtype == 0)
        run<bf16, float>(p, num_threads);
    else
        run<bf16, bf16>(p, num_threads);
}
INFERD_EXPORT(rope_and_cache)
