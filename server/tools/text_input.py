"""Reads the text out of the arguments of a call to a custom tool, while the model writes them.

The model calls the tool as a function of one string, `{"input": "..."}`. The caller gets the string itself.
"""

from __future__ import annotations

import json
import re

from inferd.server.schema.caller_tool import TEXT_KEY

_BEGIN = re.compile(rf'\s*\{{\s*"{TEXT_KEY}"\s*:\s*"')
_LONGEST_BEGIN = 256
"""Characters that a beginning with blanks may have."""
_PIECE = re.compile(
    r"""(?: [^"\\]++
          | \\ [^u]
          | \\ u (?! [dD][89abAB][0-9a-fA-F]{2} (?: \\ (?: u [0-9a-fA-F]{0,3} )? )? \Z ) [0-9a-fA-F]{4}
          | \\ u (?= [0-9a-fA-F]{0,3} [^0-9a-fA-F] )
        )*+""",
    re.VERBOSE,
)
"""Characters and whole escapes, also those that JSON does not have. The first half of a surrogate pair waits for the
escape behind it."""
_ESCAPE = re.compile(r'\\(u[0-9a-fA-F]{4}|["\\/bfnrt])?')


class TextInput:
    """Reads one call's arguments."""

    def __init__(self) -> None:
        self._held = ""
        """Characters that are not decoded yet."""
        self._is_open = self._is_over = False
        """Whether the string has begun, and whether it has ended."""
        self._others: list[str] = []
        """Arguments of another form."""

    def feed(self, text: str) -> str:
        """The characters of the string that are certain after this text."""
        if self._is_over:
            return ""
        if self._others:
            self._others.append(text)
            return ""
        self._held += text
        if not self._is_open:
            begin = _BEGIN.match(self._held)
            if begin is None:
                if len(self._held) > _LONGEST_BEGIN:
                    self._others, self._held = [self._held], ""
                return ""
            self._held, self._is_open = self._held[begin.end() :], True
        return self._decoded()

    def finish(self) -> str:
        """The rest, when the arguments end. Arguments of another form become their only text, or stay as they are."""
        if self._is_over or self._is_open:
            return ""
        arguments = "".join((*self._others, self._held))
        self._others, self._held = [], ""
        return _only_text(arguments)

    def _decoded(self) -> str:
        match = _PIECE.match(self._held)
        assert match is not None
        self._is_over = self._held.startswith('"', match.end())
        self._held = self._held[match.end() :]
        return _unescaped(match[0])


def _unescaped(piece: str) -> str:
    """The characters of a piece of the string. An escape that JSON does not have stays as it is."""
    valid = _ESCAPE.sub(lambda escape: escape[0] if escape[1] else r"\\", piece)
    text: str = json.loads(f'"{valid}"', strict=False)
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair becomes a question mark


def _only_text(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    return value if isinstance(value, str) else arguments
