// Copies the rows of one part to their columns in the joined matrix.

#include <cstring>

#include "cpu/call.h"

// x: num_rows rows of row_bytes, x_stride_bytes apart; out: the part's first byte in the first of num_rows rows of
// stride_bytes.
static void join(const void* x, int64_t x_stride_bytes, int64_t row_bytes, int64_t num_rows, void* out,
                 int64_t stride_bytes) {
    for (int64_t row = 0; row < num_rows; ++row)
        std::memcpy(static_cast<char*>(out) + row * stride_bytes, static_cast<const char*>(x) + row * x_stride_bytes,
                    size_t(row_bytes));
}
INFERD_EXPORT(join)
