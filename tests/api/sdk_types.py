"""Types of the SDKs' requests: the members of a union, their keys, a small example of each, and a walk over all.

The SDKs declare requests as typed dictionaries. Knows no field of any API.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import httpx
import pytest
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

from inferd.server.schema.request_model import Kind, Part, RequestModel, Row

Body = dict[str, Any]
Place = Callable[[Body], Body]
"""A value of an object -> a request that holds it."""
WARNING = "x-inferd-warning"
SILENT: Mapping[str, str] = {
    "verbosity": "medium",
    "context": "auto",
    "mode": "standard",
    "truncation": "disabled",
}
"""Offer -> its value that asks for what every model and this server do."""

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


@dataclass(frozen=True, slots=True)
class Sent:
    """One key of an object, or one type of a union, that the SDK can send."""

    path: str
    kind: Kind | None
    values: Sequence[Any]
    """Every word that the key may be, or one value."""
    body: Callable[[Any], Body]
    """A request with a value of the key."""
    without: Callable[[], Body]
    """The same without the key."""

    @property
    def api(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def words(hint: Any) -> Iterator[object]:
    """The words of a type that is a union of them, and of nothing else but null."""
    options = [one for one in get_args(hint) if one is not type(None)] if get_origin(hint) is not Literal else [hint]
    if all(get_origin(one) is Literal for one in options):
        for one in options:
            yield from get_args(one)


def parts_in(hint: Any) -> Iterator[type[Part]]:
    """The objects that an annotation of ours reads."""
    if isinstance(hint, type) and issubclass(hint, Part):
        yield hint
    inner = (hint.annotation, *hint.metadata) if isinstance(hint, FieldInfo) else get_args(hint)
    for one in (*inner, *([hint.sent] if hasattr(hint, "sent") else ())):
        yield from parts_in(one)


def part_of(typed: Any, field: FieldInfo) -> type[Part]:
    """The object of ours that a typed dictionary is read as."""
    types = set(types_of(typed))
    for part in parts_in(field):
        if not types or ("type" in part.names and types <= set(get_args(part.names["type"].annotation))):
            return part
    raise AssertionError(f"nothing reads {typed}")


@dataclass(frozen=True, slots=True)
class Walk:
    """Goes through the types of a request of one API."""

    rows_of: Callable[[str, str], Row | None]
    """(path of a key, type of an object that it may hold) -> what our table says of it."""
    given: Mapping[str, Any]
    """Values of keys whose first value would say nothing, by their paths."""

    def all(self, typed: Any, model: type[RequestModel] | type[Part], path: str, place: Place) -> Iterator[Sent]:
        """Every key of an object, and of the objects within it that are not refused as they are."""
        for name, hint in fields_of(typed).items():

            def body(value: Any, name: str = name) -> Body:
                return place(example(typed, **{name: value}))

            def without(name: str = name) -> Body:
                return place({key: value for key, value in example(typed).items() if key != name})

            kind, where = model.kind_of(name), f"{path}.{name}"
            values = [self.given[where]] if where in self.given else list(words(hint)) or [value_of(hint)]
            yield Sent(where, kind, values, body, without)
            if kind == "enforced":
                yield from self._within(hint, model.names[name], where, body)

    def _within(self, hint: Any, field: FieldInfo, path: str, body: Callable[[Any], Body]) -> Iterator[Sent]:
        is_list = "Iterable" in str(hint) or "List" in str(hint)
        for typed in members(hint):

            def inside(value: Body) -> Body:
                return body([value] if is_list else value)

            where = f"{path.rpartition('.')[0]}.{typed.__name__}"
            rows = {one: self.rows_of(path, one) for one in types_of(typed)}
            for one, row in rows.items():
                assert row is not None, f"no table has {where}.{one}"
                yield Sent(f"{where}.{one}", row.kind, [example(typed, type=one)], inside, dict)
            if all(row is not None and row.kind == "enforced" for row in rows.values()):
                yield from self.all(typed, part_of(typed, field), where, inside)


def of_kind(found: Iterable[Sent], kind: Kind) -> dict[str, Sent]:
    """Path -> what is sent, of one kind."""
    return {sent.path: sent for sent in found if sent.kind == kind}


def each(found: Iterable[Sent], kind: Kind) -> pytest.MarkDecorator:
    """A test of each one of a kind, as `sent`."""
    chosen = of_kind(found, kind)
    return pytest.mark.parametrize("sent", chosen.values(), ids=chosen)


def check_proofs(enforced: Iterable[str], proofs: Mapping[str, str]) -> None:
    """Each path has a test that shows that such a key is done. `proofs`: pattern of paths -> name of the test. The
    first pattern that fits counts."""
    used = {path: next((pattern for pattern in proofs if fnmatchcase(path, pattern)), None) for path in enforced}
    assert [path for path, pattern in used.items() if pattern is None] == []
    assert set(proofs) - set(used.values()) == set(), "nothing is shown by these"
    assert set(proofs.values()) - named_tests(proofs.values()) == set(), "no such tests"


def check_hint(sent: Sent, ask: Callable[[Body], tuple[httpx.Response, Any]]) -> None:
    """`ask` returns the answer and all that the engine and the caller see of a request. It is the same without the
    hint, and so are the notices: the object around it may have one."""
    bare, expected = ask(sent.without())
    assert sent.name not in bare.headers.get(WARNING, "")
    for value in sent.values:
        answer, seen = ask(sent.body(value))
        assert answer.headers.get(WARNING) == bare.headers.get(WARNING), value
        assert seen == expected


def check_offer(sent: Sent, ask: Callable[[Body], httpx.Response], name: str = "") -> None:
    """`name`: what the notice calls it, if not by its name."""
    for value in sent.values:
        for is_stream in (False, True):
            answer = ask({**sent.body(value), "stream": is_stream})
            assert answer.status_code == 200, answer.text
            told = answer.headers.get(WARNING, "")
            assert ((name or sent.name) in told) != (value == SILENT.get(sent.name)), (sent.path, value, told)


def check_demand(sent: Sent, ask: Callable[[Body], httpx.Response]) -> None:
    """It is refused by name, with the way out."""
    for value in sent.values:
        answer = ask(sent.body(value))
        assert answer.status_code == 400, (sent.path, value, answer.text)
        error = answer.json()["error"]
        assert error["code"] in ("unsupported_value", "unsupported_parameter")
        assert sent.name in error["message"] or sent.name in error["param"]
        assert len(error["message"].split(". ", 1)[1]) > 15, "no way out"
