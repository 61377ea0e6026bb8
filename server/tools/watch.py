"""The markers that an answer may have at each place, and which of them comes first in a text.

Every marker of the format is watched, also one that does not fit its place: such a marker is stray, and no part of the
answer. Knows no pieces and keeps no state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from inferd.server.tools.format import Format, Region
from inferd.server.tools.markers import Found, Marker, literal_marker
from inferd.server.tools.patterns import TAG

_TAG = re.compile(r"(?<!\?P)(?<!\?)<[^<>\s()?*+^]{2,64}>|\[/?[A-Z_]{3,64}\]")
"""A text that is a marker wherever it stands."""
_MOST_FIRST_CHARS = 32
_ESCAPED = re.compile(r"\\([^\w])")


@dataclass(frozen=True, slots=True)
class Seen:
    """The marker that comes first. `region` None: it opens nothing here."""

    region: Region | None
    found: Found
    closes: bool = False
    """Whether it closes the open region."""


class Watched(NamedTuple):
    """A marker, and its meaning at one place."""

    region: Region | None
    """The region that it opens, if any."""
    marker: Marker
    closes: bool
    """Whether it closes the open region."""
    first_chars: frozenset[str] | None
    """Characters that it may begin with; None: any."""


def _watched(region: Region | None, marker: Marker, *, closes: bool = False) -> Watched:
    return Watched(region, marker, closes, _first_chars(marker.pattern))


@lru_cache(maxsize=256)
def _first_chars(pattern: Any) -> frozenset[str] | None:
    """The characters that a match of the pattern may begin with; None if they are too many to list. Most tokens of an
    answer have none of them, and a search with the pattern takes twenty times as long as a look at the characters."""
    known = {*map(chr, range(128)), *pattern.pattern}
    found = frozenset(char for char in known if pattern.match(char, partial=True) is not None)
    return None if len(found) > _MOST_FIRST_CHARS else found


@dataclass(frozen=True, slots=True)
class Watch:
    """The markers of one format."""

    free: tuple[Watched, ...]
    """Markers outside of regions."""
    inside: Mapping[str, tuple[Watched, ...]]
    """Markers in the text of a region, by its field's name."""
    bare: Region | None = None
    """Region of calls that only the beginning of an answer opens."""

    @classmethod
    def of(cls, form: Format, *, with_calls: bool, call_ends_reasoning: bool) -> Watch:
        """`with_calls`: whether to look for calls. `call_ends_reasoning`: also inside reasoning."""
        return _watch_of(form, with_calls, call_ends_reasoning)


def first(text: str, watched: Iterable[Watched], names: Collection[str], *, is_end: bool) -> tuple[Seen | None, int]:
    """(the marker that comes first, number of characters before it). Without a marker, the number counts the characters
    before what may become one. `names`: the tools offered."""
    best: tuple[int, int] | None = None
    seen: Seen | None = None
    held = len(text)
    for region, marker, closes, first_chars in watched if text else ():
        if first_chars is not None and first_chars.isdisjoint(text):
            continue
        found = marker.find(text, 0, is_end=is_end)
        if found is None or found.end == found.start:
            continue
        if found.end is None:
            held = min(held, found.start)
        elif (best is None or (found.start, -found.end) < best) and not _is_for_others(region, found, text, names):
            best, seen = (found.start, -found.end), Seen(region, found, closes)
    if seen is None or seen.found.start >= held:
        return None, held
    return seen, seen.found.start


def _is_for_others(region: Region | None, found: Found, text: str, names: Collection[str]) -> bool:
    """Whether a call names a recipient that the request does not offer: one without the prefix of the caller's
    functions, or one behind a marker that other text may have, too."""
    if region is None or region.role != "call":
        return False
    if "name" in found.captures and not TAG.search(text[found.start : found.end]):
        return found.captures["name"] not in names
    if "qualified" not in region.open.pattern.groupindex:
        return False
    return "qualified" not in found.captures and found.captures.get("name") not in names


@lru_cache(maxsize=64)
def _strays_of(texts: frozenset[str]) -> Marker | None:
    return literal_marker(texts) if texts else None


def _watch_of(form: Format, with_calls: bool, call_ends_reasoning: bool) -> Watch:
    regions = form.watched(with_calls=with_calls)
    bare = next((region for region in regions if region.is_bare), None)
    regions = tuple(region for region in regions if not region.is_bare)
    marker = _strays_of(frozenset(_stray_texts(form, regions, with_calls=with_calls)))
    others = () if marker is None else (_watched(None, marker),)
    inside: dict[str, tuple[Watched, ...]] = {}
    for region in regions:
        if region.role == "call":
            continue
        opens = (other for other in regions if other.role != "call" or region.role == "content" or call_ends_reasoning)
        closing = () if region.close is None else (_watched(None, region.close, closes=True),)
        strays = () if region.role == "reasoning" else others
        inside[region.field.name] = (*closing, *(_watched(other, other.open) for other in opens), *strays)
    return Watch((*(_watched(region, region.open) for region in regions), *others), inside, bare)


def _stray_texts(form: Format, regions: Iterable[Region], *, with_calls: bool) -> Iterator[str]:
    """The first tag of each marker that opens a region, and the last one of each that closes it."""
    for region in regions:
        if region.role == "end":
            continue
        for literals, marker, at in (
            (region.field.open_literals, region.open, 0),
            (region.field.close_literals, region.close, -1),
        ):
            if literals:
                yield from (text for text in literals if _TAG.fullmatch(text))
            elif marker is not None and (tags := _TAG.findall(_ESCAPED.sub(r"\1", marker.pattern.pattern))):
                yield tags[at]
    syntax = form.call_syntax
    if with_calls and syntax is not None:
        for text, at in ((syntax.before_all, 0), (syntax.begin, 0), (syntax.end, -1), (syntax.after_all, -1)):
            if tags := _TAG.findall(text):
                yield tags[at]
