"""Values and texts of a file as a message shows them: on one line and of bounded length, whatever a stranger wrote."""

from __future__ import annotations

import reprlib

MAX_MESSAGE = 960
"""Most characters of a message for a user. With the time, the level or the program's name before it, a line has at most
1,000."""
_MAX_SHOWN = 200
_MAX_BITS = 256
_GAP = " ... "


class _Short(reprlib.Repr):
    """`repr` of the beginning of each text and list. It never visits the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 8, 8, 4
        self.maxstring = self.maxother = _MAX_SHOWN

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write a number of more than 4,300 digits."""
        return repr(value) if value.bit_length() <= _MAX_BITS else "a number of more than 77 digits"


_SHORT = _Short()


def shown(value: object) -> str:
    """A value of a file for a message, like `repr`, but cut if it is long."""
    return clipped(_SHORT.repr(value), _MAX_SHOWN)


def clipped(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text` on one line. A long one keeps its beginning and its end. Characters that a terminal would obey, and those
    that UTF-8 cannot encode, are escaped."""
    line = cut(" ".join(text.split()), limit)
    return cut("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line), limit)


def cut(text: str, limit: int = MAX_MESSAGE) -> str:
    """The beginning and the end of a text that is longer than `limit`."""
    if len(text) <= limit:
        return text
    kept = limit - len(_GAP)
    return text[: kept - kept // 2] + _GAP + text[len(text) - kept // 2 :]
