"""Pairs of texts as a model's tokenizer joins them: `[CLS] first [SEP] second [SEP]`, or whatever it adds.

A tokenizer reads the two texts apart from each other, and then adds its tokens around them. So a query is read once for
all its documents, and a pair is cut before its last tokens are added. Knows no model and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from tokenizers import Tokenizer as Backend

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinedPair:
    """The token ids of a pair, in five parts. Only those of the two texts may be cut, at their ends."""

    before: Ids
    first: Ids
    between: Ids
    second: Ids
    behind: Ids
    num_between_first: int | None = None
    """Number of the tokens between that are of the first type; None: all tokens of a pair are of one type."""

    def __len__(self) -> int:
        return sum(map(len, (self.before, self.first, self.between, self.second, self.behind)))

    @property
    def token_ids(self) -> Ids:
        return (*self.before, *self.first, *self.between, *self.second, *self.behind)

    @property
    def num_first(self) -> int:
        """Number of tokens of the first type, which come before those of the second; 0 if there is one type."""
        if self.num_between_first is None:
            return 0
        return len(self.before) + len(self.first) + self.num_between_first

    def with_second_cut(self, most: int) -> Self:
        """At most so many tokens of the second text."""
        return replace(self, second=self.second[:most])

    def cut(self, most: int) -> Self:
        """At most `most` tokens. The longer text loses its end; if both are longer than half of what is left for them,
        they get a half each. `longest_first` of the library `tokenizers` does the same. No text may be left."""
        num_first, num_second = len(self.first), len(self.second)
        left = max(0, most - (len(self) - num_first - num_second))
        if num_first + num_second <= left:
            return self
        shorter, longer = sorted((num_first, num_second))
        longer = shorter if shorter > left else max(shorter, left - shorter)
        if shorter + longer > left:
            shorter, longer = left // 2, left // 2 + left % 2
        if num_first > num_second:
            return replace(self, first=self.first[:longer], second=self.second[:shorter])
        return replace(self, first=self.first[:shorter], second=self.second[:longer])


@dataclass(frozen=True, slots=True)
class PairFrame:
    """The tokens that a tokenizer adds around the texts of a pair."""

    before: Ids
    between: Ids
    behind: Ids
    num_between_first: int | None = None
    """As in `JoinedPair`."""

    @classmethod
    def of(cls, backend: Backend) -> Self | None:
        """None if the added tokens cannot be separated from those of the texts, or if their types are in no order."""
        encoding = backend.encode("a", "b", add_special_tokens=True)
        own = [backend.encode(text, add_special_tokens=False).ids for text in "ab"]
        places = [[i for i, text in enumerate(encoding.sequence_ids) if text == which] for which in (0, 1)]
        if not all(places):
            return None
        (first, first_end), (second, end) = ((place[0], place[-1] + 1) for place in places)
        ids, types = tuple(encoding.ids), list(encoding.type_ids)
        if [list(ids[first:first_end]), list(ids[second:end])] != own or first_end > second:
            return None
        num_first = types.count(0)
        if types != [0] * num_first + [1] * (len(ids) - num_first):
            return None
        has_types = first_end <= num_first <= second
        num_between = num_first - first_end if has_types and num_first < len(ids) else None
        return cls(ids[:first], ids[first_end:second], ids[end:], num_between)

    def join(self, first: Ids, second: Ids) -> JoinedPair:
        return JoinedPair(self.before, first, self.between, second, self.behind, self.num_between_first)
