// Loops that threads share: `parallel_for` and `parallel_for_dynamic`. Turns may run in any order and at the same time.
// The calling thread takes part, and returns when all turns have ended. See parallel.cpp.
#pragma once

#include <cstdint>

namespace parallel {

// Runs the turns begin .. end - 1 of a loop.
using Turns = void (*)(const void* body, int64_t begin, int64_t end);

// Shares `count` turns among up to `threads` threads. Turns that lie side by side go to one thread, unless `in_order`:
// then each thread takes the next when it has ended one.
void run(Turns turns, const void* body, int64_t count, int64_t threads, bool in_order);

template <class Body>
inline void share(int64_t count, int64_t threads, bool in_order, const Body& body) {
    const Turns turns = [](const void* of, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) (*static_cast<const Body*>(of))(i);
    };
    if (threads > 1 && count > 1)
        run(turns, &body, count, threads, in_order);
    else
        turns(&body, 0, count);
}

}  // namespace parallel

// Calls body(i) for each i in 0 .. count - 1, on up to `threads` threads: for turns of equal length.
template <class Body>
inline void parallel_for(int64_t count, int64_t threads, const Body& body) {
    parallel::share(count, threads, false, body);
}

// The same for turns of unequal length, the longest first.
template <class Body>
inline void parallel_for_dynamic(int64_t count, int64_t threads, const Body& body) {
    parallel::share(count, threads, true, body);
}
