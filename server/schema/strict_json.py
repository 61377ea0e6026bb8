"""The one reader of JSON that callers wrote: bodies, and texts within them that are JSON again.

Strict means: UTF-8, one value for each key, only finite numbers, text that can be written as UTF-8 again. How much it
holds is counted before it is parsed, because a parser holds the interpreter lock throughout.

No other request is answered while the lock is held, even if the parser runs on a thread. The time depends on the
number of values and escapes, not of bytes. They are counted in slices, between which other threads run. The content of
a string is text and may hold any number of brackets. The bound of numbers is wide: past `MANY_VALUES` the parser reads
them by a function that lets other threads run. The lock is then held for at most 30 ms, whatever the body (15 MiB of
any one kind, and all bounds reached at once; 2 cores, AMD EPYC Zen 4, 2026-11-21).

Also JSON next to orjson: encoded bytes without unused capacity, and values that orjson refuses. An answer repeats parts
of its request, or they are stored with it. So the server refuses what orjson could not write.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from inferd.server.errors import messages as errors
from inferd.server.errors import validation

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


@dataclass(slots=True)
class Counts:
    """Counts so far. Texts of one request that share their counts share the bounds too."""

    num_arrays: int = 0
    num_objects: int = 0
    num_keys: int = 0
    num_values: int = 0
    num_strings: int = 0
    num_escapes: int = 0


def parse(raw: bytes, counts: Counts | None = None) -> object:
    """The value that `raw` is. Raises `ValueError`, with the reason in words, for anything else than strict JSON."""
    if raw.startswith(codecs.BOM_UTF8):
        raise ValueError("it begins with a byte order mark (BOM)")
    decoder = _PATIENT_DECODER if check_bounds(raw, counts) else _DECODER
    try:
        return decoder.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if "set_int_max_str_digits" not in str(error):
            raise
        most = sys.get_int_max_str_digits()
        raise ValueError(f"it has a whole number of more than {most:,} digits, the most allowed") from error


def check_bounds(raw: bytes, counts: Counts | None = None) -> bool:
    """Whether `raw` holds many values, so that they are to be parsed patiently.

    Adds to `counts`. Raises `ValueError`, with the bound in its text, for more than will be parsed, and for a string
    that escapes one half of a surrogate pair: it would parse, and be no text.
    """
    counts = Counts() if counts is None else counts
    num_quotes = depth = 0
    num_strings = counts.num_strings
    for piece, num_backslashes in _pieces(raw):
        counts.num_escapes += num_backslashes + piece.count(b"\\")
        if b"\\u" in piece and _HALF.search(_PAIR.sub(b"", piece)):
            raise ValueError("it has an escape for one half of a surrogate pair without the other half")
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        counts.num_strings = num_strings + num_quotes // 2
        counts.num_arrays += outside.count(b"[")
        counts.num_objects += outside.count(b"{")
        counts.num_keys += outside.count(b":")
        counts.num_values += outside.count(b",")
        depth = _depth(outside.translate(None, _ALL_BUT_BRACKETS), depth)
        _bound("escapes", counts.num_escapes, MAX_ESCAPES)
        _bound("strings", counts.num_strings, MAX_STRINGS)
        _bound("arrays", counts.num_arrays, MAX_ARRAYS)
        _bound("objects", counts.num_objects, MAX_OBJECTS)
        _bound("keys", counts.num_keys, MAX_KEYS)
        _bound("values", counts.num_values, MAX_VALUES)
    return counts.num_values > MANY_VALUES


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
    """The depth after these brackets. Raises `ValueError` if it grew too large."""
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested too deeply: at most {MAX_DEPTH} levels of arrays and objects are allowed")
    return depth


def _bound(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"it has more than {limit} {name}, the most allowed in one request")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key '{errors.shown(key)}' appears twice in one object")
            seen.add(key)
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _whole(digits: str) -> int:
    return int(digits)


def _decimal(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{errors.shown(digits)} is too large for a 64-bit floating-point number")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_decimal)
_PATIENT_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole, parse_float=_decimal
)
"""Three times as slow with whole numbers, but other threads may run whenever it calls a Python function."""


NOT_WRITABLE = "It holds a whole number of more than 64 bits."


def exact(encoded: bytes) -> bytes:
    """The same bytes in an object of exactly their size, for bytes that are kept or wait for a slow reader.

    orjson returns 20 KB in an object of 260 KB, msgspec 1 KB in one of 2.3 KB (orjson 3.13, msgspec 0.22).
    """
    return bytes(memoryview(encoded))


def any_json(value: object) -> bytes:
    """JSON of values from files and settings, which may hold what orjson refuses: whole numbers of more than 64 bits,
    and text that is no UTF-8. Infinities and NaN, which JSON does not have, become null.
    """
    strict = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(strict, separators=(",", ":")).encode()


def is_writable(value: object) -> bool:
    """Whether the answer can repeat it."""
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def check_writable(value: Any) -> Any:
    """A validator: refuses what the answer could not repeat."""
    if not is_writable(value):
        raise validation.invalid_value(NOT_WRITABLE)
    return value


def check_repeated(value: object, where: str) -> None:
    """Raises `RequestError` for a value that the answer could not repeat."""
    if not is_writable(value):
        raise errors.invalid_value(where, value, NOT_WRITABLE)
