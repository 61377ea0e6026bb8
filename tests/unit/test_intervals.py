"""Bounds of numbers in a schema. Output that the compiled grammar accepts is valid, and whole numbers within the bounds
are accepted. The judge is `jsonschema` on exact decimal numbers."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from inferd.engine.api.errors import RequestError
from inferd.engine.grammar.compiler import compile_grammar
from inferd.engine.grammar.ports import GrammarError
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.structured.schema import read_schema, with_exact_bounds

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
NAMES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
USUAL = (0, 1, -1, 2, -2, 0.4, 0.5, -0.5, 10, 10.5, -10, -10.25, 0.06, 1e-3, 99, 1_000, 3.75, -3.75, 1e-7, 2.000001)
LONG = (
    2**53, 2**53 + 1, -(2**53) - 1, 2**53 - 1, 10**15 + 3, 10**17 + 1, 1e15, 1e16, -1e15, 2**62, 2**63 - 1, 1e18,
    123_456_789.125, 2.1000010000000002, 0, 0.5,
)  # fmt: skip
STEPS = ("0", "1", "-1", "0.1", "-0.1", "1e-5", "-1e-5", "1e-9", "-1e-9", "1e-12", "-1e-12", "2", "-10")
BESIDE = Decimal("1e-8")


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, 3_072)


def make_schema(rng: Random, pool: tuple[float, ...]) -> dict[str, Any]:
    base = rng.choice(pool)
    steps = (base, rng.choice(pool), base + 1, base - 1, base + 0.5, base + 0.1, base - 0.5)
    schema: dict[str, Any] = {"type": rng.choice(("number", "integer"))}
    schema |= {name: rng.choice(steps) for name in NAMES if rng.random() < 0.5}
    if rng.random() < 0.25:
        schema["multipleOf"] = rng.choice((1, 2, 5, 0.5, 0.1, 0.25, 3, 0.01, 7))
    return schema


def placed(rng: Random, schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema. In some cases its keywords are split between two schemas, and a property has a keyword's
    name."""
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in schema.items():
        rng.choice(parts)[name] = value
    return rng.choice(
        (
            schema,
            {"allOf": list(parts)},
            {"$defs": {"default": parts[0]}, "$ref": "#/$defs/default", **parts[1]},
        )
    )


def exact(schema: Any) -> Any:
    return json.loads(json.dumps(schema), parse_float=Decimal)


def texts_near(schema: dict[str, Any]) -> set[str]:
    """Numbers at and beside each bound, and multiples, in several spellings."""
    bounds = [Decimal(repr(schema[name])) for name in NAMES if name in schema] or [Decimal(0)]
    step = Decimal(repr(schema.get("multipleOf", 1)))
    numbers = {bound + Decimal(by) for bound in bounds for by in STEPS}
    numbers |= {((bound / step).to_integral_value() + i) * step for bound in bounds for i in range(-2, 3)}
    numbers |= {(low + high) / 2 for low in bounds for high in bounds}
    texts = {format(number, "f") for number in numbers}
    return texts | {f"{text}0" if "." in text else f"{text}.0" for text in texts} | {"0", "-0", "-0.0"}


def is_plain(text: str, schema: dict[str, Any]) -> bool:
    """Whether it is a whole number, not beside a bound. llguidance 1.9.1 loses some fractions, as 0.9 below 0.99."""
    number = Decimal(text)
    near = min((abs(number - Decimal(repr(schema[name]))) for name in NAMES if name in schema), default=Decimal(1))
    return text.lstrip("-").isdigit() and text != "-0" and near > BESIDE


def accepts(matcher: LLMatcher, vocabulary: LLTokenizer, text: str) -> bool:
    copy, token_ids = matcher.deep_copy(), vocabulary.tokenize_str(text)
    return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool", [USUAL, LONG], ids=["usual", "long"])
def test_what_is_accepted_is_valid(vocabulary: LLTokenizer, pool: tuple[float, ...], seed: int) -> None:
    rng = Random(seed)
    num_compiled, wrong, lost = 0, [], []
    for _ in range(250):
        schema = make_schema(rng, pool)
        given = placed(rng, schema)
        try:
            matcher = compile_grammar(vocabulary, read_schema(given, "here", is_strict=True).text())
        except GrammarError:  # no number is in the bounds
            continue
        num_compiled += 1
        judge = Draft202012Validator(exact(schema))
        for text in texts_near(schema):
            is_valid = judge.is_valid(json.loads(text, parse_float=Decimal))
            is_accepted = accepts(matcher, vocabulary, text)
            if is_accepted and not is_valid:
                wrong.append((given, text))
            if is_valid and not is_accepted and pool is USUAL and is_plain(text, schema):
                lost.append((given, text))
    assert num_compiled > 100
    assert wrong == []
    assert lost == [], lost[:5]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"exclusiveMinimum": 0, "minimum": 0.4, "maximum": 0.5}, {"minimum": 0.4, "maximum": 0.5}),
        ({"exclusiveMaximum": 0, "maximum": -0.4}, {"maximum": -0.4}),
        ({"minimum": 1, "exclusiveMinimum": 1}, {"minimum": 1.000000001}),
        ({"minimum": 0.25, "exclusiveMinimum": 0.25}, {"exclusiveMinimum": 0.25}),
        ({"minimum": 2**53 - 1}, {"minimum": 2**53 - 1}),
        ({"exclusiveMinimum": 10**15}, {"minimum": 10**15 + 1}),
        ({"exclusiveMinimum": -2, "exclusiveMaximum": 2}, {"exclusiveMinimum": -2, "exclusiveMaximum": 2}),
        ({"maximum": 2**63 - 1}, {"maximum": 9_223_372_036_854_770_000}),
        ({"minimum": True, "maximum": "x"}, {"minimum": True, "maximum": "x"}),
        ({"properties": {"minimum": {}, "default": {"exclusiveMaximum": 0}}},
         {"properties": {"minimum": {}, "default": {"maximum": -1e-9}}}),
        ({"const": {"exclusiveMinimum": 0}}, {"const": {"exclusiveMinimum": 0}}),
    ],
)  # fmt: skip
def test_of_two_bounds_the_tighter_is_left(given: dict[str, Any], found: dict[str, Any]) -> None:
    before = json.dumps(given)
    assert with_exact_bounds(given) == found
    assert json.dumps(given) == before, "a caller's schema is not written to"


@pytest.mark.parametrize(
    "number",
    [10**400, -(10**400), float("inf"), float("-inf"), float("nan"), 10**5_000],
    ids=["long", "negative", "infinite", "minus infinite", "nan", "very long"],
)
@pytest.mark.parametrize("keyword", [*NAMES, "multipleOf", "const", "minLength", "default"])
def test_a_number_that_no_double_holds_is_refused(keyword: str, number: float) -> None:
    for schema in ({keyword: number}, {"items": {keyword: [number]}}, {"maximum": 10**300, keyword: number}):
        for is_strict in (True, False):
            with pytest.raises(RequestError, match="a number that is too large") as caught:
                read_schema(schema, "here", is_strict=is_strict)
            assert (caught.value.code, caught.value.param) == ("invalid_value", "here")


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", [*NAMES, "multipleOf"])
def test_two_extreme_bounds_are_read(first: str, second: str) -> None:
    extremes = (1.797e308, -1.797e308, 10**308, 5e-324, -5e-324, 2**1023, -(2**1023), 0, -0.0)
    for one in extremes:
        for other in extremes:
            text = read_schema({first: one, second: other}, "here", is_strict=True).text()
            assert "Infinity" not in text and "NaN" not in text
