"""Describes a setting (type, help text, rule in words) from the annotations of its field.

Flags, error messages and documentation are made from these descriptions, so they always match what is checked.
This file knows no particular setting, no command line and no settings file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field, SecretStr
from pydantic.fields import FieldInfo

ENV_PREFIX = "INFERD_"

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", re.ASCII)
_UNIT_BYTES: Mapping[str | None, int] = {
    None: 1,
    "B": 1,
    **{f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate("KMGT")},
    **{f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")},
}


def parse_bytes(text: str) -> int:
    """Read "2GiB" (2^31), "512MB" (5.12e8) or plain bytes. Raises `ValueError`, also for "2G", which is ambiguous."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("must be a size such as 2GiB (powers of 1024), 512MB (powers of 1000) or 1048576 (bytes)")
    return int(Decimal(match[1]) * _UNIT_BYTES[match[2]])


_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m)\s*", re.ASCII)
_DURATION_S: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def parse_duration(text: str) -> float:
    """Read "200ms", "2s" or "1.5m" as seconds. Raises `ValueError`, also if the unit is missing."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("must be a duration with its unit, such as 200ms, 2s or 1.5m")
    return float(Decimal(match[1]) * Decimal(str(_DURATION_S[match[2]])))


def format_duration(seconds: float) -> str:
    """A text that `parse_duration` reads back, exact to six digits."""
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1e3:g}ms"


def format_bytes(num_bytes: int) -> str:
    """The shortest exact text that `parse_bytes` reads back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _UNIT_BYTES[unit] == 0:
            return f"{num_bytes // _UNIT_BYTES[unit]}{unit}"
    return str(num_bytes)


@dataclass(frozen=True, slots=True)
class Unit:
    """Marks a number that people write with a unit. `rule` names it in messages, `metavar` in the help."""

    rule: str
    metavar: str = "SIZE"


def _read_by(read: Callable[[str], object]) -> BeforeValidator:
    """Reads a text by this function, and leaves every other value as it is."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


def _no_switch(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not yes or no")
    return value


_DIGITS = _read_by(lambda text: int(text) if text.isascii() and text.isdigit() else text)
_COMMA_LIST = _read_by(lambda text: tuple(part.strip() for part in text.split(",")))

Auto = _read_by(lambda text: None if text == "auto" else text)
"""Reads the text "auto" as None: the start decides, and says what it decided."""

Number = BeforeValidator(_no_switch)
"""Refuses booleans, so that YAML's `yes` does not become the number 1."""

NoneAllowed = _read_by(lambda text: None if text == "none" else text)
"""Reads the text "none" as None: the setting is off."""

Duration = Annotated[float, Number, _read_by(parse_duration), Unit("a duration", "DURATION")]
Size = Annotated[int, Number, _read_by(parse_bytes), Unit("a size")]
BlockSize = Annotated[Literal[16, 32, 64, 128], _DIGITS]
Names = Annotated[tuple[str, ...], _COMMA_LIST]
Entries = Annotated[tuple[str | dict[str, Any], ...], _COMMA_LIST]
"""Texts, or in the YAML file mappings."""
Secrets = Annotated[tuple[SecretStr, ...], _COMMA_LIST]


def setting(default: object, help_line: str, *, panel: str, ge: float | None = None, le: float | None = None) -> Any:
    """Make a field of the settings model. `panel` is its group in the help; `ge` and `le` bound a number."""
    return Field(default, description=help_line, json_schema_extra={"panel": panel}, ge=ge, le=le)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as flags, messages and documentation show it."""

    name: str
    flag: str
    env: str
    panel: str
    help: str
    rule: str
    """The rule that a value must keep, in words: "a whole number from 0 to 65535"."""
    metavar: str
    default: str
    choices: tuple[str, ...]
    is_switch: bool
    is_list: bool


def describe(name: str, info: FieldInfo) -> Setting:
    """Describe one field of a settings model."""
    base, choices, is_auto = _unwrap(info.annotation)
    marks = [*info.metadata, *_marks(info.annotation)]
    extra = info.json_schema_extra
    assert isinstance(extra, Mapping) and info.description, f"{name} was not made by setting()"
    return Setting(
        name=name,
        flag="--" + name.replace("_", "-"),
        env=ENV_PREFIX + name.upper(),
        panel=str(extra["panel"]),
        help=info.description,
        rule=_rule(base, choices, marks) + (_or_none(marks) if is_auto and base is not str else ""),
        metavar=_metavar(base, choices, marks),
        default="none" if _can_be_none(marks) and info.default is None else _default_text(info.default, base, marks),
        choices=(*choices, "auto") if choices and is_auto else choices,
        is_switch=base is bool,
        is_list=base is tuple,
    )


def _can_be_none(marks: list[object]) -> bool:
    return any(mark is NoneAllowed for mark in marks)


def _or_none(marks: list[object]) -> str:
    return ", or none" if _can_be_none(marks) else ", or auto"


def _unwrap(annotation: Any) -> tuple[Any, tuple[str, ...], bool]:
    """(plain type, choices of a Literal, whether None is allowed)."""
    args = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _unwrap(args[0])
    if get_origin(annotation) is Literal:
        return Literal, tuple(str(choice) for choice in args), False
    if NoneType in args:
        base, choices, _ = _unwrap(next(arg for arg in args if arg is not NoneType))
        return base, choices, True
    return get_origin(annotation) or annotation, (), False


def _marks(annotation: Any) -> list[object]:
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return [*marks, *_marks(inner)]
    return [mark for arg in get_args(annotation) if arg is not NoneType for mark in _marks(arg)]


def _rule(base: Any, choices: tuple[str, ...], marks: list[object]) -> str:
    if choices:
        return "one of " + ", ".join(choices)
    if base is bool:
        return "true or false"
    if base is tuple:
        return "a list of texts, or one text with commas"
    if base is str:
        return "text"
    unit = next((mark for mark in marks if isinstance(mark, Unit)), None)
    if unit is not None:
        return unit.rule + _bounds(marks, format_duration if unit.metavar == "DURATION" else _bytes_text)
    return ("a whole number" if base is int else "a number") + _bounds(marks, lambda number: f"{number:.15g}")


def _bytes_text(number: float) -> str:
    return format_bytes(int(number))


def _bounds(marks: list[object], shown: Callable[[float], str]) -> str:
    low = max((float(mark.ge) for mark in marks if hasattr(mark, "ge")), default=-math.inf)
    high = min((float(mark.le) for mark in marks if hasattr(mark, "le")), default=math.inf)
    if low > -math.inf and high < math.inf:
        return f" from {shown(low)} to {shown(high)}"
    return f" of at least {shown(low)}" if low > -math.inf else f" of at most {shown(high)}" if high < math.inf else ""


def _metavar(base: Any, choices: tuple[str, ...], marks: list[object]) -> str:
    if choices:
        return "WORD" if base is Literal and not choices[0].isdigit() else "N"
    unit = next((mark for mark in marks if isinstance(mark, Unit)), None)
    if unit is not None:
        return unit.metavar
    return {int: "N", float: "SECONDS", bool: ""}.get(base, "TEXT")


def _default_text(default: object, base: Any, marks: list[object]) -> str:
    if default == () or default == "" or (default is None and base is str):
        return ""
    if default is None:
        return "auto"
    if isinstance(default, int) and any(isinstance(mark, Unit) for mark in marks):
        return format_bytes(default)
    if isinstance(default, float) and any(isinstance(mark, Unit) for mark in marks):
        return format_duration(default)
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else f"{default}"
