"""The text of a custom tool's call, read out of its arguments as they are written."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.server.tools.text_input import TextInput


def read(arguments: str, cuts: list[int]) -> str:
    places = [0, *sorted(cut for cut in cuts if cut < len(arguments)), len(arguments)]
    reader = TextInput()
    pieces = [reader.feed(arguments[a:b]) for a, b in itertools.pairwise(places)]
    return "".join(pieces) + reader.finish()


@given(st.text(), st.lists(st.integers(0, 200)), st.booleans())
def test_the_text_is_the_same_however_it_arrives(text: str, cuts: list[int], is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert read(arguments, cuts) == text
    assert read(arguments, list(range(len(arguments)))) == text


@given(st.text(min_size=1), st.integers(0, 100))
def test_a_text_that_is_cut_off_is_its_beginning(text: str, cut: int) -> None:
    arguments = json.dumps({"input": text})
    begun = read(arguments[: len('{"input": "') + cut], [])
    assert text.startswith(begun)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{ "input" :"a"}', "a"),
        ('{"input":\n"a\nb\tc"}', "a\nb\tc"),
        (r'{"input": "\q\u00e9\ud83d\ude00 \ud83d"}', "\\qé😀 ?"),
        (r'{"input": "\ud83d"}', "?"),
        (r'{"input": "C:\users\u12\u"}', r"C:\users\u12\u"),
        (r'{"input": "a\\ud83d"}', r"a\ud83d"),
        (r'{"input": "\ud83da\uD83D\n\ud83d\ud83d\ude00"}', "?a?\n?😀"),
        ('{"patch": "a"}', "a"),
        ('"a"', "a"),
        ('{"patch": "a", "x": 1}', '{"patch": "a", "x": 1}'),
        ("*** Begin", "*** Begin"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"patch": "' + "a" * 999 + '"}', "a" * 999),
        ("x" * 999, "x" * 999),
        ("", ""),
    ],
)
def test_models_write_other_forms(arguments: str, text: str) -> None:
    assert read(arguments, []) == read(arguments, list(range(len(arguments)))) == text
    assert {read(arguments, [cut]) for cut in range(min(len(arguments), 100))} <= {text}
