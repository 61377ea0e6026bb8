"""JSON of a request that the answer repeats, or that is stored with it: the server must be able to write it again."""

from __future__ import annotations

from typing import Any

import orjson

from inferd.server.errors import table as errors
from inferd.server.errors import validation

NOT_WRITABLE = "It holds a whole number of more than 64 bits."


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
