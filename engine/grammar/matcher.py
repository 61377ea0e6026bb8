"""Follows one request through its grammar with llguidance: takes its tokens, and gives the mask of its next token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from inferd.engine.grammar.compiler import brief
from inferd.engine.grammar.ports import WORD_BITS


class MatchedGrammar:
    """Position of one request in its grammar. After a failure it allows no token."""

    __slots__ = ("_end_ids", "_eos_ids", "_matcher", "_num_words", "failure")

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, ending_ids: Sequence[int]) -> None:
        """`ending_ids` end this request. Other ending ids of the vocabulary are never drawn."""
        self._matcher = matcher
        self._num_words = -(-vocabulary.vocab_size // WORD_BITS)
        self._end_ids = tuple(ending_ids)
        self._eos_ids = tuple(vocabulary.eos_tokens)
        self.failure = ""

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped() and not self.failure

    @property
    def is_accepting(self) -> bool:
        return not self.failure and self._matcher.is_accepting()

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self._matcher.consume_token(token_id):
                self._fail()
                return

    def forced(self) -> list[int]:
        return [] if self.failure else self._matcher.compute_ff_tokens()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        ends = {*self._eos_ids, *self._end_ids}
        most = next((place for place, token_id in enumerate(token_ids) if token_id in ends), len(token_ids))
        return 0 if self.failure else self._matcher.validate_tokens(list(token_ids[:most]))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            self._fail()

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
        self.failure = brief(self._matcher.get_error())
