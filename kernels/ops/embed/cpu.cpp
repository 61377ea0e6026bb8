// Rows of a matrix, by their numbers, copied or widened to fp32. A row that the matrix lacks becomes all ones in its
// bits: NaN in every float type.

#include <cstring>

#include "cpu/call.h"
#include "cpu/simd.h"

template <class W>
static void widen(const char* row, char* out, int64_t size) {
    const W* from = reinterpret_cast<const W*>(row);
    float* to = reinterpret_cast<float*>(out);
    for (int64_t i = 0; i < size; i++) to[i] = simd::to_float(from[i]);
}

// token_ids [tokens]; weight [ids, stride_bytes]; out [tokens, row_bytes], or twice as wide if rows of bfloat16 (1) or
// fp16 (2) are widened.
static void embed(const int64_t* token_ids, const char* weight, char* out, int64_t num_tokens, int64_t num_ids,
                  int64_t stride_bytes, int64_t row_bytes, int64_t widened) {
    const int64_t out_bytes = widened ? 2 * row_bytes : row_bytes;
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t id = token_ids[token];
        char* place = out + token * out_bytes;
        if (id < 0 || id >= num_ids)
            std::memset(place, 0xff, size_t(out_bytes));
        else if (widened == 1)
            widen<simd::bf16>(weight + id * stride_bytes, place, row_bytes / 2);
        else if (widened == 2)
            widen<simd::fp16>(weight + id * stride_bytes, place, row_bytes / 2);
        else
            std::memcpy(place, weight + id * stride_bytes, size_t(row_bytes));
    }
}
INFERD_EXPORT(embed)
