// The processor that runs a thread, and the way to another one. The system may take a tenth of a second to move one of
// two threads that spin on one processor.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

// The processor that runs this thread; -1 if unknown.
inline int current_cpu() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// Moves this thread to another processor than `cpu`, if it may use one, and lets the system move it again later.
inline void move_away(int cpu) {
#if defined(__linux__)
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    others = allowed;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
#else
    (void)cpu;
#endif
}
