// Loops that threads share. Their turns may run in any order and at the same time.
#pragma once

#include <cstdint>

// Calls body(i) for each i in 0 .. count - 1, on up to `threads` threads. Each takes one stretch of them.
template <class Body>
inline void parallel_for(int64_t count, int64_t threads, const Body& body) {
#pragma omp parallel for schedule(static) num_threads(int(threads)) if (threads > 1 && count > 1)
    for (int64_t i = 0; i < count; i++) body(i);
}

// The same for turns of unequal length: a thread takes one at a time, in order.
template <class Body>
inline void parallel_for_dynamic(int64_t count, int64_t threads, const Body& body) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads)) if (threads > 1 && count > 1)
    for (int64_t i = 0; i < count; i++) body(i);
}
