// Repeats recorded calls of kernels in order: see `tape.py`.

#include "cpu/call.h"

namespace {

struct Call {
    void (*kernel)(const call::Argument*);
    const call::Argument* arguments;
};

void replay(const Call* calls, int64_t num_calls) {
    for (int64_t i = 0; i < num_calls; i++) calls[i].kernel(calls[i].arguments);
}

}  // namespace

INFERD_EXPORT(replay)
