"""Rewrites the bounds of numbers in a JSON schema so that llguidance 1.9.1 enforces them exactly.

Each side keeps one bound, the tighter, in a form that llguidance reads exactly. It misreads two kinds of bounds: an
exclusive whole number, if the interval lies between it and the next whole number away from 0, and a number of more than
15 digits. Such bounds are moved inwards. This loses a few valid numbers next to them and lets no invalid one through.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal

_DIGITS = 15
"""A decimal number of so many digits survives conversion to a double and back."""

_MOST_WHOLE = 2**53
"""Whole numbers up to this one are exact in a double."""

_LEAST_EXCESS = Decimal("1e-9")
"""Smallest distance of the least allowed number from an exclusive whole bound."""

_UPWARDS = Context(prec=_DIGITS, rounding=ROUND_CEILING)
_EXACT = Context(prec=2_000)
"""More digits than a double has."""

_BOUNDS = (("minimum", "exclusiveMinimum", False), ("maximum", "exclusiveMaximum", True))


def has_bounds(schema: Mapping[str, object]) -> bool:
    """Whether the schema itself, without the schemas in it, bounds numbers."""
    return any(lower in schema or upper in schema for lower, upper, _ in _BOUNDS)


def make_exact(schema: dict[str, object]) -> None:
    """Replace the bounds of a schema, without those of the schemas in it."""
    for inclusive, exclusive, is_upper in _BOUNDS:
        _narrow(schema, inclusive, exclusive, is_upper=is_upper)


def _narrow(schema: dict[str, object], inclusive: str, exclusive: str, *, is_upper: bool) -> None:
    """Keep the tighter of two bounds. An upper bound is treated as the lower bound of the negated numbers."""
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
    """The smallest lower bound not below this one that is read exactly: (bound, whether it is exclusive)."""
    is_whole = bound == bound.to_integral_value()
    if is_whole and bound.copy_abs() < _MOST_WHOLE:
        if not is_exclusive or bound < 0:
            return bound, is_exclusive
        return _EXACT.add(bound, min(Decimal(1), max(_LEAST_EXCESS, _unit(bound)))), False
    near = _UPWARDS.plus(bound)
    if near == bound and not is_whole:
        return bound, is_exclusive
    # A double beyond 2^53 may be below the decimal number that it was read from.
    while Decimal(float(near)) < bound or (is_exclusive and near == bound):
        near = _EXACT.add(near, _unit(near))
    return near, False


def _unit(number: Decimal) -> Decimal:
    """The value of one in the last of `_DIGITS` digits."""
    return Decimal(1).scaleb(number.adjusted() - _DIGITS + 1)


def _number(value: object) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))
