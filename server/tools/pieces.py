"""The pieces that the parser finds in an answer's text, without the blanks beside markers.

Blanks at the end of a text are held back until it is known whether a marker follows. Knows no markers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from inferd.server.tools.format import Region

BLANK = " \t\r\n"
"""Characters that belong to a marker beside them."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call whose name is known. Its arguments follow until the next call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further text of the arguments of the current call, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The current call is complete."""


Piece = Content | Reasoning | CallBegun | CallArguments | CallEnded


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, with neighbours of one kind joined."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, (Content, Reasoning, CallArguments)) and type(last) is type(piece):
            assert isinstance(last, (Content, Reasoning, CallArguments))
            found[-1] = type(piece)(last.text + piece.text)
        else:
            found.append(piece)
    return found


def first_calls(pieces: Sequence[Piece], most: int | None) -> list[Piece]:
    """The pieces up to the end of call number `most`; None: all."""
    ends = [i for i, piece in enumerate(pieces, start=1) if isinstance(piece, CallEnded)]
    return list(pieces if most is None or len(ends) <= most else pieces[: ends[most - 1]])


class AnswerText:
    """Collects the pieces of an answer. The parser adds those of calls itself."""

    def __init__(self, *, keeps_content: bool) -> None:
        """`keeps_content`: whether content is part of the answer. Otherwise it is dropped."""
        self.pieces: list[Piece] = []
        self.has_content = False
        """Whether any content was more than blanks."""
        self._keeps_content = keeps_content
        self._blanks = ""
        """Blanks since the last character of content."""
        self._held = ""
        """Blanks at the end of the text of an open region."""
        self._shown: set[str] = set()
        """Roles of the regions so far that had text."""
        self._touches_marker = self._is_region_start = False

    def copy(self) -> Self:
        """A copy without pieces."""
        other = copy.copy(self)
        other.pieces, other._shown = [], set(self._shown)
        return other

    @property
    def num_held(self) -> int:
        """Number of blanks that are in no piece yet."""
        return len(self._blanks) + len(self._held)

    @property
    def touches_marker(self) -> bool:
        """Whether a marker stands before the next text."""
        return self._touches_marker

    def marker(self) -> None:
        """A marker stands here."""
        self._touches_marker = True

    def blanks(self, text: str) -> None:
        """Add blanks outside of regions."""
        self._blanks += text

    def drop_blanks(self, *, in_region: bool = False) -> None:
        """Drop the blanks that are held back outside of regions, and in the open one if so asked."""
        self._blanks = ""
        self._held = "" if in_region else self._held

    def content(self, text: str) -> None:
        """Add text outside of regions."""
        body = text.rstrip(BLANK)
        if body:
            before = self._blanks if self.has_content or not self._touches_marker else self._blanks.strip(BLANK)
            if self._keeps_content:
                self.pieces.append(Content(before + body))
                self.has_content = True
            self._blanks = ""
            self._touches_marker = False
        self._blanks += text[len(body) :]

    def end_content(self) -> None:
        """The answer ends outside of regions."""
        rest = self._blanks.strip(BLANK) if self._touches_marker else self._blanks
        if rest and self._keeps_content:
            self.pieces.append(Content(rest))
        self._blanks = ""

    def open_region(self) -> None:
        """The marker of a region of text stands here."""
        self._is_region_start, self._touches_marker, self._held = True, True, ""

    def close_region(self) -> None:
        self._held = ""

    def in_region(self, region: Region, text: str) -> None:
        """Add text between the markers of a region."""
        if self._is_region_start:
            text = text.lstrip(BLANK)
        body = text.rstrip(BLANK)
        if body:
            before = self._held
            if self._is_region_start and region.role in self._shown:
                before = region.separator
            self._add(region, before + body)
            self._held, self._is_region_start = "", False
            self._shown.add(region.role)
            self.has_content = self.has_content or region.role == "content"
        self._held += text[len(body) :]

    def end_region(self, region: Region) -> None:
        """The answer ends in an open region."""
        if self._held:
            self._add(region, self._held)
            self._held = ""

    def _add(self, region: Region, text: str) -> None:
        if region.role == "reasoning":
            self.pieces.append(Reasoning(text))
        elif region.role == "content" and self._keeps_content:
            self.pieces.append(Content(text))
