"""Writes one `Numbers` as llguidance takes it: regular expressions, and schemas of multiples.

llguidance reads the numbers of a schema as doubles, so every bound that it is given is one that it reads exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from inferd.engine.grammar.schemas.digits import decimals, fixed_decimals, spelled, whole_numbers
from inferd.engine.grammar.schemas.shapes import Numbers, is_empty

_MOST_LISTED = 1_024
"""Most multiples that are listed one by one."""
_MOST_FACTOR = 1_000
"""Greatest factor, powers of ten aside, whose multiples llguidance finds: it keeps a state for each remainder."""
_MOST_PLACES = 9
"""Most digits behind the point of a step."""
_EXACT = 10**15
"""Decimal numbers of fewer digits than this survive conversion to a double and back."""
_LEAST_PLAIN = Fraction(1, 1_000)
"""Numbers below this, and those of more digits than a double keeps, may be written with an exponent."""
_MOST_WHOLE = 2**63 - 2**10
"""A double that llguidance can convert to a whole number of 64 bits."""


@lru_cache(1_024)
def expressions_of(numbers: Numbers) -> tuple[list[str], list[dict[str, object]]]:
    """(regular expressions, schemas for llguidance) that together match the numbers; both empty if there are none."""
    if is_empty(numbers):
        return [], []
    if numbers.step is not None:
        return _multiples(numbers, numbers.step)
    if numbers.low is not None and numbers.low == numbers.high:
        return list(_spellings(numbers)), []
    if numbers.is_whole:
        found = whole_numbers(*_between(numbers, Fraction(1)))
    else:
        found = decimals(numbers.low, numbers.high, low_open=numbers.low_open, high_open=numbers.high_open)
    return [] if found is None else [found], []


def described(numbers: Numbers) -> str:
    """The numbers in words."""
    low, high = (None if bound is None else _shown(bound) for bound in (numbers.low, numbers.high))
    rules = [f"{'above' if numbers.low_open else 'at least'} {low}"] if low else []
    rules += [f"{'below' if numbers.high_open else 'at most'} {high}"] if high else []
    rules += [f"a multiple of {_shown(numbers.step)}"] if numbers.step is not None else []
    return f"{'whole number' if numbers.is_whole else 'number'} is {' and '.join(rules)}"


def _shown(number: Fraction) -> str:
    text = spelled(number)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def number_of(value: object) -> Fraction | None:
    """A number of JSON as it was written, if that had at most 17 digits or no fraction; None for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def _spellings(numbers: Numbers) -> Iterator[str]:
    """Spellings of the only number in the bounds."""
    value = numbers.low
    assert value is not None
    if numbers.is_whole and value.denominator != 1:
        return
    plain = spelled(value)
    yield plain.replace(".", r"\.")
    if not numbers.is_whole and not _LEAST_PLAIN <= abs(value) < _EXACT and value:
        digits = plain.lstrip("-0.").replace(".", "").rstrip("0")
        exponent = _exponent(plain)
        sign, fraction = "-" if value < 0 else "", rf"\.{digits[1:]}" if digits[1:] else ""
        exponent_sign = "-" if exponent < 0 else r"\+?"
        yield f"{sign}{digits[0]}{fraction}[eE]{exponent_sign}0?{abs(exponent)}"


def _exponent(plain: str) -> int:
    """The power of ten of the first digit that is not 0."""
    whole, _, fraction = plain.lstrip("-").partition(".")
    return len(whole) - 1 if whole != "0" else len(fraction.lstrip("0")) - len(fraction) - 1


def _between(numbers: Numbers, step: Fraction) -> tuple[int | None, int | None]:
    """The least and the greatest k for which k * step is in the bounds."""
    low = None if numbers.low is None else math.ceil(numbers.low / step)
    high = None if numbers.high is None else math.floor(numbers.high / step)
    if low is not None and numbers.low_open and low * step == numbers.low:
        low += 1
    if high is not None and numbers.high_open and high * step == numbers.high:
        high -= 1
    return low, high


def _multiples(numbers: Numbers, step: Fraction) -> tuple[list[str], list[dict[str, object]]]:
    if numbers.is_whole:
        step = Fraction(step.numerator)
    factor, power = _factored(step)
    low, high = _between(numbers, step)
    if low is not None and high is not None and low > high:
        return [], []
    is_short = low is not None and high is not None and high - low < _MOST_LISTED
    if factor == 1 and power >= -_MOST_PLACES:
        return _round_numbers(low, high, power), []
    if not is_short and factor <= _MOST_FACTOR and -_MOST_PLACES <= power <= 0:
        expressions, schemas = _read_exactly(numbers, factor, -power)
        if schemas:
            return expressions, schemas
    return [_listed(low, high, step)], []


def _factored(step: Fraction) -> tuple[int, int]:
    """(factor, power): the step is factor * 10**power, and 10 does not divide the factor."""
    power = 0
    while step.denominator != 1:
        step, power = step * 10, power - 1
    factor = step.numerator
    while factor % 10 == 0:
        factor, power = factor // 10, power + 1
    return factor, power


def _round_numbers(low: int | None, high: int | None, power: int) -> list[str]:
    """k * 10**power for k from `low` to `high`."""
    if power > 0:
        parts = []
        for first, last in ((low, -1 if high is None else min(high, -1)), (1 if low is None else max(low, 1), high)):
            part = whole_numbers(first, last) if first is None or last is None or first <= last else None
            parts += [f"{part}0{{{power}}}"] if part is not None else []
        return parts + (["0"] if (low is None or low <= 0) and (high is None or high >= 0) else [])
    parts = []
    for num_places in range(-power + 1):
        unit = 10 ** (-power - num_places)
        first = None if low is None else -(-low // unit)
        last = None if high is None else high // unit
        part = fixed_decimals(first, last, num_places)
        parts += [part] if part is not None else []
    return parts


def _read_exactly(numbers: Numbers, factor: int, num_places: int) -> tuple[list[str], list[dict[str, object]]]:
    """(expressions, schemas that llguidance reads exactly) of the multiples: a schema for each number of digits behind
    the point. The schemas are empty if there are no such schemas."""
    expressions: list[str] = []
    schemas: list[dict[str, object]] = []
    for places in range(num_places + 1):
        scale = 10 ** (num_places - places)
        step = Fraction(factor // math.gcd(factor, scale), 10**places)
        as_double = _as_read(step)
        if as_double is None:
            return [], []
        low, high = _between(numbers, step)
        most = int((_EXACT // 10**places if places else _MOST_WHOLE) / step) - 1
        first, last = -most if low is None else max(low, -most), most if high is None else min(high, most)
        least = _double_in(first, last, step)
        greatest = _double_in(-last, -first, step)
        if first > last or least is None or greatest is None or least[0] > -greatest[0]:
            continue
        if low is not None and least[0] > first:
            expressions.append(_listed(first, least[0] - 1, step))
        if high is not None and -greatest[0] < last:
            expressions.append(_listed(1 - greatest[0], last, step))
        kind = "number" if places else "integer"
        schemas.append({"type": kind, "multipleOf": as_double, "minimum": least[1], "maximum": -greatest[1]})
    return expressions, schemas


def _double_in(first: int, last: int, step: Fraction) -> tuple[int, float] | None:
    """(k, bound) for the least k from `first` on for which a double is above (k - 1) * step and at most k * step; None
    if there is none near."""
    for k in range(first, min(last, first + _MOST_LISTED) + 1):
        near = float(k * step)
        for double in (near, math.nextafter(near, -math.inf)):
            if (k - 1) * step < Fraction(double) <= k * step or (step.denominator > 1 and double == near):
                return k, int(double) if double == int(double) else double
    return None


def _as_read(step: Fraction) -> int | float | None:
    """A number that llguidance 1.9.1 reads as the step: it multiplies a double by 10 until it is whole. None if it
    reads no double so."""
    if step.denominator == 1:
        return step.numerator
    near = float(step)
    for double in (near, math.nextafter(near, 0), math.nextafter(near, 1e9)):
        value, num_places = double, 0
        while value != int(value) and num_places < 400:
            value, num_places = value * 10, num_places + 1
        if value < 2**32 and Fraction(int(value), 10**num_places) == step:
            return double
    return None


def _listed(low: int | None, high: int | None, step: Fraction) -> str:
    """The multiples, or those of them that are nearest to 0."""
    middle = max(low, 0) if low is not None else 0
    middle = min(high, middle) if high is not None else middle
    first = middle - _MOST_LISTED if low is None else max(low, middle - _MOST_LISTED)
    last = middle + _MOST_LISTED if high is None else min(high, middle + _MOST_LISTED)
    texts = "|".join(spelled(k * step) for k in range(first, last + 1))
    return f"({texts})".replace(".", r"\.")
