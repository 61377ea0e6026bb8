"""Finds calls in the content of an answer in which the format of the model found none.

Models write calls of offered tools in other ways than their template shows: in a fence of Markdown, as bare JSON, in
the tags of another model, or as Python. The content is calls if nothing but these stands behind its prose, if each
names an offered tool, and if its arguments fit the tool's schema. Otherwise it is text. Text is held back only while it
may still be calls, and read a bounded number of times. Knows no format of a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any

from inferd.server.tools.argument_schema import ArgumentSchema, once, schemas_of, value_of
from inferd.server.tools.closed_calls import dumped
from inferd.server.tools.json_span import JsonSpan
from inferd.server.tools.markers import compiled, recompiled
from inferd.server.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, first_calls
from inferd.server.tools.python_calls import literal, python_calls
from inferd.server.tools.schema_fit import Check, fits

MAX_CHARS = 32_768
"""Longest text that may be calls. All of it is parsed at once when the answer ends."""
_MAX_LOOSE_CHARS, _MAX_LOOSE_MARKS = 8_192, 1_500
"""Characters, and marks other than letters, of a text that is no JSON and may be Python. It is slow to parse."""
_MAX_CALLS = 128
_MAX_NAMES_CHARS = 4_096
"""Characters of all names that a pattern may list. With more it takes any name, so a little more text is held back:
a pattern of all of them would take long to compile."""
_ANY_NAME = r"""[^"'\s()<>]{1,128}"""

_TAG = r"(?:\w{1,32}[_:])?(?:tools|(?:tool|function)_calls?)"
"""Name of a tag around calls. Many families have a prefix of their own."""
_BEFORE = (
    r"(?:```[A-Za-z_]{0,16}[ \t]{0,8}\r?\n\s{0,32})?"
    rf"(?:(?:<{_TAG}>\s{{0,32}}){{1,2}}|(?<![^\n>])functools(?=\[))?"
)
_BETWEEN = rf"(?:[\s,;]|</(?:{_TAG}|function)>|```(?!\w))"
_END_OF_CALL = re.compile(rf"</{_TAG}>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,128})>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_QUOTES_AND_BRACKETS = re.compile(r"""["'()\[\]{}]""")
_MARK = re.compile(r"[^\w\s]")
_DOUBLED = re.compile(r"\A\{(\{.*\})\}\Z", re.DOTALL)
"""An object with each outer brace twice, as templates of texts write it."""
_STRING_PART = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_STARTS_LINE = ("", "\n", ">")
_BEGINS = frozenset("`<[{\n>")
"""A call begins with one of these, or behind one."""
_ARGUMENTS = ("arguments", "parameters")
_EDGE_BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request, prepared once for all of its choices."""

    schemas: Mapping[str, ArgumentSchema]
    """Schema of the arguments of each tool, by its name."""
    begin: Any = field(repr=False)
    """Pattern of the text before and in a call up to its name."""
    max_calls: int | None = None

    @classmethod
    def of(cls, tools: Iterable[Mapping[str, object]], max_calls: int | None) -> Offer | None:
        """None if there are no tools."""
        schemas = schemas_of(tools)
        if not schemas:
            return None
        return cls(schemas, _pattern_of(tuple(schemas)), max_calls)


@lru_cache(maxsize=32)
def _pattern_of(names: tuple[str, ...]) -> Any:
    longest_first = sorted(names, key=len, reverse=True)
    is_short = sum(map(len, names)) <= _MAX_NAMES_CHARS
    known = "|".join(map(re.escape, longest_first)) if is_short else _ANY_NAME
    named = rf"""["']name["']\s{{0,8}}:\s{{0,8}}["'](?P<name>{known})["']"""
    an_object = rf"""\{{{{1,2}}\s{{0,32}}(?:{named}|["'](?:arguments|parameters)["']\s{{0,8}}:)"""
    python = rf"(?:\[\s{{0,32}}|(?<![^\n>]))(?P<called>{known})\("
    parts = rf"(?P<json>(?:\[\s{{0,32}})?{an_object})|(?P<python>{python})|<function=(?P<tag>{known})>"
    return recompiled(rf"{_BEFORE}(?:{parts})")


class _State(Enum):
    PROSE = auto()
    BEGIN = auto()
    """Behind a call: another may begin."""
    BODY = auto()


class _Balance:
    """Finds the end of a value in brackets, in JSON or Python, in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._num_open = 0
        self._quote = ""

    def end(self, text: str, start: int) -> tuple[int | None, int]:
        """(index behind the value, or None; index up to which the text was read)."""
        at = start
        while at < len(text):
            pattern = _STRING_PART[self._quote] if self._quote else _QUOTES_AND_BRACKETS
            found = pattern.search(text, at)
            if found is None:
                return None, len(text)
            mark, at = found[0], found.end()
            if mark == "\\":
                if at == len(text):
                    return None, at - 1
                at += 1
            elif mark in "\"'":
                self._quote = "" if self._quote else mark
            else:
                self._num_open += 1 if mark in "([{" else -1
                if self._num_open <= 0:
                    return at, at
        return None, at


@dataclass(slots=True)
class _Written:
    """A call, or a list of them, as the model wrote it: from `start` to `end` in the held text."""

    kind: str
    """json, python, or the name in a tag."""
    start: int
    end: int | None = None


class SecondLook:
    """Reads the content of one answer."""

    def __init__(self, offer: Offer) -> None:
        self.num_calls = 0
        """Number of calls that were found."""
        self._offer = offer
        self._is_over = False
        """Whether the rest of the answer is text."""
        self._begin = offer.begin
        self._between = compiled(_BETWEEN)
        self._reset(_State.PROSE)
        self._last_char = ""
        """The character of content before `_text`."""
        self._text = ""

    def _reset(self, state: _State) -> None:
        self._state = state
        self._at = 0
        """Index up to which `_text` was read."""
        self._calls: list[_Written] = []
        self._balance = _Balance()

    @property
    def is_in_call(self) -> bool:
        """Whether the text may be in a call, or behind one."""
        return not self._is_over and self._state is not _State.PROSE

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces that are certain after these."""
        if self._is_over:
            return list(pieces)
        taken: list[Piece] = []
        for piece in pieces:
            if self._is_over:
                taken.append(piece)
            elif isinstance(piece, Content):
                self._text += piece.text
                taken += self._read()
            elif isinstance(piece, CallBegun):
                taken += (*self._give_up(), piece)
            else:
                # Reasoning between two parts of the content parts what is written in them.
                taken += (*self._released(len(self._text)), piece)
                self._reset(_State.PROSE)
        return taken

    def finish(self) -> list[Piece]:
        """The last pieces, when no more text comes."""
        if self._state is _State.BEGIN and not self._is_over:
            self._behind_call(is_end=True)
        if self._is_over or self._state is _State.PROSE:
            return self._give_up()
        last = self._calls[-1]
        if last.end is None and last.kind not in ("json", "python"):
            last.end = len(self._text)
        is_read = self._state is _State.BEGIN and self._at == len(self._text)
        calls = self._all_calls() if is_read or last.end == len(self._text) else None
        if calls is None:
            return self._give_up()
        self._is_over = True
        pieces: list[Piece] = []
        self.num_calls = len(calls)
        for name, arguments in calls:
            pieces += (CallBegun(name), CallArguments(arguments), CallEnded())
        return first_calls(pieces, self._offer.max_calls)

    def _released(self, num_chars: int) -> list[Piece]:
        text, self._text = self._text[:num_chars], self._text[num_chars:]
        self._last_char = text[-1:] or self._last_char
        return [Content(text)] if text else []

    def _give_up(self) -> list[Piece]:
        self._is_over = True
        return self._released(len(self._text))

    def _read(self) -> list[Piece]:
        released: list[Piece] = []
        while True:
            if self._state is _State.PROSE:
                released += self._released(self._to_begin())
                if self._state is _State.PROSE:
                    return released
            if len(self._text) > MAX_CHARS:
                return [*released, *self._give_up()]
            is_open = self._in_body() if self._state is _State.BODY else self._behind_call(is_end=False)
            if is_open is None:
                return [*released, *self._give_up()]
            if not is_open:
                return released

    def _to_begin(self) -> int:
        """Number of characters before what may be calls, blanks beside them aside. Reads the beginning of a call."""
        if not self._text.strip(_EDGE_BLANKS):
            return 0
        context = self._last_char
        if context not in _STARTS_LINE and _BEGINS.isdisjoint(self._text):
            return len(self._text.rstrip(_EDGE_BLANKS))
        text = context + self._text
        found = self._begin.search(text, len(context), partial=True)
        while found is not None and not self._is_offered(found):
            found = self._begin.search(text, found.start() + 1, partial=True)
        if found is None or found.start() == len(text):
            return len(self._text.rstrip(_EDGE_BLANKS))
        start = len(text[len(context) : found.start()].rstrip(_EDGE_BLANKS))
        if not found.partial:
            self._begun(found, len(context) + start)
        return start

    def _is_offered(self, found: Any) -> bool:
        """Whether the name in the beginning of a call, if it has come, is one of the tools'."""
        name = None if found.partial else found["name"] or found["called"] or found["tag"]
        return name is None or name in self._offer.schemas

    def _begun(self, found: Any, offset: int) -> None:
        """A call begins with this match, whose positions are `offset` characters larger than those in the held text."""
        tag = found["tag"]
        kind = "json" if found["json"] else "python" if found["python"] else tag
        start = found.end() if tag else found.start(kind)
        self._calls.append(_Written(kind, start - offset))
        self._state, self._at, self._balance = _State.BODY, start - offset, _Balance()

    # Each step below returns whether another may follow now; None: the text is no calls.

    def _in_body(self) -> bool | None:
        call = self._calls[-1]
        if call.kind in ("json", "python"):
            call.end, self._at = self._balance.end(self._text, self._at)
        else:
            end = self._text.find("</function>", max(call.start, self._at - len("</function>")))
            call.end = None if end < 0 else end
            self._at = len(self._text) if end < 0 else end
        if call.end is None:
            return False
        self._state = _State.BEGIN
        return True

    def _behind_call(self, *, is_end: bool) -> bool | None:
        while self._at < len(self._text):
            found = self._between.match(self._text, self._at, partial=not is_end)
            if found is None:
                break
            if found.partial or (found[0] == "```" and found.end() == len(self._text) and not is_end):
                return False
            self._at = found.end()
        if self._at == len(self._text):
            return False
        found = self._begin.match(self._text, self._at, partial=not is_end)
        if found is None or not self._is_offered(found) or len(self._calls) == _MAX_CALLS:
            return None
        if found.partial:
            return False
        self._begun(found, 0)
        return True

    def _all_calls(self) -> list[tuple[str, str]] | None:
        """(name, arguments as JSON) of each call; None if one of them is no call."""
        found: list[tuple[str, str]] = []
        for written in self._calls:
            calls = _calls_of(written.kind, self._text[written.start : written.end], self._offer.schemas)
            if calls is None:
                return None
            found += calls
        return found


def _calls_of(kind: str, text: str, schemas: Mapping[str, ArgumentSchema]) -> list[tuple[str, str]] | None:
    calls: object
    if kind == "json":
        calls = _json_of(_DOUBLED.sub(r"\1", text))
    elif kind == "python":
        calls = python_calls(text, mends=False) if _is_short(text) else None
    else:
        calls = {"name": kind, "arguments": _in_tag(text, schemas[kind])}
    found: list[tuple[str, str]] = []
    for call in calls if isinstance(calls, list) else [calls]:
        if not isinstance(call, dict) or len(call) != 2 or not set(call) <= {"name", *_ARGUMENTS}:
            return None
        name, arguments = call.get("name"), next((call[key] for key in _ARGUMENTS if key in call), None)
        if isinstance(arguments, str):
            arguments = _json_of(arguments)
        if not isinstance(name, str) or name not in schemas or not isinstance(arguments, dict):
            return None
        schema = schemas[name].schema
        if not (_are_arguments(arguments, schema) and fits(arguments, schema)):
            return None
        found.append((name, dumped(arguments)))
    return found or None


def _are_arguments(arguments: Mapping[str, object], schema: object) -> bool:
    """Whether these are arguments of a tool and not their schema, which models write that list their tools. A schema
    without `additionalProperties` allows both. Small models copy a key of the schema, such as `required`, into
    arguments, so one known name is enough."""
    if not isinstance(schema, Mapping) or "additionalProperties" in schema or "patternProperties" in schema:
        return isinstance(schema, Mapping) or not arguments
    properties = schema.get("properties")
    known = set(properties if isinstance(properties, Mapping) else ())
    has_parts = any(name in schema for name in ("$ref", "allOf", "anyOf", "oneOf"))
    is_schema = "properties" in arguments
    return has_parts or set(arguments) <= known or (not known.isdisjoint(arguments) and not is_schema)


def _json_of(text: str) -> object:
    """The value of JSON as models write it: with a comma behind the last part, or as Python writes it. None if it is
    neither, or has a key twice."""
    text = text.strip()
    try:
        return json.loads(text, strict=False, object_pairs_hook=once, parse_constant=_unknown)
    except (ValueError, RecursionError):
        if not _is_short(text):
            return None
    span = JsonSpan()
    mended, end = span.take(text, 0)
    if not (span.is_done and end == len(text)):
        return literal(text)
    try:
        return json.loads(mended, object_pairs_hook=once)
    except (ValueError, RecursionError):
        return None


def _is_short(text: str) -> bool:
    return len(text) <= _MAX_LOOSE_CHARS and len(_MARK.findall(text)) <= _MAX_LOOSE_MARKS


def _unknown(word: str) -> object:
    raise ValueError(word)


def _without_ends(text: str) -> str:
    """The text without the blanks and the tags at its end."""
    end = len(text)
    while end:
        if text[end - 1].isspace():
            end -= 1
            continue
        start = text.rfind("</", 0, end)
        if start < 0 or _END_OF_CALL.fullmatch(text, start, end) is None:
            break
        end = start
    return text[:end]


def _in_tag(text: str, schema: ArgumentSchema) -> object:
    """The arguments between tags of a function: JSON, or each in a tag of its own."""
    text = _without_ends(text)
    if not text.lstrip().startswith("<parameter="):
        return _json_of(text) if text.strip() else {}
    found: dict[str, object] = {}
    check, at = Check(schema.root), 0
    while (match := _PARAMETER.match(text, at)) is not None:
        if match[1] in found:
            return None
        found[match[1]], at = _argument(match[2], schema.part(match[1]), check), match.end()
    return found if not text[at:].strip() else None


def _argument(text: str, schema: ArgumentSchema, check: Check) -> object:
    """The value of an argument in tags: as its schema's types say, or JSON if that is all that fits."""
    value = value_of(text, schema.types)
    if not isinstance(value, str) or check.fits(value, schema.schema):
        return value
    other = _json_of(text)
    return value if other is None or not check.fits(other, schema.schema) else other
