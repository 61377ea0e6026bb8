"""Finds the markers that open and close a region of an answer, in a text that arrives in pieces.

A marker is a literal, one of several literals, or a regular expression of the `regex` library. Its partial matches show
whether the end of a text may become a marker. The result depends only on the text, not on how it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from inferd.server.tools.response_templates import load_response_template

MAX_MARKER_CHARS = 512
"""A longer match is text. This bounds the text that is held back for a marker and searched again with each token."""


@dataclass(frozen=True, slots=True)
class Found:
    """A marker at `text[start:end]`. `end` None: it may become a marker, depending on the text that follows."""

    start: int
    end: int | None
    captures: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Marker:
    """One kind of marker."""

    pattern: Any
    """A compiled pattern of the `regex` library, which has no types."""
    is_final: bool
    """Whether a complete match cannot grow: literals, none of which begins with another."""

    def find(self, text: str, start: int, *, is_end: bool) -> Found | None:
        """The first marker in `text[start:]`; `is_end`: no more text will come."""
        while True:
            match = self.pattern.search(text, start, partial=not is_end)
            found = self._judged(match, text, is_end=is_end)
            if found is None or (found.end or len(text)) - found.start <= MAX_MARKER_CHARS:
                return found
            start = found.start + 1

    def at(self, text: str, start: int, *, is_end: bool) -> Found | None:
        """The marker that begins at `start`, if there is one."""
        return self._judged(self.pattern.match(text, start, partial=not is_end), text, is_end=is_end)

    def mentions(self, token: str) -> bool:
        """Whether the marker may hold this token's text."""
        return token in self.pattern.pattern.replace("\\", "")

    def _judged(self, match: Any, text: str, *, is_end: bool) -> Found | None:
        if match is None or match.start() == len(text):
            return None  # an empty partial match holds nothing back
        if is_end:
            return _found(match)
        if match.partial or self._may_grow(match, text):
            return Found(match.start(), None, {})
        return _found(match)

    def _may_grow(self, match: Any, text: str) -> bool:
        """Whether more text could make the match a longer one."""
        if self.is_final:
            return False
        if match.end() == len(text):
            return True
        longer = self.pattern.fullmatch(text, match.start(), partial=True)
        return longer is not None and longer.partial


def literal_marker(texts: Iterable[str]) -> Marker:
    """A marker that is one of these texts; the longest of them that fits."""
    longest_first = sorted(texts, key=len, reverse=True)
    is_final = not any(a != b and a.startswith(b) for a in longest_first for b in longest_first)
    return Marker(compiled("|".join(map(re.escape, longest_first))), is_final)


@lru_cache(maxsize=256)
def compiled(source: str) -> Any:
    """As `recompiled`, once for each source."""
    return recompiled(source)


def recompiled(source: str) -> Any:
    """A pattern of the `regex` library. transformers compiles it, because `re` has no partial matches."""
    spec = {"start_anchor": "-", "fields": {"x": {"open_pattern": source, "transform": "{content}"}}}
    return load_response_template(spec).fields["x"].open_re


def _found(match: Any) -> Found:
    captures = {name: value for name, value in match.groupdict().items() if value is not None}
    return Found(match.start(), match.end(), captures)
