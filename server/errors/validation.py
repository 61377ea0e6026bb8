"""Turns pydantic's errors into OpenAI's: one `RequestError` with the code and the path of the first wrong value.

Validators raise three kinds of errors, and this file makes the first two:
- pydantic's own, such as `int_type`: the table below has the code of each;
- `missing_key` and `unknown_key`, for a key of an object within the request;
- `refused`, which carries a complete `RequestError`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors

ABSENT = object()
"""Stands for a value that is not given, and must be although its field may be left out."""

_Details = Mapping[str, Any]

_JSON_TYPES = {
    "int_type": "an integer",
    "float_type": "a decimal number",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}


def refused(error: RequestError) -> PydanticCustomError:
    """The error that a validator raises to refuse the request with `error`."""
    return PydanticCustomError("refused", "The value is refused.", {"error": error})


def missing_key(key: str) -> PydanticCustomError:
    return PydanticCustomError("missing_key", "A key is missing.", {"key": key})


def unknown_key(key: str, near: str | None) -> PydanticCustomError:
    """`near`: the key that is likely meant."""
    return PydanticCustomError("unknown_key", "A key is unknown.", {"key": key, "near": near})


def refused_key(key: str, way_out: str) -> PydanticCustomError:
    return PydanticCustomError("refused_key", "A key is not served.", {"key": key, "way_out": way_out})


def wrong_type(expected: str) -> PydanticCustomError:
    """`expected` as in "expected a string, but got an integer instead"."""
    return PydanticCustomError("wrong_type", "The value has the wrong type.", {"expected": expected})


def too_long(max_length: int) -> PydanticKnownError:
    """The error of a list with more than `max_length` items."""
    return PydanticKnownError("too_long", {"field_type": "List", "max_length": max_length, "actual_length": None})


def unsupported_value(rule: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported_value", "The value is not served.", {"rule": rule})


def wrong_form(expected: str, types: Sequence[str], rule: str) -> PydanticCustomError:
    """The error of an object whose `type` is none of `types`. `rule`: the reason why other types are not served."""
    details = {"expected": expected, "types": " ".join(types), "rule": rule}
    return PydanticCustomError("wrong_form", "The value has a wrong form.", details)


def unsupported_type(kind: str, rule: str) -> PydanticCustomError:
    """The error of an object whose `type` is `kind`."""
    return PydanticCustomError("unsupported_type", "The type is not served.", {"kind": kind, "rule": rule})


def invalid_key(key: str, value: object, rule: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_key", "A key is invalid.", {"key": key, "value": value, "rule": rule})


def invalid_value(rule: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "The value is invalid.", {"rule": rule})


def wrong_number(given: str, expected: str) -> PydanticCustomError:
    """The error of an object with too many of its keys, or with too few. `given` and `expected` name them."""
    return PydanticCustomError("wrong_number", "The number of keys is wrong.", {"given": given, "expected": expected})


def request_error(error: ValidationError, spelt: Mapping[str, str]) -> RequestError:
    """The first error in the order of the fields. `spelt`: names of fields as the client wrote them."""
    first = error.errors(include_url=False)[0]
    place = first["loc"]
    return _one(first, _path((spelt.get(str(place[0]), place[0]), *place[1:]) if place else ()))


def _path(place: Sequence[int | str]) -> str:
    """("messages", 0, "role") -> "messages[0].role". The tags of unions, as "<text>", are no part of it."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if str(part)[0] != "<")
    return "".join(parts).removeprefix(".")


def _one(found: ErrorDetails, path: str) -> RequestError:
    kind, value, details = found["type"], found["input"], found.get("ctx", {})
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        # A whole number of 400 digits is no float.
        largest = sys.float_info.max
        return errors.above_max(path, largest, value) if value > 0 else errors.below_min(path, -largest, value)
    if kind in _JSON_TYPES:
        return errors.invalid_type(path, _JSON_TYPES[kind], value)
    return _MAPPED[kind](path, value, details)


def _refused(path: str, value: object, details: _Details) -> RequestError:
    error: RequestError = details["error"]
    return error


def _above_max(path: str, value: Any, details: _Details) -> RequestError:
    if isinstance(value, float) and math.isnan(value):
        return errors.invalid_value(path, value, "Expected a finite number.")
    return errors.above_max(path, details["le"], value)


def _too_long(path: str, value: Any, details: _Details) -> RequestError:
    make = errors.array_too_long if isinstance(value, list) else errors.too_many_properties
    return make(path, details["max_length"], len(value))


def _wrong_form(path: str, value: Any, details: _Details) -> RequestError:
    """The value of a union has none of its types, or its `type` is none of theirs."""
    if value is ABSENT:
        return errors.missing(path)
    types = details["types"].split()
    if not isinstance(value, dict) or not types:
        return errors.invalid_type(path, details["expected"], value)
    kind, path = value.get("type"), f"{path}.type"
    if kind is None:
        return errors.missing(path)
    if not isinstance(kind, str):
        return errors.invalid_type(path, "a string", kind)
    if details["rule"]:
        return errors.unsupported_value(path, kind, details["rule"])
    return errors.not_among(path, kind, types)


def _not_among(path: str, value: object, details: _Details) -> RequestError:
    if not isinstance(value, str):
        return errors.invalid_type(path, "a string", value)
    # pydantic writes them as "'a', 'b' or 'c'".
    listed = str(details["expected"]).replace("' or '", "' and '")
    return RequestError(
        "invalid_value", f"Invalid value: '{errors.shown(value)}'. Supported values are: {listed}.", path
    )


_MAPPED: Mapping[str, Callable[[str, Any, _Details], RequestError]] = {
    "refused": _refused,
    "missing": lambda path, value, details: errors.missing(path),
    "missing_key": lambda path, value, details: errors.missing(f"{path}.{details['key']}"),
    "unknown_key": lambda path, value, details: errors.unknown_parameter(f"{path}.{details['key']}", details["near"]),
    "refused_key": lambda path, value, details: errors.unsupported_parameter(
        f"{path}.{details['key']}", details["way_out"]
    ),
    "wrong_type": lambda path, value, details: errors.invalid_type(path, details["expected"], value),
    "wrong_form": _wrong_form,
    "greater_than_equal": lambda path, value, details: errors.below_min(path, details["ge"], value),
    "less_than_equal": _above_max,
    "string_too_short": lambda path, value, details: errors.empty_string(path),
    "string_too_long": lambda path, value, details: errors.string_too_long(path, details["max_length"], len(value)),
    "string_unicode": lambda path, value, details: errors.invalid_value(path, value, "Expected Unicode text."),
    "too_short": lambda path, value, details: errors.empty_array(path, details["min_length"]),
    "too_long": _too_long,
    "unsupported_value": lambda path, value, details: errors.unsupported_value(path, value, details["rule"]),
    "unsupported_type": lambda path, value, details: errors.unsupported_value(
        f"{path}.type", details["kind"], details["rule"]
    ),
    "invalid_key": lambda path, value, details: errors.invalid_value(
        f"{path}.{details['key']}", details["value"], details["rule"]
    ),
    "invalid_value": lambda path, value, details: errors.invalid_value(path, value, details["rule"]),
    "wrong_number": lambda path, value, details: RequestError(
        "invalid_value", f"Invalid value for '{path}': it has {details['given']}. Expected {details['expected']}.", path
    ),
    "literal_error": _not_among,
}
