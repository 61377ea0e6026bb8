"""Reads the calls of one open region: JSON while it arrives, and anything else once the region has closed.

Knows neither what stands around a region nor the answer's other pieces.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from inferd.server.tools.argument_schema import ArgumentSchema
from inferd.server.tools.closed_calls import calls_of
from inferd.server.tools.format import Region
from inferd.server.tools.json_calls import JsonCalls
from inferd.server.tools.patterns import TAG
from inferd.server.tools.pieces import CallArguments, CallBegun, CallEnded, Piece

_MOST_BEHIND = 16
_BEHIND_CALLS = re.compile(rf"[\s}}\],;]{{0,{_MOST_BEHIND}}}")
"""Text behind the JSON of calls: brackets too many, as small models write them, and what separates two calls."""
_BEGIN_OF_CALLS = re.compile(rf"(?:\[\s{{0,{_MOST_BEHIND}}})?(?:\{{|\Z)")


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of a text that belongs to a region, and the calls in it."""

    num_chars: int
    """Characters of the text that belong to the region."""
    pieces: Sequence[Piece] = ()
    is_over: bool = False
    """Whether the region has ended."""
    refused: str | None = None
    """The region's text, if it turned out to hold no call."""
    is_whole: bool = False
    """Whether more text could not make the refused text a call."""


class JsonRegion:
    """Calls as JSON."""

    def __init__(self, region: Region | None, calls: JsonCalls, names: Collection[str]) -> None:
        """`region`: None for calls without a marker. `names`: the tools that are offered."""
        self._region, self._calls, self._names = region, calls, names
        self._is_closing = False
        """Whether the JSON has ended, and the marker that closes the region may follow."""

    def take(self, text: str, *, is_end: bool, is_cut: bool) -> Taken:
        """The next characters. `is_end`: no more text comes. `is_cut`: because a limit ended it."""
        del is_cut
        pieces: list[Piece] = []
        at = 0
        while True:
            if not self._is_closing:
                found, num = self._calls.take(text[at:])
                pieces, at = [*pieces, *found], at + num
                if not self._calls.is_done:
                    is_refused = self._calls.is_broken or is_end
                    refused = "".join(self._calls.unread) if is_refused else None
                    return Taken(at, pieces, refused=refused, is_whole=self._calls.is_broken)
                self._is_closing = True
            num_closing = self._closing(text[at:], is_end=is_end)
            if num_closing is None:
                return Taken(at, pieces)
            at += num_closing
            if self._is_closing:
                return Taken(at, pieces, is_over=True)

    def _closing(self, text: str, *, is_end: bool) -> int | None:
        """Number of characters up to the end of the region, or up to the next call in it; None: it is not certain.
        Models leave out the list around several calls, or write a list for each."""
        close = None if self._region is None else self._region.close
        if close is None and self._calls.is_nameless:
            return 0
        behind = _BEHIND_CALLS.match(text)
        assert behind is not None
        num = behind.end()
        if num == len(text) and not is_end:
            return None  # the next character decides, also behind the most, so that cuts of the text do not
        markers = () if close is None else (close.at(text, start, is_end=False) for start in sorted({0, num}))
        for found in filter(None, markers):
            if found.end is None and not is_end:
                return None
            return len(text) if found.end is None else found.end  # at the end, a part of the marker belongs to it, too
        if self._calls.is_nameless or num == _MOST_BEHIND:
            return 0
        if num == len(text):
            return num if text.strip() else 0
        begun = _BEGIN_OF_CALLS.match(text, num)
        if begun is None or not begun[0].endswith("{"):
            return 0 if begun is None or is_end else None
        # Without a marker that closes the region, only a call of an offered tool goes on with it.
        known_names = self._names if close is None else None
        self._calls, self._is_closing = self._calls.further(behind[0], known_names), False
        return num


class WholeRegion:
    """Calls that are parsed when the region has closed."""

    def __init__(
        self, region: Region, opening: str, captures: Mapping[str, str], schemas: Mapping[str, ArgumentSchema]
    ) -> None:
        """`opening`: the text of the opening marker. Its `captures` may hold the name of the call. `schemas`: those of
        the offered tools, by name."""
        self._region, self._opening, self._schemas = region, opening, schemas
        self._is_named = "name" in captures
        self._body: list[str] = []

    def take(self, text: str, *, is_end: bool, is_cut: bool) -> Taken:
        """The next characters. `is_end`: no more text comes. `is_cut`: because a limit ended it."""
        close = self._region.close
        found = None if close is None or not text else close.find(text, 0, is_end=is_end)
        num = len(text) if found is None else found.start
        self._body.append(text[:num])
        if found is not None and found.end is not None:
            return self._closed(found.end, text[num : found.end], is_cut=is_cut)
        if is_end and (close is None or self._region.is_bare):
            return self._closed(num, "", is_cut=is_cut)
        return self._unread(num, "", is_closed=False) if is_end else Taken(num)

    def _closed(self, num_chars: int, closing: str, *, is_cut: bool) -> Taken:
        calls = calls_of(self._region, self._opening, "".join(self._body), closing, self._schemas)
        if calls is None or (self._is_named and len(calls) != 1):
            return self._unread(num_chars, closing, is_closed=bool(closing) or not is_cut)
        pieces: list[Piece] = []
        for name, arguments in calls:
            pieces += [] if self._is_named else [CallBegun(name)]
            pieces += [CallArguments(arguments), CallEnded()]
        return Taken(num_chars, pieces, is_over=True)

    def _unread(self, num_chars: int, closing: str, *, is_closed: bool) -> Taken:
        """The text cannot be parsed, or was cut off. If its call has begun, it becomes the arguments as it is."""
        body = "".join(self._body)
        if not self._is_named:
            text = body if TAG.search(closing) else body + closing  # which may be a word of the answer
            return Taken(num_chars, refused=text, is_whole=is_closed)
        ending = [CallEnded()] if is_closed else []
        return Taken(num_chars, [CallArguments(body), *ending], is_over=True)
