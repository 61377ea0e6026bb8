"""Follows one request through its grammar with llguidance: takes its tokens, and gives the mask of its next token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from inferd.engine.grammar.compiler import brief
from inferd.engine.grammar.ports import WORD_BITS


class MatchedGrammar:
    """Position of one request in its grammar. After a failure it allows no token."""

    __slots__ = ("_accepted", "_end_ids", "_eos_ids", "_failed_at", "_fresh", "_matcher", "_num_words", "failure")

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, ending_ids: Sequence[int]) -> None:
        """`matcher` is at the start of the grammar. `ending_ids` end this request. Other ending ids of the vocabulary
        are never drawn."""
        self._matcher = matcher
        # After an error a matcher takes no token back. A copy of one at the start takes 3 us, a later one up to 1 ms.
        self._fresh = matcher.deep_copy()
        self._accepted: list[int] = []
        self._num_words = -(-vocabulary.vocab_size // WORD_BITS)
        self._end_ids = tuple(ending_ids)
        self._eos_ids = tuple(vocabulary.eos_tokens)
        self.failure = ""
        self._failed_at = 0
        """Number of accepted tokens at the failure."""

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped() and not self.failure

    @property
    def is_accepting(self) -> bool:
        return not self.failure and self._matcher.is_accepting()

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._accepted.append(token_id)
            if not self.failure and not self._matcher.consume_token(token_id):
                self._fail()

    def forced(self) -> list[int]:
        token_ids = [] if self.failure else self._matcher.compute_ff_tokens()
        self._forget_errors()
        return token_ids

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        ends = {*self._eos_ids, *self._end_ids}
        most = next((place for place, token_id in enumerate(token_ids) if token_id in ends), len(token_ids))
        num_allowed = 0 if self.failure else self._matcher.validate_tokens(list(token_ids[:most]))
        self._forget_errors()
        return num_allowed

    def rollback(self, num_tokens: int) -> None:
        del self._accepted[len(self._accepted) - num_tokens :]
        if self.failure and self._failed_at > len(self._accepted):
            self.failure = ""
            self._forget_errors()
        elif num_tokens and not self.failure and not self._matcher.rollback(num_tokens):
            self._fail()

    def _forget_errors(self) -> None:
        """Follow the accepted tokens again if the matcher failed at others."""
        if not self.failure and self._matcher.is_error():
            self._matcher = self._fresh.deep_copy()
            for token_id in self._accepted:
                self._matcher.consume_token(token_id)

    def fill(self, words: array[int], first_word: int) -> None:
        assert len(words) >= first_word + self._num_words and words.itemsize * 8 == WORD_BITS
        end = first_word + self._num_words
        if self.failure:
            words[first_word:end] = array("I", bytes(4 * self._num_words))
            return
        address = words.buffer_info()[0] + 4 * first_word
        self._matcher.unsafe_compute_mask_ptr(address, 4 * self._num_words)
        if self._matcher.is_error():
            self._fail()
            self.fill(words, first_word)
            return
        # llguidance allows every ending id of the vocabulary. Only those of this request may be drawn.
        for token_id in self._eos_ids:
            words[first_word + token_id // WORD_BITS] &= ~(1 << token_id % WORD_BITS) & 0xFFFFFFFF
        if self._matcher.is_accepting():
            for token_id in self._end_ids:
                words[first_word + token_id // WORD_BITS] |= 1 << token_id % WORD_BITS

    def _fail(self) -> None:
        self.failure, self._failed_at = brief(self._matcher.get_error()), len(self._accepted)
