"""The counts before parsing agree with those of the parsed value, and no string, slice or escape deceives them."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.body import parse_object
from inferd.server.schema import strict_json
from inferd.server.schema.strict_json import MANY_VALUES, MAX_DEPTH, Counts, check_bounds, parse

NAMES = ("MAX_DEPTH", "MAX_ARRAYS", "MAX_OBJECTS", "MAX_KEYS", "MAX_STRINGS", "MAX_VALUES", "MAX_ESCAPES")
AWKWARD = st.text(alphabet='[]{},:"\\/ \n\tu\u00e9\u4e2d\U0001f600d8abc')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | AWKWARD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(AWKWARD, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any, depth: int = 1) -> dict[str, int]:
    """The counts of the parsed value, apart from escapes."""
    counts = dict.fromkeys(NAMES, 0)
    counts["MAX_DEPTH"] = depth - 1
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if isinstance(value, (dict, list)):
        counts["MAX_DEPTH"] = depth
        counts["MAX_VALUES"] += max(0, len(value) - 1)
    counts["MAX_ARRAYS"] += isinstance(value, list)
    counts["MAX_OBJECTS"] += isinstance(value, dict)
    counts["MAX_STRINGS"] += isinstance(value, str)
    if isinstance(value, dict):
        counts["MAX_KEYS"] += len(value)
        counts["MAX_STRINGS"] += len(value)
    for child in children:
        for name, count in counted(child, depth + 1).items():
            counts[name] = max(counts[name], count) if name == "MAX_DEPTH" else counts[name] + count
    return counts


@settings(max_examples=300, deadline=None)
@given(VALUES, st.integers(1, 40), st.booleans())
def test_a_bound_refuses_exactly_what_is_beyond_it(value: Any, size: int, ascii_only: bool) -> None:
    """Slices of every length give the counts of the value itself."""
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_SLICE", size + 11)
        for name, count in counted(value).items():
            if name == "MAX_ESCAPES":
                continue
            patch.setattr(strict_json, name, count)
            check_bounds(raw)
            if count:
                patch.setattr(strict_json, name, count - 1)
                with pytest.raises(ValueError, match="nested too deeply" if name == "MAX_DEPTH" else "it has more"):
                    check_bounds(raw)
                patch.setattr(strict_json, name, count)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [r"\ud83d", r"\uDE00", r"\ude00", r"\uD83D", r"\\", r"\"", r"\u00e9", r"\ud7ff", r"\ue000", "u", "d83d"]
        ),
        max_size=12,
    ),
    st.integers(0, 24),
)
def test_half_of_a_surrogate_pair_is_found_as_another_parser_finds_it(parts: list[str], slice_by: int) -> None:
    raw = b'{"a": "' + "".join(parts).encode() + b'"}'
    try:
        orjson.loads(raw)
        is_text = True
    except orjson.JSONDecodeError:
        is_text = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_SLICE", 12 + slice_by)
        if is_text:
            check_bounds(raw)
        else:
            with pytest.raises(ValueError, match="surrogate"):
                check_bounds(raw)


def test_escapes_are_counted() -> None:
    raw = json.dumps({"a": '\n\\"\u00e9'}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "MAX_ESCAPES", 4)
        check_bounds(raw)
        patch.setattr(strict_json, "MAX_ESCAPES", 3)
        with pytest.raises(ValueError, match="more than 3 escapes"):
            check_bounds(raw)


def test_a_long_text_and_a_prompt_of_a_million_tokens_are_within_the_bounds() -> None:
    text = 'All [of] {this}, is "text": and\nsome \u4e2d\u6587 \\ ' * 50_000
    assert parse_object(json.dumps({"prompt": text}).encode())["prompt"] == text
    ids = list(range(1_000_000))
    assert parse_object(json.dumps({"prompt": ids}).encode())["prompt"] == ids


def test_many_numbers_are_read_alike_by_both_parsers() -> None:
    numbers = [0, -1, 0.1, -2.5e-3, 10**30, 1e308, 12_345] * (MANY_VALUES // 7 + 1)
    assert check_bounds(json.dumps(numbers).encode())
    assert parse_object(json.dumps({"a": numbers}).encode())["a"] == numbers


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_depth(depth: int) -> None:
    raw = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if depth <= MAX_DEPTH:
        parse_object(raw)
        return
    with pytest.raises(RequestError, match=f"nested too deeply: at most {MAX_DEPTH}"):
        parse_object(raw)


@pytest.mark.parametrize("raw", [b'{"a": 1, "a": 2}', b"NaN", b"[-Infinity]", b"1e999", b'"\\ud800"', b"\xef\xbb\xbf1"])
def test_what_other_parsers_take_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(raw)


def test_a_number_of_too_many_digits_is_refused_in_our_words() -> None:
    assert parse(b"9" * 4300) == 10**4300 - 1
    with pytest.raises(ValueError, match=r"^it has a whole number of more than 4,300 digits, the most allowed$"):
        parse(b'{"max_tokens": ' + b"1" * 4301 + b"}")


def test_texts_that_share_their_counts_share_the_bounds() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, raw in (
            ("MAX_ARRAYS", b"[]"),
            ("MAX_OBJECTS", b"{}"),
            ("MAX_KEYS", b'{"a":1}'),
            ("MAX_STRINGS", b'"a"'),
            ("MAX_VALUES", b"[1,2]"),
            ("MAX_ESCAPES", b'"\\n"'),
        ):
            patch.setattr(strict_json, name, 2)
            counts = Counts()
            parse(raw, counts)
            parse(raw, counts)
            with pytest.raises(ValueError, match=r"more than 2 .*, the most allowed in one request"):
                parse(raw, counts)
            patch.undo()
