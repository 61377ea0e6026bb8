"""Tokenizes texts as the `tokenizers` library does, with the merges in shared memory.

The library cuts a text into words, and these into single symbols, by a tokenizer that has no merges. The rest of its
BPE model is done here: pairs of symbols are merged, the one of the lowest rank first. In the library's own model the
merges of 262,000 tokens take 96 MiB a process. A text of words that came before takes as long here as there: 7 us for
a few words. 1 KB of new words takes 2 to 5 ms, and 0.5 ms there (AMD EPYC Zen 4, 2026-11-28).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import groupby, pairwise

from tokenizers import Tokenizer

from inferd.engine.grammar.tables import DROPPED_ID, SPACE, Tables

_ID_BITS = 32
_ID_MASK = 2**_ID_BITS - 1
_REMOVED = -1
_MAX_KEPT_WORDS, _MAX_KEPT_PAIRS = 4096, 8192
"""Words whose tokens are kept, and pairs of ids whose merge is: some 4 MiB."""
_MAX_KEPT_CHARS = 64
"""Longest word whose tokens are kept."""
_PREFIX_CHARS = 2


class MergingTokenizer:
    """The ids of a text, as the checkpoint's tokenizer writes it."""

    def __init__(self, tables: Tables) -> None:
        self._tables, self._symbols = tables, Tokenizer.from_str(tables.facts.symbols)
        self._model, self._normalizer = self._symbols.model, self._symbols.normalizer
        self._splitter = self._symbols.pre_tokenizer
        self._added = self._begins_of_added()
        joins = tables.facts.joins_with_space
        self._cut = None if joins is None else re.compile(f"(?<=[^{re.escape(SPACE + joins)}])(?={SPACE})")
        self._kept_tokens = lru_cache(_MAX_KEPT_WORDS)(self._tokens_of)
        self._result = lru_cache(_MAX_KEPT_PAIRS)(self._result_of)

    def __call__(self, text: str) -> list[int]:
        """Raises an exception of the library if the tokenizer has no token for a character, and its unknown token is
        none."""
        words = self._words(text)
        if words is None:
            return self._with_added(text)
        ids: list[int] = []
        for word in words:
            self._add_tokens(ids, word)
        return ids

    def _begins_of_added(self) -> re.Pattern[str]:
        """The first characters of every added token. The library finds some in a text, and others in its normal
        form."""
        contents = [token.content for token in self._symbols.get_added_tokens_decoder().values()]
        if self._normalizer is not None:
            contents += [self._normalizer.normalize_str(content) for content in contents]
        begins = sorted({content[:_PREFIX_CHARS] for content in contents})
        return re.compile("|".join(map(re.escape, begins)) if begins else "(?!)")

    def _words(self, text: str) -> list[str] | None:
        """The words of a text that has no added token; None if it may have one."""
        if self._added.search(text):
            return None
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
            if self._added.search(text):
                return None
        return [text] if self._splitter is None else [word for word, _ in self._splitter.pre_tokenize_str(text)]

    def _with_added(self, text: str) -> list[int]:
        """The ids of a text that may have added tokens, each of which is a word of one symbol."""
        encoding = self._symbols.encode(text, add_special_tokens=False)
        all_ids, all_symbols, ids, begin = encoding.ids, encoding.tokens, list[int](), 0
        for _, places in groupby(encoding.word_ids):
            end = begin + sum(1 for _ in places)
            symbols, word_ids = all_symbols[begin:end], all_ids[begin:end]
            if all(len(symbol) == 1 for symbol in symbols):
                self._add_tokens(ids, "".join(symbols))
            else:  # unknown characters and bytes have longer names, and no whole word has any
                ids += self._merged([token_id for token_id in word_ids if token_id != DROPPED_ID])
            begin = end
        return ids

    def _add_tokens(self, ids: list[int], word: str) -> None:
        """Append the tokens of a word. No merge crosses a place at which it is cut."""
        for part in (word,) if self._cut is None else self._cut.split(word):
            ids += self._kept_tokens(part) if len(part) <= _MAX_KEPT_CHARS else self._tokens_of(part)

    def _tokens_of(self, word: str) -> Sequence[int]:
        whole_id = self._id_of(word.encode()) if self._tables.facts.takes_words else None
        if whole_id is not None:
            return (whole_id,)
        ids = [symbol.id for symbol in self._model.tokenize(word)]
        return self._merged([token_id for token_id in ids if token_id != DROPPED_ID])

    def _id_of(self, word: bytes) -> int | None:
        word_ids = self._tables.word_ids
        place = bisect_left(range(len(word_ids)), word, key=self._word)
        return word_ids[place] if place < len(word_ids) and self._word(place) == word else None

    def _word(self, place: int) -> bytes:
        ends = self._tables.word_ends
        return bytes(self._tables.words[ends[place - 1] if place else 0 : ends[place]])

    def _merged(self, ids: list[int]) -> Sequence[int]:
        """The tokens that a word of these symbols becomes. The order is that of the library (`Word::merge_all` of its
        models/bpe)."""
        num_symbols, result_of = len(ids), self._result
        before, after = list(range(-1, num_symbols - 1)), list(range(1, num_symbols + 1))
        found = ((result_of(left << _ID_BITS | right), place) for place, (left, right) in enumerate(pairwise(ids)))
        queue = [(result, place) for result, place in found if result is not None]
        heapify(queue)
        while queue:
            result, place = heappop(queue)
            right, merged = after[place], result & _ID_MASK
            if ids[place] == _REMOVED or right == num_symbols:
                continue
            now = result_of(ids[place] << _ID_BITS | ids[right])
            if now is None or now & _ID_MASK != merged:
                continue  # one of the two was merged with another
            ids[place], ids[right] = merged, _REMOVED
            left, right = before[place], after[right]
            after[place] = right
            if right < num_symbols:
                before[right] = place
                with_right = result_of(merged << _ID_BITS | ids[right])
                if with_right is not None:
                    heappush(queue, (with_right, place))
            if left >= 0:
                with_left = result_of(ids[left] << _ID_BITS | merged)
                if with_left is not None:
                    heappush(queue, (with_left, left))
        return tuple(token_id for token_id in ids if token_id != _REMOVED)

    def _result_of(self, pair: int) -> int | None:
        """Rank x 2^32 + id of what a pair (left id x 2^32 + right id) makes; None if nothing."""
        pairs = self._tables.pairs
        place = bisect_left(pairs, pair)
        return self._tables.results[place] if place < len(pairs) and pairs[place] == pair else None
