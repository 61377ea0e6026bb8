"""Long lists of numbers in a request: token ids, prompts of them, and `logit_bias`.

They are checked in slices, because pydantic holds the interpreter lock while it checks a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

from pydantic import Field, WithJsonSchema

from inferd.server.errors import messages as errors
from inferd.server.schema.values import JsonObject, ReadBy, Whole, check_number

MAX_LISTED_IDS = 65_536
"""Token ids in one list that is not a prompt."""
MAX_BIAS = 100
_PIECE = 65_536

T = TypeVar("T")

TokenId = Annotated[Whole, Field(ge=0)]


def pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split a long sequence for a thread that works on all its items, so that other threads run between two pieces.

    One C call over a sequence holds the interpreter lock until it is done: 50 ms for the types of two million ids
    (Intel Xeon, 2026-11-22).
    """
    for first in range(0, len(values), _PIECE):
        yield values[first : first + _PIECE]


def check_array(value: object, where: str, name: str, min_length: int, max_length: int | None) -> None:
    """Raises `RequestError` for anything but a list of such a length. `name`: as in "expected {name}, but got ..."."""
    if not isinstance(value, list):
        raise errors.invalid_type(where, name, value)
    if len(value) < min_length:
        raise errors.empty_array(where, min_length)
    if max_length is not None and len(value) > max_length:
        raise errors.array_too_long(where, max_length, len(value))


def read_token_ids(value: object, where: str, min_length: int = 0, max_length: int | None = None) -> tuple[int, ...]:
    """Raises `RequestError`. The vocabulary's bound is checked later."""
    check_array(value, where, "an array of integers", min_length, max_length)
    assert isinstance(value, list)
    if any(set(map(type, piece)) - {int} for piece in pieces(value)):
        return tuple(_whole(item, f"{where}[{i}]") for i, item in enumerate(value))
    return tuple(value)


def is_whole(value: object) -> bool:
    """Whether a JSON value is a whole number: 1.0 is one, true is none."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _whole(value: object, where: str) -> int:
    if not is_whole(value):
        raise errors.invalid_type(where, "an integer", value)
    return int(value)  # type: ignore[call-overload, no-any-return]


def token_ids(min_length: int, max_length: int) -> ReadBy:
    """A list of token ids, as an annotation."""
    sent = Annotated[list[TokenId], Field(min_length=min_length, max_length=max_length)]
    return ReadBy(lambda value, where: read_token_ids(value, where, min_length, max_length), sent)


def read_logit_bias(value: object, where: str) -> tuple[tuple[int, float], ...]:
    """{"token id": added value} as pairs in the order of ids. Raises `RequestError`."""
    if not isinstance(value, dict):
        raise errors.invalid_type(where, "an object", value)
    if len(value) > MAX_LISTED_IDS:
        raise errors.too_many_properties(where, MAX_LISTED_IDS, len(value))
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        # Bounded before `int`, which is quadratic in the number of digits.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise errors.invalid_value(where, key, "Keys must be token ids, as strings of digits.")
        if int(key) in pairs:
            raise errors.invalid_value(where, key, "Each token id may be given once.")
        pairs[int(key)] = check_number(bias, f"{where}.{key}", -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(pairs.items()))


LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    ReadBy(read_logit_bias, JsonObject),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "maxProperties": MAX_LISTED_IDS,
        }
    ),
]
