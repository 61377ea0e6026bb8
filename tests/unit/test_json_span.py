"""Compares reading a JSON value in pieces with Python's own parser."""

from __future__ import annotations

import itertools
import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferd.server.tools.json_span import MAX_DEPTH, JsonSpan

ALPHABET = st.sampled_from([*'{}[]:,"\\ \n01-.eE+atu', "true", "null", '"a"', '"b": ', "\\u00e9", "\\n", "\t", "1.5"])
TEXTS = st.lists(ALPHABET, max_size=14).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def spanned(text: str, cuts: list[int]) -> tuple[str, int, bool, bool]:
    """(JSON read, number of characters read, is_done, is_broken)."""
    span, read, num_chars = JsonSpan(), "", 0
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for a, b in itertools.pairwise(bounds):
        taken, end = span.take(text[a:b], 0)
        read, num_chars = read + taken, num_chars + end
        if span.is_done or span.is_broken:
            break
    else:
        span.end()
    return read, num_chars, span.is_done, span.is_broken


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@settings(deadline=None, max_examples=1_000)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 40), max_size=6))
@example('"\\x"', [])
@example('"\\u12g4"', [])
@example("01", [])
@example("[1,]", [])
@example('{"a":1,}', [])
@example("-", [])
def test_a_value_is_done_where_python_can_read_it(text: str, cuts: list[int]) -> None:
    read, num_chars, is_done, is_broken = spanned(text, [])
    assert spanned(text, cuts) == (read, num_chars, is_done, is_broken)
    assert not (is_done and is_broken)
    if is_done:
        assert is_json(read)
    if is_json(text):
        assert is_done
        assert json.loads(read) == json.loads(text)
    if not is_done and not is_broken:
        assert num_chars == len(text)


@settings(deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 2]), rest=st.sampled_from(["", " x", "}", "\n{"]))
def test_the_value_ends_where_it_was_written_to_end(value: object, indent: int | None, rest: str) -> None:
    text = json.dumps(value, indent=indent)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or rest:
        assert spanned(text + rest, []) == (text, len(text), True, False)


def test_a_line_break_inside_a_string_becomes_its_escape() -> None:
    read, num_chars, is_done, _ = spanned('{"a": "1\n\t2"}', list(range(14)))
    assert (json.loads(read), num_chars, is_done) == ({"a": "1\n\t2"}, 13, True)


def test_what_is_nested_too_deeply_is_no_value() -> None:
    assert spanned("[" * MAX_DEPTH + "]" * MAX_DEPTH, [])[2]
    assert spanned("[" * (MAX_DEPTH + 1), [])[1:] == (MAX_DEPTH, False, True)
