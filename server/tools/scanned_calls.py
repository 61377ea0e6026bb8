"""Reads calls whose values need no marker behind them, because each shows its end by itself.

    <call:find>{city=«Rome»}{days=3}</call>      [find(city=Rome, days=3), stop()]

A value is JSON, a text in quotes, or further values in tags. Otherwise it is a text that ends before the next key, or
before the end of the call. The schema of an argument tells a number from a text. Knows no regions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from inferd.server.tools.argument_schema import ArgumentSchema, value_of
from inferd.server.tools.format import KEY, CallSyntax, Tags
from inferd.server.tools.patterns import flexible
from inferd.server.tools.python_calls import literal

SchemaOf = Callable[[str], ArgumentSchema]
"""Key of an argument -> its schema."""

_DECODER = json.JSONDecoder(strict=False)
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_NAME = r"(?P<name>[\w.\-]{1,128})"
_BLANKS = r"\s{0,64}"
_MAX_DEPTH = 32
_MAX_WASTED = 256
"""Keys in one call that may be read in vain, as those of values in tags that turn out to be none. Without a bound each
level of tags would read what follows once more for each of its keys: 221 characters took a second."""


@dataclass(frozen=True, slots=True)
class _Patterns:
    """Patterns of the texts around keys and values."""

    key: str
    separator: str
    kinds: Mapping[str, str]
    """Text between key and value, without blanks -> JSON type of the value."""


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@lru_cache(maxsize=32)
def _patterns_of(tags: Tags) -> _Patterns:
    betweens = dict.fromkeys((tags.between, *(text for _, text in tags.betweens)))
    alternatives = "|".join(_bounded(text) for text in sorted(betweens, key=len, reverse=True))
    first = re.escape(tags.between.strip()[:1] or "=")
    word = rf"[^\s/{first}][^\n{first}]{{0,255}}?" if tags.before.strip() else r"[\w.\-]{1,256}"
    key = rf"{_bounded(tags.before)}(?P<key>{word})(?P<between>{alternatives})"
    separator = _bounded(tags.separator) if tags.separator.strip() else _BLANKS
    return _Patterns(key, separator, {_squeezed(text): kind for kind, text in tags.betweens})


def _bounded(text: str) -> str:
    """A pattern of the text with few blanks, so that a search stays linear."""
    return flexible(text).replace(r"\s*", _BLANKS)


def arguments_of(text: str, tags: Tags, schema_of: SchemaOf) -> dict[str, object] | None:
    """The arguments that a text consists of; None if it has anything else, or a key twice."""
    found = _Scan(text, tags, r"\s*\Z").arguments(0, schema_of)
    return None if found is None else found[0]


def calls_in(
    text: str, syntax: CallSyntax, tags: Tags, schema_of: Callable[[str], SchemaOf]
) -> list[dict[str, object]] | None:
    """`name` and `arguments` of the calls that a text consists of; None if it has anything else. The text may lack what
    surrounds all calls."""
    begin = re.compile(rf"{_BLANKS}{_bounded(syntax.begin.strip())}{_BLANKS}{_NAME}{_bounded(syntax.between)}")
    after_all, separator = _bounded(syntax.after_all.strip()), _bounded(syntax.separator.strip())
    closing = (
        rf"{_BLANKS}{_bounded(syntax.end.strip())}(?:(?P<last>(?:{_BLANKS}{after_all})?\s*\Z)"
        rf"|{_BLANKS}{separator}(?={_BLANKS}[\w.\-]))"
    )
    scan, closed_by = _Scan(text, tags, closing), re.compile(closing)
    opened = re.compile(rf"\s*(?:{_bounded(syntax.before_all.strip())})?").match(text)
    at = 0 if opened is None else opened.end()
    found: list[dict[str, object]] = []
    while (match := begin.match(text, at)) is not None:
        read = scan.arguments(match.end(), schema_of(match["name"]))
        if read is None:
            return None
        found.append({"name": match["name"], "arguments": read[0]})
        closed = closed_by.match(text, read[1])
        assert closed is not None
        if closed["last"] is not None:
            return found
        at = closed.end()
    return None


class _Scan:
    """Reads the arguments of calls in a text."""

    def __init__(self, text: str, tags: Tags, closing: str, wasted: list[int] | None = None) -> None:
        """`closing`: pattern of the end of a call. `wasted`: one number, which the scans of a call share."""
        self._text, self._tags = text, tags
        self._wasted = [0] if wasted is None else wasted
        # Whether a string is all of the text up to a marker. Otherwise it may be in quotes, which are not part of it.
        self._is_exact = tags.is_raw and not tags.string_end and tags.end.strip() not in ("", "'", '"')
        patterns = _patterns_of(tags)
        self._kinds = patterns.kinds
        self._first = _compiled(f"{_BLANKS}{patterns.key}")
        self._further = _compiled(f"{patterns.separator}{patterns.key}")
        self._closing = _compiled(closing)
        self._follows = f"(?:{closing}|{patterns.separator}{patterns.key})"
        """Pattern of the text that may follow the end of a value."""

    def arguments(self, at: int, schema_of: SchemaOf) -> tuple[dict[str, object], int] | None:
        """(the arguments from `at` on, index at which the end of the call begins)."""
        found: dict[str, object] = {}
        self._wasted[0] = 0
        while self._closing.match(self._text, at) is None:
            begun = (self._further if found else self._first).match(self._text, at)
            if begun is None or begun["key"] in found:
                return None
            read = self._value(begun, schema_of(begun["key"]), 0)
            if read is None:
                return None
            found[begun["key"]], at = read
        return found, at

    def _value(self, begun: re.Match[str], schema: ArgumentSchema, depth: int) -> tuple[object, int] | None:
        """(value behind a key, index behind its end)."""
        key, start = begun["key"], begun.end()
        kind = self._kinds.get(_squeezed(begun["between"]), "")
        if kind == "string" and self._tags.string_end:
            return self._text_until(self._end(self._tags.string_end, key), start)
        end, types = self._end(self._tags.end, key), schema.types
        may_nest = bool(self._tags.item) and (not types or not types.isdisjoint(("object", "array")))
        if may_nest and (inner := self._nested(end, key, start, schema, depth)) is not None:
            return inner
        if self._is_exact and "string" in types:
            whole = self._text_until(end, start)
            return None if whole is None else (value_of(whole[0], types), whole[1])
        for read in (self._json, self._quoted):
            value, at = read(start)
            found = None if at is None else end.match(self._text, at)
            if found is not None:
                return self._fitting(value, self._text[start:at], types), found.end("end")
        text = self._text_until(end, start)
        return None if text is None else (self._fitting_text(text[0], types), text[1])

    def _end(self, text: str, key: str) -> re.Pattern[str]:
        """A pattern of the end of a value, if another key follows or the call ends."""
        return _compiled(f"(?P<end>{_bounded(text.replace(KEY, key))})(?={self._follows})")

    def _json(self, at: int) -> tuple[object, int | None]:
        start = at + len(self._text[at : at + 64]) - len(self._text[at : at + 64].lstrip())
        try:
            return _DECODER.raw_decode(self._text, start)
        except (ValueError, RecursionError):
            return None, None

    def _quoted(self, at: int) -> tuple[object, int | None]:
        found = _QUOTED.match(self._text, at)
        value = None if found is None else literal(found[0])
        return (value, found.end()) if found is not None and isinstance(value, str) else (None, None)

    def _text_until(self, end: re.Pattern[str], start: int) -> tuple[str, int] | None:
        """(text up to the first end, index behind it)."""
        found = end.search(self._text, start)
        return None if found is None else (self._text[start : found.start()], found.end("end"))

    def _nested(
        self, end: re.Pattern[str], key: str, start: int, schema: ArgumentSchema, depth: int
    ) -> tuple[object, int] | None:
        """An object or a list in tags of its own, and the index behind the end of its value."""
        if depth > _MAX_DEPTH or self._wasted[0] > _MAX_WASTED or self._first.match(self._text, start) is None:
            return None
        item, types = self._tags.item, schema.types
        inner = _Scan(self._text, self._tags, f"{_BLANKS}{_bounded(self._tags.end.replace(KEY, key))}", self._wasted)
        pairs: list[tuple[str, object]] = []
        at: int | None = start
        while at is not None and (begun := self._first.match(self._text, at)) is not None:
            is_item = begun["key"] == item and "object" not in types
            read = inner._value(begun, schema.items if is_item else schema.part(begun["key"]), depth + 1)
            at = None if read is None else read[1]
            if read is not None:
                pairs.append((begun["key"], read[0]))
        closed = None if at is None else end.match(self._text, at)
        keys = {name for name, _ in pairs}
        if closed is None:
            self._wasted[0] += 1 + len(pairs)
            return None
        if keys == {item} and "object" not in types:
            return [value for _, value in pairs], closed.end("end")
        return (dict(pairs), closed.end("end")) if len(keys) == len(pairs) else None

    def _fitting(self, value: object, written: str, types: frozenset[str]) -> object:
        """JSON or a quoted text as the schema wants it: some templates quote every value, and some quote none."""
        if isinstance(value, str) and "string" not in types:
            return value_of(value, types)
        is_text = self._tags.is_raw and types == {"string"} and not isinstance(value, str)
        return written if is_text else value

    def _fitting_text(self, text: str, types: frozenset[str]) -> object:
        if not text and self._tags.item and types & {"object", "array"}:
            return {} if "object" in types else []
        if types and self._tags.is_raw:
            return value_of(text, types)
        value = literal(text.strip()) if text.strip() else None
        return text if value is None else value


def _squeezed(text: str) -> str:
    return "".join(text.split())
