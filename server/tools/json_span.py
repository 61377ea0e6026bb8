"""Finds the end of one JSON value in a text that arrives in pieces, and notices text that is no JSON.

Reads every character once, so the result does not depend on how the text was cut. Knows no calls and no schema.
"""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 128
"""Most nested objects and arrays. Deeper nesting is no argument of a call, but a model that repeats itself."""

_BLANK = " \t\n\r"
_HEX = frozenset("0123456789abcdefABCDEF")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.eE0123456789")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_STRING_EVENT = re.compile('["\\\\\x00-\x1f]')


class _Next(Enum):
    """The characters that may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    WORD = auto()
    NUMBER = auto()


class JsonSpan:
    """Reads one value. `is_done` is set after its last character, `is_broken` at the first that fits no JSON.

    Models write line breaks and other control characters in strings, and a comma behind the last part, which JSON
    forbids. `take` returns escapes for the ones and leaves the others out, so that its result is valid JSON.
    """

    __slots__ = ("_comma", "_escape", "_is_key", "_next", "_open", "_token", "_word", "is_broken", "is_done")

    def __init__(self) -> None:
        self.is_done = self.is_broken = False
        self._next = _Next.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._escape = 0
        """Number of hexadecimal digits still to come in a \\u escape."""
        self._word = self._token = ""
        self._comma = ""
        """A comma, with blanks behind it, that is left out if nothing follows it."""

    def take(self, text: str, start: int) -> tuple[str, int]:
        """(JSON read from `text[start:]`, index of the first character that is not part of it)."""
        pieces: list[str] = []
        at = first = start
        while at < len(text) and not (self.is_done or self.is_broken):
            if self._next is _Next.STRING:
                event = _STRING_EVENT.search(text, at)
                at = len(text) if event is None else event.start()
                if event is not None and text[at] < " ":
                    pieces += (text[first:at], f"\\u{ord(text[at]):04x}")
                    at = first = at + 1
                    continue
                if event is None:
                    continue
            elif self._comma:
                at = first = self._behind_comma(text, at, pieces)
                if self._comma or self.is_broken:
                    continue
            elif text[at] == "," and self._next is _Next.COMMA_OR_END:
                pieces.append(text[first:at])
                self._read(",")
                self._comma = ","
                at = first = at + 1
                continue
            at += self._read(text[at])
        pieces.append(text[first:at])
        return "".join(pieces), at

    def _behind_comma(self, text: str, start: int, pieces: list[str]) -> int:
        """Index of the first character behind a comma and blanks, which are part of the JSON unless it ends here."""
        at = start
        while at < len(text) and text[at] in _BLANK:
            at += 1
        self._comma += text[start:at]
        if at < len(text):
            if text[at] == ("}" if self._open[-1] == "{" else "]"):
                self._next = _Next.COMMA_OR_END
            else:
                pieces.append(self._comma)
            self._comma = ""
        return at

    def end(self) -> None:
        """Called when no more text comes: a number may end here."""
        if self._next is _Next.NUMBER and not self._open and _NUMBER.fullmatch(self._token):
            self.is_done = True

    def _read(self, char: str) -> int:
        """Number of characters read: 1, or 0 if this one ends a number, ends the value or breaks it."""
        if self._next is _Next.STRING:
            self._in_string(char)
            return 1
        if self._next is _Next.ESCAPE:
            return self._in_escape(char)
        if self._next is _Next.WORD:
            return self._in_word(char)
        if self._next is _Next.NUMBER:
            return self._in_number(char)
        return 1 if char in _BLANK else self._structure(char)

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._next = _Next.ESCAPE
        elif self._is_key:
            self._is_key, self._next = False, _Next.COLON
        else:
            self._value_ended()

    def _in_escape(self, char: str) -> int:
        if self._escape:
            if char not in _HEX:
                return self._break()
            self._escape -= 1
        elif char == "u":
            self._escape = 4
        elif char not in '"\\/bfnrt':
            return self._break()
        if not self._escape:
            self._next = _Next.STRING
        return 1

    def _in_word(self, char: str) -> int:
        if not self._word.startswith(char):
            return self._break()
        self._word = self._word[1:]
        if not self._word:
            self._value_ended()
        return 1

    def _in_number(self, char: str) -> int:
        if char in _NUMBER_CHARS:
            self._token += char
            return 1
        if not _NUMBER.fullmatch(self._token):
            return self._break()
        self._value_ended()
        return 0

    def _structure(self, char: str) -> int:
        expected = self._next
        if expected in (_Next.VALUE, _Next.VALUE_OR_END) and char != "]":
            return self._value(char)
        if expected in (_Next.KEY, _Next.KEY_OR_END) and char == '"':
            self._is_key, self._next = True, _Next.STRING
            return 1
        if expected is _Next.COLON and char == ":":
            self._next = _Next.VALUE
            return 1
        if expected is _Next.COMMA_OR_END and char == ",":
            self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
            return 1
        may_end = expected in (_Next.VALUE_OR_END, _Next.KEY_OR_END, _Next.COMMA_OR_END)
        if may_end and self._open and char == ("}" if self._open[-1] == "{" else "]"):
            self._open.pop()
            self._value_ended()
            return 1
        return self._break()

    def _value(self, char: str) -> int:
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                return self._break()
            self._open.append(char)
            self._next = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END
        elif char == '"':
            self._next = _Next.STRING
        elif char in _WORDS:
            self._word, self._next = _WORDS[char][1:], _Next.WORD
        elif char in "-0123456789":
            self._token, self._next = char, _Next.NUMBER
        else:
            return self._break()
        return 1

    def _value_ended(self) -> None:
        if self._open:
            self._next = _Next.COMMA_OR_END
        else:
            self.is_done = True

    def _break(self) -> int:
        self.is_broken = True
        return 0
