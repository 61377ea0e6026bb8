"""Calls whose values need no marker behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from inferd.server.tools.argument_schema import ArgumentSchema
from inferd.server.tools.format import KEY, CallSyntax, Tags
from inferd.server.tools.scanned_calls import _Scan, arguments_of, calls_in

TYPES = {
    "text": "string", "count": "integer", "share": "number", "flag": "boolean", "list": "array", "map": "object",
    "loose": ["string", "integer"],
}  # fmt: skip
BARE = Tags("", "=", "", ", ")
QUOTED = Tags("{", "=", "}", betweens=(("string", "=\u00ab"),), string_end="\u00bb}")
NESTED = Tags("~<", ">", f"~</{KEY}>", item="each")
LINES = Tags("\n  ", " := ", "", is_raw=False)
LIST = CallSyntax("", "", "(", ")", ", ", "[", "]", BARE)


def schema_of(key: str) -> ArgumentSchema:
    return ArgumentSchema({"type": TYPES[key]} if key in TYPES else None)


@pytest.mark.parametrize(
    ("tags", "text", "arguments"),
    [
        (BARE, "", {}),
        (BARE, "text=Oslo, count=2", {"text": "Oslo", "count": 2}),
        (BARE, "text=a, b and c, count=2", {"text": "a, b and c", "count": 2}),
        (BARE, "text=5, loose=5, other=5", {"text": "5", "loose": 5, "other": 5}),
        (BARE, "text='it\\'s, x=1', flag=True", {"text": "it's, x=1", "flag": True}),
        (BARE, "list=['x', 1], map={'a': None}", {"list": ["x", 1], "map": {"a": None}}),
        (BARE, 'count="7", share="1.5", map="{\'a\': 1}"', {"count": 7, "share": 1.5, "map": {"a": 1}}),
        (BARE, "text=", {"text": ""}),
        (QUOTED, "{text=\u00aba } {b=c\u00bb}{count=2}", {"text": "a } {b=c", "count": 2}),
        (QUOTED, '{map={"a": {"b": "}"}}}', {"map": {"a": {"b": "}"}}}),
        (NESTED, "~<map>~<a>~<each>1~</each>~<each>x~</each>~</a>~</map>", {"map": {"a": [1, "x"]}}),
        (NESTED, "~<list>~</list>~<map>~</map>~<text>~</text>", {"list": [], "map": {}, "text": ""}),
        (NESTED, "~<text>7~</text>~<count>7~</count>", {"text": "7", "count": 7}),
        (NESTED, "~<text>~<b>x~</b>~</text>", {"text": "~<b>x~</b>"}),
        (NESTED, '~<text>"q"~</text>~<loose>007~</loose>', {"text": '"q"', "loose": "007"}),
        (NESTED, "~<other>~<b>x~</b>~</other>", {"other": {"b": "x"}}),
        (NESTED, "~<count>two~</count>~<map>~<b>'x'~</b>~</map>", {"count": "two", "map": {"b": "x"}}),
        (LINES, '\n  text := "a\\nb"\n  count := 2\n', {"text": "a\nb", "count": 2}),
    ],
)
def test_values_end_where_the_next_one_begins(tags: Tags, text: str, arguments: Mapping[str, object]) -> None:
    assert arguments_of(text, tags, schema_of) == arguments


@pytest.mark.parametrize("times", [50, 1000])
def test_tags_that_look_nested_cost_no_more_than_they_are_long(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value could be the text up to the next end, or hold all that follows as values in tags."""
    read, num_read = _Scan._value, 0

    def counted(*arguments: Any) -> tuple[object, int] | None:
        nonlocal num_read
        num_read += 1
        return read(*arguments)

    monkeypatch.setattr(_Scan, "_value", counted)
    assert arguments_of("~<map>" + "~<a>~<a>1~</a>" * times + "~</map>", NESTED, schema_of) is not None
    assert num_read < 40 * times + 3000


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        (BARE, "Hello"),
        (BARE, "text=a, text=b"),
        (BARE, "=a"),
        (QUOTED, "{text=\u00aba}"),
        (QUOTED, "{count=2} and"),
        (NESTED, "~<text>a"),
        (NESTED, "~<map>~<a>1~</b>~</map"),
    ],
)
def test_other_text_is_no_argument(tags: Tags, text: str) -> None:
    assert arguments_of(text, tags, schema_of) is None


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f()]", [("f", {})]),
        ("f(count=1)", [("f", {"count": 1})]),
        ("[f(text=g(x)), g(count=2)]", [("f", {"text": "g(x)"}), ("g", {"count": 2})]),
        ("[f(text=a, g(", None),
        ("[f(text=a)] is a call", None),
        ("[a list]", None),
    ],
)
def test_a_list_holds_nothing_but_calls(text: str, calls: list[tuple[str, object]] | None) -> None:
    found = calls_in(text, LIST, BARE, lambda name: schema_of)
    assert (None if found is None else [(call["name"], call["arguments"]) for call in found]) == calls


@pytest.mark.parametrize("tags", [BARE, QUOTED, NESTED, LINES])
@pytest.mark.parametrize("part", [" ", "\n", ", a=", "{a=", "~<a>", "'", "[", "a", ")"])
def test_reading_takes_time_in_proportion_to_the_text(tags: Tags, part: str) -> None:
    """A quadratic search would take minutes."""
    text = f"{tags.before}text{tags.between}" + part * (60_000 // len(part))
    arguments_of(text, tags, schema_of)
    calls_in(f"[f({text}", LIST, BARE, lambda name: schema_of)
