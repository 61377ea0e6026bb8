"""Numbers that show how they were computed: the same operators build a value and the text of its formula.

So the text cannot differ from the value. Knows no model and no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add


@dataclass(frozen=True, slots=True)
class Formula:
    """A whole number and its formula: "2 x 32 layers x 128"."""

    value: int
    text: str
    is_sum: bool = False
    """Whether the text needs brackets as a factor."""

    def __add__(self, other: Formula) -> Formula:
        """The sum. A term of 0 is not shown."""
        if not other.value:
            return self
        return Formula(self.value + other.value, f"{self.text} + {other.text}", is_sum=True) if self.value else other

    def __mul__(self, other: Formula) -> Formula:
        return Formula(self.value * other.value, f"{self._factor} x {other._factor}")

    def __floordiv__(self, other: Formula) -> Formula:
        """The quotient, which must have no remainder, because the text does not show rounding."""
        assert self.value % other.value == 0, f"{self.text} is no multiple of {other.text}"
        return Formula(self.value // other.value, f"{self._factor} / {other._factor}")

    def named(self, name: str) -> Formula:
        """The same number, with a word before its text."""
        return Formula(self.value, f"{name} {self._factor}")

    @property
    def _factor(self) -> str:
        return f"({self.text})" if self.is_sum else self.text


def term(value: int, unit: str = "") -> Formula:
    """A number with its unit, which is given in the plural: `term(32, "layers")`."""
    shown = unit.removesuffix("s") if value == 1 else unit
    return Formula(value, f"{value:,} {shown}".rstrip())


NOTHING = Formula(0, "0")


def sum_of(formulas: Iterable[Formula]) -> Formula:
    return reduce(add, formulas, NOTHING)
