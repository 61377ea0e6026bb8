"""How much JSON one body may hold: counted before it is parsed, because a parser holds the interpreter lock throughout.

While the lock is held nobody else is answered, also where the parser runs on a thread. What takes long is the number of
values and escapes, not of bytes, so they are counted, in slices between which others run; what stands in a string is
text and may hold any number of brackets. Numbers get by with a wide bound: past `MANY_VALUES` the parser is to read
them by a function that lets others run. The lock is then held for at most 30 ms, whatever the body (15 MiB of any one
kind, and all bounds reached at once; 2 cores, AMD EPYC Zen 4, 2026-11-21).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_DEPTH = 128
"""Objects and arrays within each other."""
MAX_ARRAYS = 2**15
MAX_OBJECTS = 2**16
MAX_KEYS = 80_000
"""A `logit_bias` of 65,536 tokens, or a conversation of 10,000 messages with tool calls."""
MAX_STRINGS = 2**17
"""Keys included."""
MAX_VALUES = 2**21
"""Commas. Twice the ids of a prompt of a million tokens."""
MAX_ESCAPES = 2**21
"""Twice the characters of a million tokens in a script whose every character is escaped."""
MANY_VALUES = 2**17
"""So many numbers are parsed in 15 ms (2 cores, AMD EPYC Zen 4, 2026-11-21)."""

_SLICE = 64 * 1024
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PAIR = re.compile(_HIGH + _LOW)
_HALF = re.compile(_HIGH + rb"|" + _LOW)
_UNFINISHED = re.compile(rb"(?:" + _HIGH + rb")?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
_LONGEST_UNFINISHED = 11
"""Bytes: a high half and all of its low half but the last digit."""


def check_bounds(raw: bytes) -> bool:
    """Whether `raw` holds many values, so that they are to be parsed patiently.

    Raises `ValueError`, with the bound in its text, for more than will be parsed, and for a string that escapes one
    half of a surrogate pair: it would parse, and be no text.
    """
    num_arrays = num_objects = num_keys = num_values = num_quotes = num_escapes = depth = 0
    for piece, num_backslashes in _pieces(raw):
        num_escapes += num_backslashes + piece.count(b"\\")
        if b"\\u" in piece and _HALF.search(_PAIR.sub(b"", piece)):
            raise ValueError("it escapes one half of a surrogate pair without the other, which is no text")
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        num_arrays += outside.count(b"[")
        num_objects += outside.count(b"{")
        num_keys += outside.count(b":")
        num_values += outside.count(b",")
        depth = _depth(outside.translate(None, _ALL_BUT_BRACKETS), depth)
        _bound("escapes", num_escapes, MAX_ESCAPES)
        _bound("strings", num_quotes // 2, MAX_STRINGS)
        _bound("arrays", num_arrays, MAX_ARRAYS)
        _bound("objects", num_objects, MAX_OBJECTS)
        _bound("keys", num_keys, MAX_KEYS)
        _bound("values", num_values, MAX_VALUES)
    return num_values > MANY_VALUES


def _pieces(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """`raw` in slices that cut no escape and no surrogate pair, each with the escaped backslashes taken out of it.

    Yields (the slice, in which every other backslash begins an escape; how many backslashes were escaped).
    """
    start = 0
    while start < len(raw):
        piece = raw[start : start + _SLICE]
        plain = piece.replace(b"\\\\", b"..")
        if start + _SLICE < len(raw):
            window = plain[-_LONGEST_UNFINISHED:]
            unfinished = _UNFINISHED.search(window)
            assert unfinished is not None, "nothing is unfinished at the end of the empty text"
            plain = plain[: len(plain) - len(window) + unfinished.start()]
        start += len(plain)
        yield plain, piece.count(b"\\\\")


def _depth(brackets: bytes, depth: int) -> int:
    """The depth after these brackets. Raises `ValueError` where it grew too large."""
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested too deeply: at most {MAX_DEPTH} arrays and objects may hold each other")
    return depth


def _bound(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"it holds more {name} than the {limit} that are read from one body")
