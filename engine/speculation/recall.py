"""Where in earlier ids the newest ones occurred before, and what followed them.

Each pair of neighbouring ids is chained to its last occurrence before, as compressors of the LZ77 family chain their
matches. So a lookup takes the newest occurrences of the last pair and compares backwards. Pure: no clock, no
randomness. Knows ids only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

_NOWHERE = -1
_MOST_MATCHES = 8
"""Newest occurrences that a lookup compares."""
LONGEST_MATCH = 16
"""Ids that are compared backwards."""
_AT_ONCE = 512
"""Ids that one call indexes, so that long prompts do not hold up a step: 0.13 ms for random ids, for each request (2
cores of an AMD EPYC Zen 4, 2026-11-26)."""
END_OF_SOURCE = -1
"""Stands between two answers in one list of ids. No token has this id."""


class Match(NamedTuple):
    """A place in earlier ids whose last ids are those of the context."""

    ids: Sequence[int]
    end: int
    """Index of the id that followed."""
    length: int
    """Number of ids that agree, at most `LONGEST_MATCH`."""


class PairIndex:
    """The pairs of neighbours in a list of ids that only grows."""

    __slots__ = ("_earlier", "_newest", "_newest_alone", "ids")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self._newest: dict[tuple[int, int], int] = {}
        """Pair -> index of its second id, at its newest occurrence."""
        self._newest_alone: dict[int, int] = {}
        """Id -> index of its newest occurrence."""
        self._earlier = array("q", [_NOWHERE])
        """Index of the second id of a pair -> that of the occurrence before, for all indexed ids."""

    def update(self, end: int) -> None:
        """Index the ids before `end`, at most `_AT_ONCE` of them now and the rest later."""
        ids, newest, newest_alone, earlier = self.ids, self._newest, self._newest_alone, self._earlier
        first = len(earlier)
        for i in range(first, min(end, first + _AT_ONCE)):
            newest_alone[ids[i]] = i
            pair = (ids[i - 1], ids[i])
            earlier.append(newest.get(pair, _NOWHERE))
            newest[pair] = i

    def matches(self, context: Sequence[int]) -> list[Match]:
        """Places before which the ids are the last ones of `context`: at least two agree, or one if there is no such
        place. The newest comes first."""
        ids, found = self.ids, list[Match]()
        if len(context) < 2:
            return found
        place = self._newest.get((context[-2], context[-1]), _NOWHERE)
        most = min(LONGEST_MATCH, len(context))
        while place != _NOWHERE and len(found) < _MOST_MATCHES:
            length = 2
            while length < most and length <= place and ids[place - length] == context[-1 - length]:
                length += 1
            found.append(Match(ids, place + 1, length))
            place = self._earlier[place]
        if not found and (place := self._newest_alone.get(context[-1], _NOWHERE)) != _NOWHERE:
            found.append(Match(ids, place + 1, 1))
        return found


class RecentAnswers:
    """The newest answers of one tenant."""

    def __init__(self, most_ids: int) -> None:
        self._most_ids = most_ids
        self._ids: list[int] = []
        self._index = PairIndex(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, answer: Sequence[int]) -> None:
        """Remember an answer's last ids. If there are too many, the older half is forgotten."""
        if len(self._ids) + len(answer) + 1 > self._most_ids:
            self._ids = self._ids[-(self._most_ids // 2) :]
            self._index = PairIndex(self._ids)
        self._ids.append(END_OF_SOURCE)
        self._ids += answer[-(self._most_ids // 2 - 1) :]

    def matches(self, context: Sequence[int]) -> list[Match]:
        self._index.update(len(self._ids))
        return self._index.matches(context)
