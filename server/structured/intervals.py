"""The bounds of numbers in a JSON schema, so that llguidance 1.9.1 keeps to them: of each side one, the tighter, and
one that it reads exactly.

What it reads otherwise: it takes an exclusive whole number itself where the interval lies between this and the next one
away from 0, and for a number of more than 15 digits another one close by. Such bounds are moved inwards: a few valid
numbers beside them are lost, and no invalid one is let through.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal

_DIGITS = 15
"""A decimal number of so many digits is still the same one when it was a double."""

_MOST_WHOLE = 2**53
"""Whole numbers up to this one are exact, however many digits they have."""

_LEAST_EXCESS = Decimal("1e-9")
"""How far above an exclusive whole number the least allowed one lies, at least."""

_UPWARDS = Context(prec=_DIGITS, rounding=ROUND_CEILING)
_EXACT = Context(prec=2_000)
"""More digits than a double has."""

_BOUNDS = (("minimum", "exclusiveMinimum", False), ("maximum", "exclusiveMaximum", True))


def has_bounds(schema: Mapping[str, object]) -> bool:
    """Whether the schema bounds numbers itself, beside what it holds."""
    return any(lower in schema or upper in schema for lower, upper, _ in _BOUNDS)


def make_exact(schema: dict[str, object]) -> None:
    """Replace the bounds of a schema; of what it holds they stay as they are."""
    for inclusive, exclusive, is_upper in _BOUNDS:
        _narrow(schema, inclusive, exclusive, is_upper=is_upper)


def _narrow(schema: dict[str, object], inclusive: str, exclusive: str, *, is_upper: bool) -> None:
    """Leave one bound of two. An upper one is treated as the lower one of the negated numbers."""
    given = [
        (bound.copy_negate() if is_upper else bound, is_exclusive)
        for key, is_exclusive in ((inclusive, False), (exclusive, True))
        if (bound := _number(schema.get(key))) is not None
    ]
    if not given:
        return
    bound, is_exclusive = _inwards(*max(given))
    for key in (inclusive, exclusive):
        if _number(schema.get(key)) is not None:
            del schema[key]
    if is_upper:
        bound = bound.copy_negate()
    schema[exclusive if is_exclusive else inclusive] = int(bound) if bound == int(bound) else float(bound)


def _inwards(bound: Decimal, is_exclusive: bool) -> tuple[Decimal, bool]:
    """A lower bound that is read exactly, not below this one: (the bound, whether it is exclusive)."""
    is_whole = bound == bound.to_integral_value()
    if is_whole and bound.copy_abs() < _MOST_WHOLE:
        if not is_exclusive or bound < 0:
            return bound, is_exclusive
        return _EXACT.add(bound, min(Decimal(1), max(_LEAST_EXCESS, _unit(bound)))), False
    near = _UPWARDS.plus(bound)
    if near == bound and not is_whole:
        return bound, is_exclusive
    # A double beyond 2^53 may lie below the decimal number that it was read from.
    while Decimal(float(near)) < bound or (is_exclusive and near == bound):
        near = _EXACT.add(near, _unit(near))
    return near, False


def _unit(number: Decimal) -> Decimal:
    """The last of `_DIGITS` digits."""
    return Decimal(1).scaleb(number.adjusted() - _DIGITS + 1)


def _number(value: object) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))
