"""Finds stop strings in a text that arrives in pieces, and holds back every text that may become one.

One automaton for each stop string (Knuth, Morris, Pratt) reads each character once. So the result does not depend on
how the text was cut, and the cost is linear. The stop string that is complete first wins; if two are complete at the
same character, the longer one. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string that was found."""

    stop: str
    num_chars_read: int
    """Number of characters of the piece up to and with the one that completed the stop string."""


@dataclass(frozen=True, slots=True)
class StopTables:
    """The stop strings of one request, prepared once for all of its choices."""

    stops: tuple[str, ...]
    failures: tuple[tuple[int, ...], ...]
    first_chars: frozenset[str]

    @classmethod
    def of(cls, stops: Sequence[str]) -> Self:
        """Takes time proportional to the characters of all stop strings together."""
        assert all(stops), "an empty stop string would end every text"
        distinct = tuple(dict.fromkeys(stops))
        return cls(distinct, tuple(map(_failure_table, distinct)), frozenset(stop[0] for stop in distinct))


class StopStrings:
    """Searches the text of one choice, and holds text back."""

    __slots__ = ("_held", "_include", "_matched", "_tables", "match")

    def __init__(self, tables: StopTables, include: bool) -> None:
        """`include`: whether the text keeps the stop string that ended it."""
        self._tables, self._include = tables, include
        self._matched = [0] * len(tables.stops)
        self._held = ""
        self.match: Match | None = None

    @property
    def num_held(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def feed(self, piece: str, is_armed: bool = True) -> str:
        """The text that can be sent after this piece. Once `match` is set, this was the last of it.

        Unless `is_armed`, a complete stop string is text like any other.
        """
        assert self.match is None, "text after the end"
        if not self._held and self._tables.first_chars.isdisjoint(piece):
            return piece
        for i, char in enumerate(piece):
            completed = self._advance(char)
            if completed and is_armed:
                return self._end(Match(completed, i + 1), self._held + piece[: i + 1])
        text = self._held + piece
        num_held = max(self._matched, default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text held back for a stop string that never came. Text that follows belongs to another stretch: no stop
        string reaches from one into the other."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._tables.stops)
        return held

    def _end(self, match: Match, text: str) -> str:
        self.match, self._held = match, ""
        return text if self._include else text[: len(text) - len(match.stop)]

    def _advance(self, char: str) -> str:
        """Read one character; returns the longest stop string that it completes, or ""."""
        completed = ""
        for i, (stop, failure) in enumerate(zip(self._tables.stops, self._tables.failures, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            matched += stop[matched] == char
            self._matched[i] = matched
            if matched == len(stop):
                completed = max(completed, stop, key=len)
                self._matched[i] = failure[matched - 1]
        return completed


def _failure_table(pattern: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0]
    for char in pattern[1:]:
        length = table[-1]
        while length and pattern[length] != char:
            length = table[length - 1]
        table.append(length + (pattern[length] == char))
    return tuple(table)
