"""Types of the SDKs' requests: the members of a union, their keys, and a small example of each.

The SDKs declare requests as typed dictionaries. Knows no field of any API.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

TESTS = Path(__file__).resolve().parents[1]


def members(hint: Any) -> Iterator[Any]:
    """The typed dictionaries of a union, also of one within a list or another union, each once. Answers' models, which
    some unions hold too, are left out."""
    yield from dict.fromkeys(_members(hint))


def _members(hint: Any) -> Iterator[Any]:
    if is_typeddict(hint):
        yield hint
    for argument in get_args(hint):
        yield from _members(argument)


@functools.cache
def fields_of(kind: Any) -> Mapping[str, Any]:
    """Key -> type of a typed dictionary."""
    return get_type_hints(kind, include_extras=True)


def hint_of(kind: Any, key: str) -> Any:
    """The type of a key."""
    return fields_of(kind)[key]


def types_of(kind: Any) -> tuple[str, ...]:
    """Values of the key `type`; empty if there is none."""
    return tuple(_literals(fields_of(kind).get("type")))


def _literals(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (value for value in get_args(hint) if isinstance(value, str))
    else:
        for argument in get_args(hint):
            yield from _literals(argument)


def example(kind: Any, **fields: Any) -> dict[str, Any]:
    """A value with all required keys of a typed dictionary, `type`, and `fields`."""
    needed = (key for key, hint in fields_of(kind).items() if get_origin(hint) is Required or key == "type")
    return {**{key: value_of(hint_of(kind, key)) for key in needed}, **fields}


def value_of(hint: Any) -> Any:
    """A small value of a type: of a union, of its first member."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        return example(hint)
    if origin in (Required, NotRequired, Annotated):
        return value_of(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin in (Union, UnionType):
        return value_of(next(argument for argument in arguments if argument is not type(None)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return [value_of(arguments[0])]
    return {str: "x", int: 1, float: 0.5, bool: True, object: {}}[hint]


def named_tests(names: Iterable[str], folders: Sequence[str] = ("unit", "api")) -> set[str]:
    """Those of `names` that are functions of test files."""
    return set(names) & _functions(tuple(folders))


@functools.cache
def _functions(folders: tuple[str, ...]) -> frozenset[str]:
    files = (file for folder in folders for file in sorted((TESTS / folder).glob("test_*.py")))
    return frozenset(
        name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.M)
    )
