"""No value under a schema grows without bound, apart from strings, arrays, objects, and texts of a caller's pattern.

A model that always goes on takes, of the bytes that the grammar allows, one that it likes, and ends a value only if it
must. What it writes is as long as the grammar lets a value become.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from inferd.engine.api.grammars import FORMATS
from inferd.engine.grammar.compiler import compile_grammar, normal_form
from inferd.engine.grammar.schemas import strings
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.structured.schema import read_schema

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
LIKES = {
    "zeros": b"0", "nines": b"9", "digits": b"0123456789", "tabs": b"\t\n\r", "spaces": b" \n", "letters": b"aZz",
    "points": b".-+eE", "colons": b":f/%", "hyphens": b"-a",
}  # fmt: skip
ENDS = b'",]}'
MOST_BYTES = {"email": 260, "hostname": 260, "uri": 2_100}
"""Most bytes of a value; 120 if it is not listed. A host name, an address and a URI are as long as their standards or
practice allow."""


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, 3_072)


@pytest.fixture(scope="module")
def tokens(vocabulary: LLTokenizer) -> dict[int, int]:
    """Byte -> the token of this byte alone."""
    found = {}
    for token_id in range(vocabulary.vocab_size):
        text = vocabulary.decode_bytes([token_id])
        if len(text) == 1:
            found.setdefault(text[0], token_id)
    return found


def compiled(vocabulary: LLTokenizer, schema: Any) -> LLMatcher:
    return compile_grammar(vocabulary, normal_form(read_schema(schema, "here", is_strict=True).text()).text)


def longest(matcher: LLMatcher, tokens: dict[int, int], liked: bytes, most: int) -> bytes:
    """The text of the model that always goes on; at most `most` bytes."""
    text = bytearray()
    turn = 0
    while len(text) < most and not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [byte for byte, token_id in tokens.items() if mask[token_id // 8] >> token_id % 8 & 1]
        if not allowed:
            break
        wanted = [byte for byte in allowed if byte in liked]
        others = [byte for byte in allowed if byte not in ENDS]
        choices = wanted or others or allowed
        turn += 1
        byte = choices[turn % len(choices)] if wanted else min(choices)
        assert matcher.consume_token(tokens[byte])
        text.append(byte)
    return bytes(text)


def test_every_format_has_an_expression() -> None:
    assert tuple(strings.FORMATS) == FORMATS


def values() -> Iterator[tuple[str, Any]]:
    yield from ((name, {"type": "string", "format": name}) for name in FORMATS)
    yield "integer", {"type": "integer"}
    yield "number", {"type": "number"}
    for name, value in (("minimum", 0), ("maximum", 5), ("minimum", 1e25), ("exclusiveMinimum", 0.1)):
        yield f"{name} {value}", {"type": "number", name: value}
        yield f"integer {name} {value}", {"type": "integer", name: value}
    for step in (7, 0.25, 0.01, 10, 0.07, 2**53 + 1):
        yield f"multiples of {step}", {"type": "number", "multipleOf": step}
    yield "both bounds", {"type": "number", "minimum": -1e308, "maximum": 1e308}
    yield "constants", {"enum": [1, "x", None, True, [1, {"a": 0.1}]]}
    yield "a list of two", {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    simple = {"anyOf": [{"type": "null"}, {"type": "number"}]}
    yield "an object", {"properties": {"a": simple}, "required": ["a"], "additionalProperties": False, "type": "object"}


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("likes", LIKES)
def test_a_model_that_always_goes_on_ends_each_value(
    vocabulary: LLTokenizer, tokens: dict[int, int], likes: str
) -> None:
    endless = {}
    for name, schema in values():
        most = MOST_BYTES.get(name, 120 if schema.get("type") in ("string", "number", "integer") else 500)
        text = longest(compiled(vocabulary, schema), tokens, LIKES[likes], most + 1)
        if len(text) > most:
            endless[name] = text[:60]
    assert endless == {}


@pytest.mark.parametrize("likes", LIKES)
def test_of_any_value_only_strings_lists_and_objects_grow(
    vocabulary: LLTokenizer, tokens: dict[int, int], likes: str
) -> None:
    """Numbers and blanks within values that the schema leaves open are bounded too."""
    for begun in (b"[", b'{"a":'):
        matcher = compiled(vocabulary, {"type": ["array", "object"]})
        assert matcher.try_consume_tokens([tokens[byte] for byte in begun]) == len(begun)
        text = begun + longest(matcher, tokens, LIKES[likes], 1_500)
        runs = re.findall(rb"[0-9.eE+-]+|[ \t\r\n]+", re.sub(rb'"(\\.|[^"\\])*("|$)', b'""', text))
        assert max(map(len, runs), default=0) <= 100, text[:200]


def test_what_would_grow_is_seen(vocabulary: LLTokenizer, tokens: dict[int, int]) -> None:
    for schema in ({"type": "string"}, {"type": "array", "items": {"type": "null"}}, {"pattern": "^[0-9]+$"}):
        schema = {"type": "string", **schema}
        liked = b"n0," if schema["type"] == "array" else b"0"
        assert len(longest(compiled(vocabulary, schema), tokens, liked, 3_000)) == 3_000


@pytest.mark.parametrize(
    ("form", "texts", "others"),
    [
        ("time", ["12:00:00Z", "12:00:00.123456789+01:00", "23:59:60z"],
         ["12:00:60Z", "12:00:00.1234567890Z", "24:00:00Z"]),
        ("date-time", ["2024-02-29T10:00:00.5Z", "0001-01-01t00:00:00-23:59"], ["2023-02-29T10:00:00Z", "2024-01-01"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT5M", "P3W", "P1DT1S"], ["P", "PT", "P1DT", "P1H"]),
        ("email", ["a@b.c", "x.y+z@example.com", "o'b/c@d", "a@[1.2.3.4]"], ["@b", "a@", "a..b@c", "a@-b"]),
        ("hostname", ["a.b-c.com", "x"], ["-a", "a..b", "a" * 64]),
        ("ipv4", ["1.2.3.255", "0.0.0.0"], ["1.2.3.256", "01.2.3.4", "1.2.3"]),
        ("ipv6", ["::", "::1", "1::2", "1:2:3:4:5:6:7:8", "1::", "1:2::7:8"],
         ["1", ":::", "1:2:3:4:5:6:7:8:9", "1::2::3"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("uri", ["https://example.com/a?b#c", "mailto:x@y", "http://u:p@[::1]:80/", "urn:a:b", "x:"],
         ["a b", "/x", "1a:b"]),
    ],
)  # fmt: skip
def test_formats(vocabulary: LLTokenizer, form: str, texts: list[str], others: list[str]) -> None:
    for schema in ({"type": "string", "format": form}, {"type": "string", "format": form, "minLength": 1}):
        matcher = compiled(vocabulary, schema)
        assert [text for text in texts if not accepts(matcher, vocabulary, f'"{text}"')] == []
        assert [text for text in others if accepts(matcher, vocabulary, f'"{text}"')] == []


def accepts(matcher: LLMatcher, vocabulary: LLTokenizer, text: str) -> bool:
    copy, token_ids = matcher.deep_copy(), vocabulary.tokenize_str(text)
    return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()


def test_a_date_is_a_day_of_the_calendar(vocabulary: LLTokenizer) -> None:
    matcher = compiled(vocabulary, {"type": "string", "format": "date"})
    for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 9996, 9999):
        for month in (0, 1, 2, 4, 12, 13):
            for day in (0, 1, 28, 29, 30, 31, 32):
                try:
                    is_day = bool(date(year, month, day))
                except ValueError:
                    is_day = False
                assert accepts(matcher, vocabulary, f'"{year:04}-{month:02}-{day:02}"') == is_day


@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        ({"type": "string", "maxLength": 0}, '""', '"a"'),
        ({"type": "array", "maxItems": 0}, "[]", "[1]"),
        ({"type": "array", "maxItems": 1}, "[1]", "[1,1]"),
        ({"type": "array", "prefixItems": [{"type": "null"}], "maxItems": 1}, "[null]", "[null,1]"),
        ({"type": "object", "maxProperties": 0}, "{}", '{"a":1}'),
        ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":1}'),
        ({"type": "object", "required": ["a"], "maxProperties": 1}, '{"a":1}', '{"a":1,"b":1}'),
        ({"type": "string", "pattern": "a*", "maxLength": 0}, '""', '"a"'),
    ],
)  # fmt: skip
def test_a_bound_of_none_or_one(vocabulary: LLTokenizer, schema: Any, text: str, other: str) -> None:
    matcher = compiled(vocabulary, schema)
    assert accepts(matcher, vocabulary, text) and not accepts(matcher, vocabulary, other)


def test_a_format_beside_a_pattern_and_a_length(vocabulary: LLTokenizer) -> None:
    matcher = compiled(vocabulary, {"type": "string", "format": "date", "pattern": "^20", "maxLength": 10})
    assert accepts(matcher, vocabulary, '"2024-01-01"') and not accepts(matcher, vocabulary, '"1924-01-01"')
