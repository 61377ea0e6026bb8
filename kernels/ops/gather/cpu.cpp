// Puts together rows whose parts lie in several processes, through memory that all of them have mapped.
//
// Each process (rank) has two buffers there. In a gather it writes its part to one of them, publishes the gather's
// number, waits until the others have published it too, and copies their parts. The next gather uses the other buffer.
// A rank writes to a buffer again only when all have published the gather after it, and so have read it.
//
// A rank that waits first spins, because the others are about to be ready. Between looks it lets other threads of its
// processor run, of which one may be the rank that it waits for. It moves away from a processor that ran that rank
// last. After a limited time it sleeps.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include <sched.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/call.h"
#include "cpu/processors.h"

namespace {

constexpr auto SPIN = std::chrono::microseconds(200);
constexpr int64_t HEADER = 1 << 14;  // bytes of the states of 128 ranks

// One rank's state, on cache lines of its own. All zeros at first.
struct alignas(128) State {
    std::atomic<uint32_t> published;  // number of the rank's last gather
    std::atomic<uint32_t> sleepers;   // that wait for it
    std::atomic<int32_t> cpu;         // that ran it then
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Numbers wrap around; ranks are at most one gather apart.
inline bool has_come(uint32_t published, uint32_t number) { return int32_t(published - number) >= 0; }

// Sleeps unless `published` has changed since it was `seen`.
void sleep_while(std::atomic<uint32_t>& published, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, &published, FUTEX_WAIT, seen, nullptr, nullptr, 0);
#else
    (void)published, (void)seen;
    sched_yield();
#endif
}

void wake_all(std::atomic<uint32_t>& published) {
#if defined(__linux__)
    syscall(SYS_futex, &published, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)published;
#endif
}

void publish(State& own, uint32_t number) {
    own.cpu.store(current_cpu(), std::memory_order_relaxed);
    own.published.store(number);
    if (own.sleepers.load()) wake_all(own.published);
}

void wait_for(State& other, uint32_t number) {
    const auto is_over = [&] { return has_come(other.published.load(std::memory_order_acquire), number); };
    const auto looks = [&] {
        for (int i = 0; i < 64; i++, pause())
            if (is_over()) return true;
        return false;
    };
    for (int i = 0; i < 8; i++)
        if (looks()) return;
    const int cpu = current_cpu();
    if (cpu >= 0 && cpu == other.cpu.load(std::memory_order_relaxed)) move_away(cpu);
    const auto until = std::chrono::steady_clock::now() + SPIN;
    while (std::chrono::steady_clock::now() < until) {
        sched_yield();
        if (looks()) return;
    }
    other.sleepers.fetch_add(1);
    for (uint32_t seen; !has_come(seen = other.published.load(), number);) sleep_while(other.published, seen);
    other.sleepers.fetch_sub(1);
}

void copy(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows, int64_t bytes) {
    for (int64_t i = 0; i < rows; i++) std::memcpy(to + i * to_stride, from + i * from_stride, size_t(bytes));
}

// shared: a header with the states, then two buffers of `capacity` bytes for each of `count` ranks. part [rows, own bytes],
// with `stride` bytes from row to row, is rank `rank`'s part of out [rows, whole]; rank r has the bytes from r * width on,
// at most `width`. Without `wants` the others' parts are not copied.
void gather(char* shared, int64_t capacity, int64_t rank, int64_t count, const char* part, int64_t stride, char* out,
            int64_t rows, int64_t whole, int64_t width, int64_t wants) {
    State* states = reinterpret_cast<State*>(shared);
    const auto buffer = [&](int64_t of, uint32_t number) {
        return shared + HEADER + (2 * of + (number & 1)) * capacity;
    };
    const auto end_of = [&](int64_t of) { return std::clamp<int64_t>(whole - of * width, 0, width); };
    const int64_t columns = std::min(width, capacity), rows_at_once = capacity / columns;
    for (int64_t row = 0; row < rows; row += rows_at_once)
        for (int64_t column = 0; column < width; column += columns) {
            const int64_t num_rows = std::min(rows_at_once, rows - row);
            const auto bytes = [&](int64_t of) { return std::clamp<int64_t>(end_of(of) - column, 0, columns); };
            const uint32_t number = states[rank].published.load(std::memory_order_relaxed) + 1;
            const char* from = part + row * stride + column;
            char* to = out + row * whole + column;
            copy(from, stride, buffer(rank, number), columns, num_rows, bytes(rank));
            publish(states[rank], number);
            if (wants) copy(from, stride, to + rank * width, whole, num_rows, bytes(rank));
            for (int64_t of = 0; of < count; of++) {
                if (of == rank) continue;
                wait_for(states[of], number);
                if (wants) copy(buffer(of, number), columns, to + of * width, whole, num_rows, bytes(of));
            }
        }
}

}  // namespace

INFERD_EXPORT(gather)
