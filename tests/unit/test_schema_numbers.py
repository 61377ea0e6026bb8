"""Numbers under a schema, to the last digit. What the compiled grammar accepts is valid, and what is valid is accepted
within the digits that it writes. The judge is `jsonschema` on exact decimal numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from llguidance import LLMatcher, LLTokenizer

from inferd.engine.api.errors import RequestError
from inferd.engine.grammar.compiler import compile_grammar, normal_form
from inferd.engine.grammar.ports import GrammarError
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.schema import strict_json
from inferd.server.structured.schema import read_schema

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
NAMES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
USUAL = (0, 1, -1, 2, -2, 0.4, 0.5, -0.5, 10, 10.5, -10, -10.25, 0.06, 1e-3, 99, 1_000, 3.75, -3.75, 1e-7, 2.000001)
LONG = (
    2**53, 2**53 + 1, -(2**53) - 1, 2**53 - 1, 10**15 + 3, 10**17 + 1, 1e15, 1e16, -1e15, 2**62, 2**63 - 1, 2**64, 1e18,
    123_456_789.125, 2.1000010000000002, 0, 0.5, 1e25, 10**25 + 1, -1e25, 1e300, 5e-324,
)  # fmt: skip
FACTORS = (1, 2, 5, 0.5, 0.1, 0.25, 3, 0.01, 7, 0.07, 10, 1_000, 12, 1e-6)
LONG_FACTORS = (2**53 + 1, 10**18, 1e25, 7, 10**20 + 3, 65_536, 0.3, 99_999_999)
STEPS = ("0", "1", "-1", "0.1", "-0.1", "1e-5", "-1e-5", "1e-9", "-1e-9", "1e-12", "-1e-12", "2", "-10")
MOST_WHOLE_DIGITS, MOST_FRACTION_DIGITS = 40, 20


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, 3_072)


def compiled(vocabulary: LLTokenizer, schema: Any) -> LLMatcher:
    return compile_grammar(vocabulary, normal_form(read_schema(schema, "here", is_strict=True).text()).text)


def accepts(matcher: LLMatcher, vocabulary: LLTokenizer, text: str) -> bool:
    copy, token_ids = matcher.deep_copy(), vocabulary.tokenize_str(text)
    return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()


def make_schema(rng: Random, pool: tuple[float, ...], factors: tuple[float, ...]) -> dict[str, Any]:
    base = rng.choice(pool)
    steps = (base, rng.choice(pool), base + 1, base - 1, base + 0.5, base + 0.1, base - 0.5)
    schema: dict[str, Any] = {"type": rng.choice(("number", "integer"))}
    schema |= {name: rng.choice(steps) for name in NAMES if rng.random() < 0.5}
    if rng.random() < 0.25:
        schema["multipleOf"] = rng.choice(factors)
    return schema


def placed(rng: Random, schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema. In some cases its keywords are split between two schemas, and a property has a keyword's
    name."""
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in schema.items():
        rng.choice(parts)[name] = value
    return rng.choice(
        (schema, {"allOf": list(parts)}, {"$defs": {"default": parts[0]}, "$ref": "#/$defs/default", **parts[1]})
    )


def exact(number: str) -> int | Fraction:
    value = Fraction(Decimal(number))
    return int(value) if value.denominator == 1 else value


def read_exactly(text: str) -> Any:
    """Every number as a fraction or a whole number."""
    return json.loads(text, parse_float=exact, parse_int=exact)


def _is_multiple(validator: Any, step: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, (int, Fraction)) and Fraction(value) % Fraction(step):
        yield ValidationError("no multiple")


_TYPES = Draft202012Validator.TYPE_CHECKER.redefine(
    "number", lambda _, value: isinstance(value, (int, Fraction)) and not isinstance(value, bool)
)
Judge = extend(Draft202012Validator, {"multipleOf": _is_multiple}, type_checker=_TYPES)
"""jsonschema, with every number as a whole number or a fraction."""


def is_valid(schema: Any, text: str) -> bool:
    return bool(Judge(read_exactly(json.dumps(schema))).is_valid(read_exactly(text)))


def spelled(number: Decimal) -> set[str]:
    """Spellings of a number: in digits, with zeros behind, and as Python writes it with an exponent."""
    plain = format(number, "f")
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    texts = {plain, f"{plain}0" if "." in plain else f"{plain}.0"}
    if number:
        digits = "".join(map(str, number.normalize().as_tuple().digits))
        fraction = f".{digits[1:]}" if digits[1:] else ""
        texts.add(f"{'-' if number < 0 else ''}{digits[0]}{fraction}e{number.adjusted():+03}")
    return texts


def texts_near(schema: dict[str, Any]) -> set[str]:
    """Numbers at and beside each bound, and multiples, in several spellings."""
    with localcontext() as context:
        context.prec = 400
        bounds = [Decimal(repr(schema[name])) for name in NAMES if name in schema] or [Decimal(0)]
        step = Decimal(repr(schema.get("multipleOf", 1)))
        numbers = {bound + Decimal(by) for bound in bounds for by in STEPS}
        numbers |= {((bound / step).to_integral_value() + i) * step for bound in bounds for i in range(-2, 3)}
        numbers |= {(low + high) / 2 for low in bounds for high in bounds}
        return {text for number in numbers for text in spelled(number)} | {"0", "-0", "-0.0"}


def is_written(text: str, schema: dict[str, Any]) -> bool:
    """Whether the grammar promises to accept this spelling if it is valid."""
    mantissa, _, exponent = text.lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    number = Fraction(Decimal(text))
    if not number and text != "0":
        return False
    bounds = [Fraction(Decimal(repr(schema[name]))) for name in ("minimum", "maximum") if name in schema]
    is_constant = len(bounds) == 2 and bounds[0] == bounds[1]
    if (schema["type"] == "integer" or is_constant) and (fraction.endswith("0") or exponent):
        return False
    if schema["type"] == "integer" and fraction:
        return False
    if "multipleOf" in schema:
        step = Fraction(Decimal(repr(schema["multipleOf"])))
        is_rounded = exponent or (fraction.endswith("0") and fraction)
        return not is_rounded and abs(number / step) <= 1_000
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        bound = Fraction(Decimal(repr(schema.get(name, 0))))
        if bound and abs(number - bound) < abs(bound) / 10**13 and schema["type"] == "number":
            return False
    if exponent:
        return abs(int(exponent)) <= 307 and len(fraction) <= MOST_FRACTION_DIGITS
    return len(whole) <= MOST_WHOLE_DIGITS and len(fraction) <= MOST_FRACTION_DIGITS


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("pool", "factors"), [(USUAL, FACTORS), (LONG, LONG_FACTORS)], ids=["usual", "long"])
def test_what_is_accepted_is_what_is_valid(
    vocabulary: LLTokenizer, pool: tuple[float, ...], factors: tuple[float, ...], seed: int
) -> None:
    rng = Random(seed)
    num_compiled, wrong, lost = 0, [], []
    for _ in range(120):
        schema = make_schema(rng, pool, factors)
        given = placed(rng, schema)
        try:
            matcher = compiled(vocabulary, given)
        except GrammarError as error:
            wrong += [(given, str(error))] if "allows no value" not in str(error) else []
            wrong += [(given, text) for text in texts_near(schema) if is_valid(schema, text) and text.isdigit()]
            continue
        num_compiled += 1
        for text in texts_near(schema):
            is_right, is_accepted = is_valid(schema, text), accepts(matcher, vocabulary, text)
            if is_accepted and not is_right:
                wrong.append((given, text))
            if is_right and not is_accepted and is_written(text, schema):
                lost.append((given, text))
    assert num_compiled > 50
    assert wrong == [], wrong[:5]
    assert lost == [], lost[:5]


CONSTANTS = (
    2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, 2**64 - 1, 10**25, 1e25, 10**40 + 7, 0.1, 1e-7, 5e-324, -1.5, 1.0, 0,
    0.1000000000000000055, 1.7976931348623157e308, 1234567890123456789,
)  # fmt: skip


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_constant_is_written_so_that_it_is_read_as_the_same_number(vocabulary: LLTokenizer, constant: float) -> None:
    for schema in ({"const": constant}, {"enum": ["x", constant]}, {"type": "number", "const": constant}):
        matcher = compiled(vocabulary, {"properties": {"a": schema}, "required": ["a"]})
        own = json.dumps(constant)
        own = own.removesuffix(".0")
        assert accepts(matcher, vocabulary, f'{{"a": {own}}}')
        beside = [json.dumps(constant + by) for by in (1, -1) if isinstance(constant, int)]
        beside += [f"{own}1"] if "e" not in own else []
        assert not [text for text in beside if accepts(matcher, vocabulary, f'{{"a": {text}}}')]
    whole = compiled(vocabulary, {"const": [{"id": constant}]})
    assert accepts(whole, vocabulary, f'[{{"id": {own}}}]')


def test_19_digit_ids_are_told_apart(vocabulary: LLTokenizer) -> None:
    ids = [1234567890123456789 + i for i in range(0, 50, 2)]
    matcher = compiled(vocabulary, {"type": "array", "items": {"enum": ids}})
    assert all(accepts(matcher, vocabulary, f"[{one}]") for one in ids)
    assert not any(accepts(matcher, vocabulary, f"[{one + 1}]") for one in ids)


def test_a_body_keeps_every_digit_of_a_whole_number() -> None:
    body = strict_json.parse(b'{"const": 9007199254740993, "maximum": 1e25, "minimum": 123456789012345678901234567890}')
    assert body == {"const": 9007199254740993, "maximum": 1e25, "minimum": 123456789012345678901234567890}
    with pytest.raises(ValueError, match="1e400 is too large"):
        strict_json.parse(b'{"maximum": 1e400}')


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


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", [*NAMES, "multipleOf"])
def test_two_extreme_bounds_are_read(vocabulary: LLTokenizer, first: str, second: str) -> None:
    refused = []
    extremes = (1.797e308, -1.797e308, 10**308, 5e-324, -5e-324, 2**1023, -(2**1023), 0, -0.0)
    for one in extremes:
        for other in extremes:
            if second == "multipleOf" and not other:
                continue
            try:
                compiled(vocabulary, {"type": "number", first: one, second: other})
            except GrammarError as error:
                refused.append(str(error))
    assert all("allows no value" in error for error in refused)
