"""Regular expressions for the decimal spellings of numbers in an interval, exact to the last digit.

Pure functions of whole numbers and fractions. They know no schema. Every expression bounds how many digits it matches.
"""

from __future__ import annotations

import math
from fractions import Fraction

MOST_WHOLE_DIGITS = 40
"""Most digits before the point of a number that no bound makes longer: 128-bit whole numbers fit."""
MOST_FRACTION_DIGITS = 20
"""Most digits behind the point. A double between 0.0001 and 1 has up to 20 in its shortest spelling."""
_MOST_BOUND_PLACES = 40
"""Digits behind the point of a bound that are kept."""
_MOST_BOUND_DIGITS = 60
"""Digits of a bound that are kept: an expression nests one group for each."""
LEAST_EXPONENT, MOST_EXPONENT = -307, 307
"""Powers of ten whose every multiple by 1 to 9.99 is a normal double."""

_LARGEST = Fraction(17976931348623157, 10**16) * 10**308
"""The largest double, in its shortest spelling."""


def whole_numbers(low: int | None, high: int | None) -> str | None:
    """The whole numbers from `low` to `high`, None for no bound; the result is None if there is none."""
    low, high = _within_digits(low, high)
    if low > high:
        return None
    parts = []
    if low < 0:
        negative = _unsigned(max(1, -high), -low)
        parts.append(f"-{negative}")
    if high >= 0:
        parts.append(_unsigned(max(0, low), high))
    return _any_of(parts)


def decimals(
    low: Fraction | None, high: Fraction | None, *, low_open: bool = False, high_open: bool = False
) -> str | None:
    """The numbers in an interval, with a fraction or an exponent or neither. `low_open`, `high_open`: the bound itself
    is not in it. The result is None if the interval is empty.

    An open bound other than 0 is moved inwards by one in its 15th digit, and at most by 1. So a reader of doubles does
    not read a number beside it as the bound.
    """
    if low is None and high is None:
        return f"-?{_any_of([*_plain(Fraction(0), None), *_scientific(None, None)])}"
    low, low_open = _closed(low, low_open, 1)
    high, high_open = _closed(high, high_open, -1)
    parts = []
    if low is None or low < 0:
        least = None if low is None else -low
        most = Fraction(0) if high is None or high >= 0 else -high
        parts += [f"-{part}" for part in _positive(most, least)]
    if high is None or high > 0:
        parts += _positive(Fraction(0) if low is None or low < 0 else low, high)
    if _holds_zero(low, high, low_open=low_open, high_open=high_open):
        parts.append(r"0(\.0{1,20})?")
    return _any_of(parts) if parts else None


def fixed_decimals(low: int | None, high: int | None, num_places: int) -> str | None:
    """The numbers k / 10**num_places for the whole numbers k from `low` to `high`, with exactly so many digits behind
    the point; None if there is none."""
    if num_places == 0:
        return whole_numbers(low, high)
    low, high = _within_digits(low, high, num_places)
    if low > high:
        return None
    parts = []
    if low < 0:
        parts += [f"-{part}" for part in _fixed(max(1, -high), -low, num_places)]
    if high >= 0:
        parts += _fixed(max(0, low), high, num_places)
    return _any_of(parts)


def spelled(value: Fraction) -> str:
    """A number with a finite decimal expansion in digits, without zeros at the end of its fraction."""
    whole, fraction = _split(abs(value))
    return ("-" if value < 0 else "") + str(whole) + (f".{fraction}" if fraction else "")


def _within_digits(low: int | None, high: int | None, num_more: int = 0) -> tuple[int, int]:
    """Both bounds. The most digits that are written replace a bound that is missing or far from 0."""
    most = 10 ** (MOST_WHOLE_DIGITS + num_more) - 1
    asked_for = max(_digits_asked_for(None if bound is None else abs(Fraction(bound))) for bound in (low, high))
    most = max(most, 10**asked_for - 1)
    if low is not None and low > most:
        most = low * 10**MOST_FRACTION_DIGITS
    if high is not None and high < -most:
        most = -high * 10**MOST_FRACTION_DIGITS
    return _rounded_up(-most if low is None else max(low, -most)), -_rounded_up(
        -most if high is None else -min(high, most)
    )


def _rounded_up(bound: int) -> int:
    """The bound, or the smallest number above it of few digits other than zeros."""
    unit: int = 10 ** max(0, len(str(abs(bound))) - _MOST_BOUND_DIGITS)
    return -(-bound // unit) * unit


def _closed(bound: Fraction | None, is_open: bool, inwards: int) -> tuple[Fraction | None, bool]:
    """A bound that is itself allowed, if it is not 0."""
    if bound is None or not bound or not is_open:
        return bound, is_open
    return bound + inwards * min(Fraction(1), Fraction(10) ** (_decade(abs(bound)) - 14)), False


def _holds_zero(low: Fraction | None, high: Fraction | None, *, low_open: bool, high_open: bool) -> bool:
    is_above = low is None or low < 0 or (low == 0 and not low_open)
    return is_above and (high is None or high > 0 or (high == 0 and not high_open))


def _positive(low: Fraction, high: Fraction | None) -> list[str]:
    """Spellings of the numbers above 0 from `low` to `high`."""
    if high is not None and low > high:
        return []
    return [*_plain(low, high, is_above_zero=True), *_scientific(low, high)]


# --- without an exponent ---------------------------------------------------------------------------------------------


def _plain(low: Fraction, high: Fraction | None, *, is_above_zero: bool = False) -> list[str]:
    """Spellings without an exponent of the numbers from `low` (at least 0) to `high`."""
    most = Fraction(10) ** max(MOST_WHOLE_DIGITS, _digits_asked_for(high))
    if low >= most:
        most = Fraction(10) ** (_decade(low) + 1 + MOST_FRACTION_DIGITS)
    is_endless = high is None or high >= most
    first, first_fraction = _split(_grid(low, 1))
    last, last_fraction = _split(most if high is None or is_endless else _grid(high, -1))
    if (first, first_fraction) == (last, last_fraction) == (0, "") and is_above_zero:
        return []
    parts: list[str] = []
    if first == last:
        if first_fraction.ljust(99, "0") <= last_fraction.ljust(99, "0"):
            parts = _with_fraction(str(first), _between(first_fraction, last_fraction))
            if is_above_zero and not first and not first_fraction:
                parts = _with_fraction("0", _both_non_zero(last_fraction))
        return parts
    low_whole = first
    if first_fraction or (is_above_zero and not first):
        fractions = _at_least(first_fraction) if first_fraction else (False, [_NOT_ZERO])
        parts += _with_fraction(str(first), fractions)
        low_whole += 1
    if not is_endless:
        parts += _with_fraction(str(last), _at_most(last_fraction))
    if low_whole < last:
        parts.append(rf"{_unsigned(low_whole, last - 1)}(\.[0-9]{{1,{MOST_FRACTION_DIGITS}}})?")
    return parts


def _digits_asked_for(bound: Fraction | None) -> int:
    """Digits before the point of a bound, unless they are so many that the bound is meant as none."""
    num_digits = _decade(bound) + 1 if bound else 0
    return num_digits if num_digits <= _MOST_BOUND_DIGITS else 0


def _split(value: Fraction) -> tuple[int, str]:
    """(the part before the point, the digits behind it) of a number that is not negative."""
    whole, rest = divmod(value.numerator, value.denominator)
    if not rest:
        return whole, ""
    num_places, scale = 0, 1
    while rest * scale % value.denominator:
        num_places += 1
        scale *= 10
    return whole, str(rest * scale // value.denominator).rjust(num_places, "0")


def _grid(value: Fraction, inwards: int) -> Fraction:
    """The value, moved inwards to a number of few digits."""
    scale = 10**_MOST_BOUND_PLACES if value < 10**MOST_FRACTION_DIGITS else 1
    scaled = inwards * value * scale
    return inwards * Fraction(_rounded_up(math.ceil(scaled)), scale)


_Fractions = tuple[bool, list[str]]
"""Digits behind a point: (whether there may be none, expressions of one or more digits)."""


def _with_fraction(whole: str, fractions: _Fractions) -> list[str]:
    may_lack, parts = fractions
    if not parts:
        return [whole] if may_lack else []
    return [rf"{whole}(\.{_any_of(parts)}){'?' if may_lack else ''}"]


def _after(digit: str, fractions: _Fractions) -> list[str]:
    may_lack, parts = fractions
    if not parts:
        return [digit] if may_lack else []
    return [f"{digit}({_any_of(parts)}){'?' if may_lack else ''}"]


_MORE = f"[0-9]{{0,{MOST_FRACTION_DIGITS - 1}}}"
_ANY: _Fractions = (True, [f"[0-9]{{1,{MOST_FRACTION_DIGITS}}}"])
_ZEROS: _Fractions = (True, [f"0{{1,{MOST_FRACTION_DIGITS}}}"])
_NOT_ZERO = f"0{{0,{MOST_FRACTION_DIGITS}}}[1-9]{_MORE}"


def _at_least(digits: str) -> _Fractions:
    """Fractions of at least 0.digits."""
    if not digits.strip("0"):
        return _ANY
    first = int(digits[0])
    parts = _after(digits[0], _at_least(digits[1:]))
    return False, [*parts, *([f"{_digit(first + 1, 9)}{_MORE}"] if first < 9 else ())]


def _at_most(digits: str) -> _Fractions:
    """Fractions of at most 0.digits."""
    if not digits.strip("0"):
        return _ZEROS
    first = int(digits[0])
    parts = _after(digits[0], _at_most(digits[1:]))
    return True, [*parts, *([f"{_digit(0, first - 1)}{_MORE}"] if first else ())]


def _between(low: str, high: str) -> _Fractions:
    """Fractions from 0.low to 0.high."""
    if not low.strip("0"):
        return _at_most(high)
    if not high:
        return False, []
    first, last = int(low[0]), int(high[0])
    if first == last:
        return False, _after(low[0], _between(low[1:], high[1:]))
    parts = _after(low[0], _at_least(low[1:]))
    if last - first > 1:
        parts.append(f"{_digit(first + 1, last - 1)}{_MORE}")
    return False, [*parts, *_after(high[0], _at_most(high[1:]))]


def _both_non_zero(high: str) -> _Fractions:
    """Fractions above 0 and at most 0.high."""
    if not high.strip("0"):
        return False, []
    first = int(high[0])
    if not first:
        return False, _after("0", _both_non_zero(high[1:]))
    parts = [f"0{_NOT_ZERO}", *_after(high[0], _at_most(high[1:]))]
    return False, [*parts, *([f"{_digit(1, first - 1)}{_MORE}"] if first > 1 else ())]


# --- with an exponent ------------------------------------------------------------------------------------------------


def _scientific(low: Fraction | None, high: Fraction | None) -> list[str]:
    """Spellings with an exponent, and one digit other than 0 before the point, of the numbers above 0 from `low` to
    `high`."""
    least = Fraction(10) ** LEAST_EXPONENT
    low = max(low or least, least)
    most = min(_LARGEST if high is None else high, _LARGEST)
    if low > most:
        return []
    first, last = _decade(low), _decade(most)
    parts = []
    if first == last:
        return [_mantissa(low / Fraction(10) ** first, most / Fraction(10) ** last) + _exponents(first, first)]
    if low > Fraction(10) ** first:
        parts.append(_mantissa(low / Fraction(10) ** first, None) + _exponents(first, first))
        first += 1
    parts.append(_mantissa(Fraction(1), most / Fraction(10) ** last) + _exponents(last, last))
    if first < last:
        parts.append(_mantissa(Fraction(1), None) + _exponents(first, last - 1))
    return parts


def _mantissa(low: Fraction, high: Fraction | None) -> str:
    if low == 1 and high is None:
        return rf"[1-9](\.[0-9]{{1,{MOST_FRACTION_DIGITS}}})?"
    parts = _plain(low, Fraction(10) - Fraction(1, 10**_MOST_BOUND_PLACES) if high is None else high)
    return _any_of(parts or [spelled(low)])


def _exponents(first: int, last: int) -> str:
    parts = []
    if first < 0:
        parts.append(f"-{_padded(max(1, -last), -first)}")
    if last >= 0:
        parts.append(rf"\+?{_padded(max(0, first), last)}")
    return f"[eE]{_any_of(parts)}"


def _padded(first: int, last: int) -> str:
    """Whole numbers, with a zero before those of one digit or without."""
    parts = [f"0?{_digit(first, min(9, last))}"] if first < 10 else []
    return _any_of([*parts, *([_unsigned(max(10, first), last)] if last > 9 else ())])


def _decade(value: Fraction) -> int:
    """The greatest e with 10**e <= value, which is above 0."""
    guess = len(str(value.numerator)) - len(str(value.denominator))
    return guess if Fraction(10) ** guess <= value else guess - 1


# --- whole numbers ---------------------------------------------------------------------------------------------------


def _unsigned(low: int, high: int) -> str:
    """The whole numbers from `low` to `high`, neither of which is negative."""
    parts = []
    full: list[int] = []
    """Numbers of digits of which every number is in the interval."""
    for num_digits in range(len(str(low)), len(str(high)) + 1):
        least, most = (10 ** (num_digits - 1) if num_digits > 1 else 0), 10**num_digits - 1
        if num_digits > 1 and low <= least and high >= most:
            full.append(num_digits)
        else:
            parts.append(_of_length(str(max(low, least)), str(min(high, most))))
    if full:
        parts.append(f"[1-9]{_repeated(full[0] - 1, full[-1] - 1)}")
    return _any_of(parts)


def _of_length(low: str, high: str) -> str:
    """The texts of digits from `low` to `high`, which are equally long."""
    if not low:
        return ""
    if not low.strip("0") and not high.strip("9"):
        return _repeated(len(low), len(low))
    first, last, more = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return low[0] + _of_length(low[1:], high[1:])
    parts = []
    if low[1:].strip("0"):
        parts.append(low[0] + _of_length(low[1:], "9" * more))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _of_length("0" * more, high[1:]))
        last -= 1
    if first <= last:
        parts.append(_digit(first, last) + (_repeated(more, more) if more else ""))
    return _any_of(parts)


def _fixed(low: int, high: int, num_places: int) -> list[str]:
    """Spellings of k / 10**num_places for k from `low` to `high`, neither of which is negative."""
    scale = 10**num_places
    first, first_fraction = divmod(low, scale)
    last, last_fraction = divmod(high, scale)
    low_text, high_text = (str(part).rjust(num_places, "0") for part in (first_fraction, last_fraction))
    if first == last:
        return [rf"{first}\.{_of_length(low_text, high_text)}"]
    parts = []
    if first_fraction:
        parts.append(rf"{first}\.{_of_length(low_text, '9' * num_places)}")
        first += 1
    if last_fraction != scale - 1:
        parts.append(rf"{last}\.{_of_length('0' * num_places, high_text)}")
        last -= 1
    if first <= last:
        parts.append(rf"{_unsigned(first, last)}\.{_repeated(num_places, num_places)}")
    return parts


def _digit(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _repeated(low: int, high: int) -> str:
    if (low, high) == (1, 1):
        return "[0-9]"
    return f"[0-9]{{{low}}}" if low == high else f"[0-9]{{{low},{high}}}"


def _any_of(parts: list[str]) -> str:
    """One of these expressions, none of which has alternatives outside of brackets."""
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
