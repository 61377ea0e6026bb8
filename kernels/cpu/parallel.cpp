// The threads that share the loops of kernels, and how they meet.
//
// A step has hundreds of short loops, so a thread that waits first spins: a loop then begins and ends within a
// microsecond. It spins for a limited time and sleeps after that, so an idle process takes no processor time.
//
// A loop is cut into pieces. Each thread has a range of them, takes the pieces of its range first, and then those that
// others have not begun. So nobody waits for a thread that sleeps or that the system does not run: the others do its
// work. The caller waits only for pieces that have been begun. Which thread runs a piece changes no result.
//
// One loop is shared at a time. A loop that is called inside another, or by another thread at the same time, runs on
// its caller alone.

#include "cpu/parallel.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "cpu/call.h"
#include "cpu/processors.h"

namespace {

constexpr int64_t PIECES_A_THREAD = 4;
constexpr int64_t MAX_PIECES = 1 << 15;
constexpr int MAX_THREADS = 256;
constexpr auto SPIN = std::chrono::microseconds(100);

// That this process may use, when the library is loaded.
const int NUM_CPUS = int(std::thread::hardware_concurrency());

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Loop {
    parallel::Turns turns;
    const void* body;
    int64_t count;
    int32_t num_pieces, num_threads;

    void run(int64_t piece) const {
        turns(body, piece * count / num_pieces, (piece + 1) * count / num_pieces);
    }
};

// A range of pieces that nobody has taken yet: the loop's number, the next piece and the end, in one word.
inline uint64_t pack(uint32_t number, int64_t next, int64_t end) {
    return uint64_t(number) << 32 | uint64_t(next) << 16 | uint64_t(end);
}
inline uint32_t number_of(uint64_t range) { return uint32_t(range >> 32); }

// One thread's part of a loop, on cache lines of its own.
struct alignas(128) Part {
    std::atomic<uint64_t> range{0};
    Loop loop{};

    // Takes a piece of loop `number`; -1 if none is left or that loop has ended.
    int64_t take(uint32_t number) {
        uint64_t now = range.load(std::memory_order_acquire);
        while (number_of(now) == number) {
            const int64_t next = int64_t(now >> 16 & 0xffff), end = int64_t(now & 0xffff);
            if (next == end) return -1;
            if (range.compare_exchange_weak(now, now + (1 << 16), std::memory_order_acq_rel)) return next;
        }
        return -1;
    }
};

class Pool {
  public:
    bool begin() { return !is_busy_.exchange(true, std::memory_order_acquire); }
    void end() { is_busy_.store(false, std::memory_order_release); }

    // The caller has called `begin`.
    void run(Loop loop, bool in_order) {
        add_threads(loop.num_threads);
        number_++, num_loops_++;
        expected_ += loop.num_pieces;
        num_parts_.store(loop.num_threads, std::memory_order_relaxed);
        caller_cpu_.store(current_cpu(), std::memory_order_relaxed);
        for (int i = loop.num_threads - 1; i >= 0; i--) {
            const int64_t first = in_order ? i > 0 ? loop.num_pieces : 0 : share(loop, i);
            const int64_t end = in_order ? loop.num_pieces : share(loop, i + 1);
            parts_[i].loop = loop;
            parts_[i].range.store(pack(number_, first, end), std::memory_order_release);
        }
        take_part(0, number_, [this] { wake(); });
        wait_for_others();
    }

    void counts(int64_t* out) const {
        out[0] = num_loops_, out[1] = num_naps_, out[2] = num_waits_, out[3] = num_moves_, out[4] = num_threads_ - 1;
    }

  private:
    Part parts_[MAX_THREADS];  // of the calling thread, then of the others
    alignas(128) std::atomic<uint64_t> ended_{0};  // pieces, of all loops so far
    alignas(128) std::atomic<int> num_parts_{0};
    std::atomic<int> caller_cpu_{-1}, num_asleep_{0};
    std::atomic<bool> is_caller_asleep_{false}, is_busy_{false};
    std::atomic<int64_t> num_naps_{0}, num_waits_{0}, num_moves_{0};
    std::mutex mutex_;
    std::condition_variable loop_begins_, loop_ends_;
    uint64_t expected_ = 0;
    uint32_t number_ = 0;
    int64_t num_loops_ = 0;
    std::atomic<int> num_threads_{1};

    static int64_t share(const Loop& loop, int64_t thread) { return loop.num_pieces * thread / loop.num_threads; }

    // Runs pieces until none is left. `once` is called after the first, or if there is none.
    template <class Once>
    void take_part(int self, uint32_t number, Once once) {
        const int num_parts = num_parts_.load(std::memory_order_relaxed);
        bool is_first = true;
        for (int i = 0; i < num_parts; i++) {
            Part& part = parts_[(self + i) % num_parts];
            int64_t num_taken = 0;
            for (int64_t piece; (piece = part.take(number)) >= 0; num_taken++) {
                parts_[self].loop.run(piece);  // until its pieces have ended, the loop stays
                if (is_first) once();
                is_first = false;
            }
            if (num_taken) finish(num_taken);
        }
        if (is_first) once();
    }

    void finish(int64_t num_pieces) {
        ended_.fetch_add(uint64_t(num_pieces));
        if (!is_caller_asleep_.load()) return;
        std::lock_guard<std::mutex> lock(mutex_);
        loop_ends_.notify_one();
    }

    // Spins until `is_over` or the time is up; returns whether it is over. With more threads than processors it looks
    // only briefly, because a thread that spins keeps another from its work.
    template <class Over>
    bool spin(Over is_over) const {
        const auto looks = [&] {
            for (int i = 0; i < 64; i++, pause())
                if (is_over()) return true;
            return false;
        };
        if (looks()) return true;
        if (num_threads_.load(std::memory_order_relaxed) > NUM_CPUS) return false;
        const auto until = std::chrono::steady_clock::now() + SPIN;
        while (std::chrono::steady_clock::now() < until)
            if (looks()) return true;
        return false;
    }

    void wait_for_others() {
        const auto is_over = [this] { return ended_.load(std::memory_order_acquire) == expected_; };
        if (is_over() || spin(is_over)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        num_waits_++;
        is_caller_asleep_.store(true);
        loop_ends_.wait(lock, [this] { return ended_.load() == expected_; });
        is_caller_asleep_.store(false);
    }

    void wake() {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (num_asleep_.load() == 0) return;
        { std::lock_guard<std::mutex> lock(mutex_); }
        loop_begins_.notify_all();
    }

    [[noreturn]] void work(int self) {
        Part& part = parts_[self];
        uint32_t seen = 0;
        const auto has_begun = [&] { return number_of(part.range.load(std::memory_order_acquire)) != seen; };
        for (;;) {
            leave_callers_cpu();
            if (!spin(has_begun)) {
                std::unique_lock<std::mutex> lock(mutex_);
                num_naps_++, num_asleep_++;
                loop_begins_.wait(lock, [&] { return number_of(part.range.load()) != seen; });
                num_asleep_--;
            }
            seen = number_of(part.range.load(std::memory_order_acquire));
            take_part(self, seen, [] {});
        }
    }

    // New threads start on the caller's processor, and the system may take a tenth of a second to move one of two that
    // spin there.
    void leave_callers_cpu() {
        const int cpu = current_cpu();
        if (cpu < 0 || cpu != caller_cpu_.load(std::memory_order_relaxed)) return;
        move_away(cpu);
        num_moves_++;
    }

    // Threads take no signals: the process has a thread of its own that answers them.
    void add_threads(int needed) {
        if (num_threads_ >= needed) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (; num_threads_ < needed; num_threads_++) std::thread(&Pool::work, this, num_threads_.load()).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
};

// Never freed: its threads run until the process ends.
std::atomic<Pool*> pool{nullptr};

// A child of fork() has none of the threads, and gets a pool of its own.
const int forks_are_seen = pthread_atfork(nullptr, nullptr, [] { pool = nullptr; });

Pool& get_pool() {
    static std::mutex mutex;
    if (pool.load() == nullptr) {
        std::lock_guard<std::mutex> lock(mutex);
        if (pool.load() == nullptr) pool = new Pool;
    }
    return *pool.load();
}

}  // namespace

void parallel::run(Turns turns, const void* body, int64_t count, int64_t threads, bool in_order) {
    Pool& shared = get_pool();
    if (!shared.begin()) return turns(body, 0, count);
    const int64_t num_threads = std::min({threads, count, int64_t(MAX_THREADS)});
    const int64_t num_pieces = std::min({count, MAX_PIECES, in_order ? MAX_PIECES : PIECES_A_THREAD * num_threads});
    shared.run({turns, body, count, int32_t(num_pieces), int32_t(num_threads)}, in_order);
    shared.end();
}

// counts [5]: loops that were shared; times that a thread fell asleep, that a caller did, and that a thread moved to
// another processor; threads besides the caller. For tests and measurements.
static void parallel_counts(int64_t* counts) { get_pool().counts(counts); }
INFERD_EXPORT(parallel_counts)
