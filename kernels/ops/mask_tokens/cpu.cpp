// Packed masks over rows of logits, 32 tokens a word. Logits are not written if a word allows all, and not read if it
// allows none.

#include <algorithm>
#include <cstdint>

#include "cpu/call.h"
#include "cpu/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int WORD = 32;
constexpr float MINUS_INF = -__builtin_inff();
constexpr int64_t TOKENS_A_THREAD = 65536;

inline void apply(float* logits, uint32_t allowed) {
    if (allowed == 0xffffffff) return;
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(logits, __mmask16(~allowed), _mm512_set1_ps(MINUS_INF));
    _mm512_mask_storeu_ps(logits + 16, __mmask16(~allowed >> 16), _mm512_set1_ps(MINUS_INF));
#else
    if (!allowed) std::fill(logits, logits + WORD, MINUS_INF);
    else
        for (int i = 0; i < WORD; i++) logits[i] = allowed >> i & 1 ? logits[i] : MINUS_INF;
#endif
}

}  // namespace

// logits [.., size] fp32; masks [num_masks, words]; row_of [num_masks] int64, below 0 for none.
static void mask_tokens(float* logits, const uint32_t* masks, const int64_t* row_of, int64_t size, int64_t num_masks,
                        int64_t words, int64_t num_threads) {
    const int64_t whole = std::min(words, size / WORD);
    const int team = int(num_masks * size < 2 * TOKENS_A_THREAD ? 1 : std::min(num_masks, num_threads));
    parallel_for(num_masks, team, [&](int64_t m) {
        if (row_of[m] < 0) return;
        float* row = logits + row_of[m] * size;
        const uint32_t* mask = masks + m * words;
        for (int64_t word = 0; word < whole; word++) apply(row + word * WORD, mask[word]);
        for (int64_t token = whole * WORD; token < size; token++) {
            const bool is_allowed = token / WORD < words && mask[token / WORD] >> token % WORD & 1;
            if (!is_allowed) row[token] = MINUS_INF;
        }
    });
}
INFERD_EXPORT(mask_tokens)
