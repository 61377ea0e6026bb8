"""Parses calls written as JSON while they arrive: the name, then the arguments piece by piece.

The text is `{"name": ..., "arguments": {...}}`, a list of these, or the arguments alone if the marker had the name.
Models also write `parameters`, put the name last, leave out empty arguments, write them as a string, or write a comma
behind the last part. Every character is read once. Knows no markers.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from inferd.server.tools.format import USUAL_KEYS, JsonKeys
from inferd.server.tools.json_span import JsonSpan
from inferd.server.tools.pieces import BLANK, CallArguments, CallBegun, CallEnded, Piece

_WRAPPER = "function"
"""Key of an object that holds name and arguments, in calls as requests have them."""


class _Next(Enum):
    START = auto()
    OBJECT = auto()
    OBJECT_OR_END = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()
    LIST_COMMA_OR_END = auto()
    ARGUMENTS = auto()


class JsonCalls:
    """Parses calls. `is_done` is set after the last character of the last call, `is_broken` at the first wrong one."""

    def __init__(
        self, name: str | None = None, known_names: Collection[str] | None = None, keys: JsonKeys = USUAL_KEYS
    ) -> None:
        """`name`: name of the one call, if only its arguments are read. `known_names`: any other name is no call."""
        self._keys = keys
        self._is_wrapped = False
        self.is_done = self.is_broken = False
        self.unread: list[str] = []
        """Text that no piece covers yet. If the call is broken, this text is content."""
        self._known_names = known_names
        self._is_list, self.is_nameless = False, name is not None
        self._next = _Next.ARGUMENTS if name is not None else _Next.START
        self._name = name
        self._arguments: str | None = None
        self._has_begun = False
        self._key = ""
        self._span: JsonSpan | None = None
        self._is_streaming = False
        self._held: list[str] = []
        self._pieces: list[Piece] = []

    def further(self, before: str, known_names: Collection[str] | None = None) -> JsonCalls:
        """Parses what follows these calls behind the text `before`, which belongs to it if it is no call."""
        other = JsonCalls(known_names=known_names, keys=self._keys)
        other.unread = [before] if before else []
        return other

    def take(self, text: str) -> tuple[list[Piece], int]:
        """(pieces found, index of the first character that was not read)."""
        at = 0
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self._in_span(text, at) if self._span is not None else self._structure(text, at)
        pieces, self._pieces = self._pieces, []
        return pieces, at

    def _in_span(self, text: str, start: int) -> int:
        assert self._span is not None
        read, end = self._span.take(text, start)
        if not self._is_streaming:
            self._held.append(read)
            self.unread.append(text[start:end])
        elif read:
            self._pieces.append(CallArguments(read))
        self.is_broken = self._span.is_broken
        if self._span.is_done:
            self._span_ended()
        return end

    def _structure(self, text: str, at: int) -> int:
        char = text[at]
        if char in BLANK:
            self.unread.append(char)
            return at + 1
        return at + self._step(char)

    def _step(self, char: str) -> int:
        """Number of characters taken: 1, or 0 if this one begins a value or fits no call."""
        match self._next, char:
            case _Next.START, "[":
                self._is_list, self._next = True, _Next.OBJECT
            case ((_Next.START | _Next.OBJECT | _Next.OBJECT_OR_END), "{"):
                self._next = _Next.KEY_OR_END
            case ((_Next.KEY_OR_END | _Next.KEY), '"'):
                return self._open_span()
            case _Next.COLON, ":":
                self._next = _Next.VALUE
            case ((_Next.VALUE | _Next.ARGUMENTS), _):
                return self._value(char)
            case _Next.COMMA_OR_END, ",":
                self._next = _Next.KEY
            case ((_Next.KEY_OR_END | _Next.KEY | _Next.COMMA_OR_END), "}"):
                if not self._is_wrapped:
                    return self._call_ended()
                self._is_wrapped, self._next = False, _Next.COMMA_OR_END
            case _Next.LIST_COMMA_OR_END, ",":
                self._next = _Next.OBJECT_OR_END
            case ((_Next.LIST_COMMA_OR_END | _Next.OBJECT_OR_END), "]"):
                self.is_done = True
            case _:
                return self._break()
        self.unread.append(char)
        return 1

    def _open_span(self) -> int:
        self._span, self._held = JsonSpan(), []
        return 0

    def _break(self) -> int:
        self.is_broken = True
        return 0

    def _value(self, char: str) -> int:
        if self._next is _Next.VALUE and self._key == _WRAPPER and char == "{" and self._keys.name != _WRAPPER:
            self._is_wrapped, self._next = True, _Next.KEY_OR_END
            self.unread.append(char)
            return 1
        if self._next is _Next.ARGUMENTS or self._key in self._keys.arguments:
            if char not in ('{"n' if self._next is _Next.VALUE else "{"):
                return self._break()
            self._is_streaming = char == "{" and self._name is not None
        elif self._key == self._keys.name and char != '"':
            return self._break()
        if self._is_streaming:
            self._begin()
        return self._open_span()

    def _span_ended(self) -> None:
        self._span = None
        if self._is_streaming:
            self._is_streaming, self._next = False, _Next.COMMA_OR_END
            if self.is_nameless:
                self._call_ended()
            return
        value = "".join(self._held)
        if self._next is not _Next.VALUE:
            self._key_read(json.loads(value))
            return
        self._next = _Next.COMMA_OR_END
        if self._key == self._keys.name:
            self._name_read(json.loads(value))
        elif self._key in self._keys.arguments:
            self._arguments_read(value)

    def _key_read(self, key: str) -> None:
        self._next = _Next.COLON
        if not self._keys.name and self._name is None:
            self._key = self._keys.arguments[0]
            self._name_read(key)
            return
        is_new = (key == self._keys.name and self._name is None) or (
            key in self._keys.arguments and self._arguments is None and not self._has_begun
        )
        is_wrapper = key == _WRAPPER and self._name is None and not self._is_wrapped
        self._key = key
        self.is_broken = not (is_new or is_wrapper or key in self._keys.ignored)

    def _name_read(self, name: str) -> None:
        self._name = name
        is_known = self._known_names is None or name in self._known_names
        self.is_broken = not (name and is_known and _is_text(name))
        if self._arguments is not None and not self.is_broken:
            self._begin()
            self._pieces.append(CallArguments(self._arguments))

    def _arguments_read(self, value: str) -> None:
        """Handle arguments that were not streamed: null, a string that holds them, or an object before the name."""
        if value == "null":
            value = "{}"
        elif value.startswith('"'):
            span, text = JsonSpan(), json.loads(value).strip(BLANK)
            value, end = span.take(text, 0)
            if not (value.startswith("{") and span.is_done and end == len(text) and _is_text(value)):
                self.is_broken = True
                return
        self._arguments = value
        if self._name is not None:
            self._begin()
            self._pieces.append(CallArguments(value))

    def _begin(self) -> None:
        assert self._name is not None
        self._pieces.append(CallBegun(self._name))
        self._has_begun = True
        self.unread = []

    def _call_ended(self) -> int:
        if self._name is None:
            return self._break()
        if not self._has_begun:
            self._begin()
            self._pieces.append(CallArguments("{}"))
        self._pieces.append(CallEnded())
        self._name, self._arguments, self._has_begun = None, None, False
        self.unread = []
        if self._is_list:
            self._next = _Next.LIST_COMMA_OR_END
        else:
            self.is_done = True
        return 1


def _is_text(value: str) -> bool:
    """False if the value has half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
