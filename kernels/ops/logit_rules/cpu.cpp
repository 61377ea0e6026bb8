// The rules of each row, a tile of the vocabulary at a time: the tile stays in the first cache between the rules.

#include <algorithm>
#include <cstdint>

#include "cpu/call.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"

namespace {

constexpr int BIASED = 1, MARKED = 2, WORDED = 4;
constexpr int32_t PROMPT = 1 << 30, ENDS = INT32_MIN;
constexpr int SOUND = 1, UNSOUND = 2, FAILED = -1, EMPTY = -2;  // as in state.py
constexpr int64_t TILE = 2048;
constexpr float INF = __builtin_inff();

struct Penalties {
    float repetition, presence, frequency;
};

// Whether the tile holds a number above -inf, and whether it holds NaN or +inf.
void survey(const float* logits, int64_t size, bool& has_number, bool& has_fault) {
    int32_t numbers = 0, faults = 0;
    for (int64_t i = 0; i < size; i++) {
        numbers |= logits[i] > -INF;
        faults |= !(logits[i] < INF);
    }
    has_number |= numbers != 0, has_fault |= faults != 0;
}

void add(float* logits, const float* bias, int64_t size) {
    for (int64_t i = 0; i < size; i++) logits[i] += bias[i];
}

void penalise(float* logits, const int32_t* marks, int64_t size, Penalties penalties, bool is_too_early) {
    for (int64_t i = 0; i < size; i++) {
        const int32_t mark = marks[i], count = mark & (PROMPT - 1);
        const float before = logits[i];
        const float repeated = before > 0 ? before / penalties.repetition : before * penalties.repetition;
        float value = (mark & ~ENDS) != 0 ? repeated : before;
        value -= float(count) * penalties.frequency;
        value -= (count > 0 ? 1.0f : 0.0f) * penalties.presence;
        logits[i] = mark < 0 && is_too_early ? -INF : value;
    }
}

// Forbids the last token of each word [words, length] whose other tokens are the newest ones.
void forbid_words(float* logits, const int32_t* prefixes, const int32_t* last_ids, const int32_t* tail, int64_t words,
                  int64_t length, int64_t position) {
    for (int64_t w = 0; w < words; w++) {
        bool is_due = last_ids[w] >= 0;
        for (int64_t i = 0; is_due && i < length; i++) {
            const int32_t token = prefixes[w * length + i];
            is_due = token == -1 || token == tail[(position + i) % length];
        }
        if (is_due) logits[last_ids[w]] = -INF;
    }
}

}  // namespace

// logits [rows, size]; slots, positions, status [rows]; by slot: kinds, penalties [3], first_free, bias and marks
// [size], prefixes [words, length], last_ids [words], tails [length].
static void logit_rules(float* logits, const int64_t* slots, const int64_t* positions, const int32_t* kinds,
                        const float* penalties, const int64_t* first_free, const float* bias, const int32_t* marks,
                        const int32_t* prefixes, const int32_t* last_ids, const int32_t* tails, int32_t* status,
                        int64_t rows, int64_t size, int64_t words, int64_t length, int64_t num_threads) {
    const int team = int(rows * size < 2 * lanes::TOKENS_A_THREAD ? 1 : std::min(rows, num_threads));
    parallel_for_dynamic(rows, team, [&](int64_t row) {
        const int64_t slot = slots[row], kind = slot < 0 ? 0 : kinds[slot];
        status[row] = 0;
        if (!kind) return;
        float* mine = logits + row * size;
        const bool is_too_early = positions[row] < first_free[slot];
        const Penalties asked = {penalties[3 * slot], penalties[3 * slot + 1], penalties[3 * slot + 2]};
        bool has_number = false, has_fault = false;
        for (int64_t first = 0; first < size; first += TILE) {
            const int64_t count = std::min(TILE, size - first);
            survey(mine + first, count, has_number, has_fault);
            if (kind & BIASED) add(mine + first, bias + slot * size + first, count);
            if (kind & MARKED) penalise(mine + first, marks + slot * size + first, count, asked, is_too_early);
        }
        if (kind & WORDED)
            forbid_words(mine, prefixes + slot * words * length, last_ids + slot * words, tails + slot * length, words,
                         length, positions[row]);
        status[row] = has_fault ? UNSOUND : has_number ? SOUND : 0;
    });
}
INFERD_EXPORT(logit_rules)

// drawn, is_none, status, slots, positions, outcomes [rows]; by slot: kinds, marks [size], tails [length].
static void record_drawn(const int64_t* drawn, const bool* is_none, const int32_t* status, const int64_t* slots,
                         const int64_t* positions, const int32_t* kinds, int32_t* marks, int32_t* tails,
                         int64_t* outcomes, int64_t rows, int64_t size, int64_t length) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = slots[row], without_id = status[row] == SOUND ? EMPTY : FAILED;
        outcomes[row] = is_none[row] || status[row] == UNSOUND ? without_id : drawn[row];
        if (slot < 0) continue;
        if (kinds[slot] & MARKED) marks[slot * size + drawn[row]]++;
        if (kinds[slot] & WORDED) tails[slot * length + positions[row] % length] = int32_t(drawn[row]);
    }
}
INFERD_EXPORT(record_drawn)
