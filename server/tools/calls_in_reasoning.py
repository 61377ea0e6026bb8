"""Finds out whether a model meant a call inside its reasoning, or only mentioned it.

A call that is meant ends the reasoning, also without the marker of its end. If the reasoning ends or goes on behind the
call, the call was only mentioned, and is reasoning, too.
"""

from __future__ import annotations

from inferd.server.tools.format import Region
from inferd.server.tools.parser_config import Parser
from inferd.server.tools.pieces import Piece

_MOST_PROSE = 256
"""Characters behind a call inside reasoning that are awaited before it counts as mentioned only."""


class BehindCall:
    """The text and the markers behind a call inside reasoning, as far as they tell whether the reasoning goes on."""

    def __init__(self, reasoning: Region) -> None:
        """`reasoning`: the region that the call is in."""
        self.refused_at: int | None = None
        """Position of the first character which shows that the reasoning goes on."""
        self.prose_at: int | None = None
        """Position of the first text behind a call."""
        self._reasoning = reasoning
        self._end_at: int | None = None
        """Position of a marker that ends the reasoning around the call."""

    def text(self, start: int, end: int) -> None:
        """Text has come from `start` to `end`. A model that ends its turn behind a few words meant the call."""
        if self._end_at is not None:
            self.refused_at = self._end_at
            return
        self.prose_at = start if self.prose_at is None else self.prose_at
        if end > self.prose_at + _MOST_PROSE:
            self.refused_at = self.prose_at + _MOST_PROSE

    def marker(self, region: Region | None, text: str, start: int) -> None:
        """A marker has come that opens `region`; None: none."""
        if region is None and self._end_at is None:
            close = self._reasoning.close
            if close is not None and close.pattern.fullmatch(text):
                self._end_at = start
                self.refused_at = None if self.prose_at is None else start
        elif region is not None and region.role != "end" and (region.role != "call" or self._end_at is not None):
            self.refused_at = start if self._end_at is None else self._end_at


class UncertainCall:
    """A call inside reasoning, with everything behind it."""

    def __init__(self, parser: Parser, behind: BehindCall) -> None:
        """`parser`: parses the text as if the call ended the reasoning, and tells `behind` what it sees."""
        self.parser = parser
        self.pieces: list[Piece] = []
        self._behind = behind
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def read(self, text: str, *, is_end: bool, is_cut: bool) -> bool | None:
        """Whether the call is meant; None: it is not certain yet."""
        self._texts.append(text)
        self.pieces += self.parser.feed(text)
        if is_end and self._behind.refused_at is None:
            self.pieces += self.parser.finish(is_cut=is_cut)
        if self._behind.refused_at is not None:
            return False
        if not is_end:
            return None
        is_cut_prose = is_cut and self._behind.prose_at is not None
        return not is_cut_prose and bool(self.parser.num_calls or self.parser.is_in_call)

    def num_mentioned(self) -> int:
        """Number of characters of the text, from the call on, in which the reasoning only mentions calls."""
        return len(self.text) if self._behind.refused_at is None else self._behind.refused_at
