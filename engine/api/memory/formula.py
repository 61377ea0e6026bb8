"""Numbers that show where they come from: a value and the arithmetic that led to it, built by the same operators.

The text cannot drift from the value, because nobody writes it. Knows no model and no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add


@dataclass(frozen=True, slots=True)
class Formula:
    """A whole number, and how it was reached: "2 x 32 layers x 128"."""

    value: int
    text: str
    is_sum: bool = False
    """The text needs brackets as a factor."""

    def __add__(self, other: Formula) -> Formula:
        """Adding nothing leaves nothing to show."""
        if not other.value:
            return self
        return Formula(self.value + other.value, f"{self.text} + {other.text}", is_sum=True) if self.value else other

    def __mul__(self, other: Formula) -> Formula:
        return Formula(self.value * other.value, f"{self._factor} x {other._factor}")

    def __floordiv__(self, other: Formula) -> Formula:
        """Without a remainder: a formula that rounds is not shown as one that does not."""
        assert self.value % other.value == 0, f"{self.text} is no multiple of {other.text}"
        return Formula(self.value // other.value, f"{self._factor} / {other._factor}")

    def named(self, name: str) -> Formula:
        """The same, with a word before it."""
        return Formula(self.value, f"{name} {self._factor}")

    @property
    def _factor(self) -> str:
        return f"({self.text})" if self.is_sum else self.text


def term(value: int, unit: str = "") -> Formula:
    """A number as it stands, with what it counts, in the plural: `term(32, "layers")`."""
    shown = unit.removesuffix("s") if value == 1 else unit
    return Formula(value, f"{value:,} {shown}".rstrip())


NOTHING = Formula(0, "0")


def sum_of(formulas: Iterable[Formula]) -> Formula:
    return reduce(add, formulas, NOTHING)
