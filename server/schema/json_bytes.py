"""JSON next to orjson: encoded bytes without unused capacity, and values that orjson refuses.

An answer repeats parts of its request, or they are stored with it. So the server refuses what orjson could not write.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from inferd.server.errors import messages as errors
from inferd.server.errors import validation

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
