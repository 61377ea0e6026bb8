// Rows of a matrix, by their numbers. A row that the matrix lacks becomes all ones in its bits: NaN in every float
// type.

#include <cstring>

#include "call.h"

// token_ids [tokens]; weight [ids, stride_bytes]; out [tokens, row_bytes].
static void embed(const int64_t* token_ids, const char* weight, char* out, int64_t num_tokens, int64_t num_ids,
                  int64_t stride_bytes, int64_t row_bytes) {
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t id = token_ids[token];
        if (id >= 0 && id < num_ids)
            std::memcpy(out + token * row_bytes, weight + id * stride_bytes, size_t(row_bytes));
        else
            std::memset(out + token * row_bytes, 0xff, size_t(row_bytes));
    }
}
INFERD_EXPORT(embed)
