"""Lengths of prompts and answers: fixed, uniform, or log-normal with the long tail of real traffic.

`parse_lengths` reads a flag's text as one of the three. A draw depends on nothing but the generator that it is given.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from inferd.engine.api.errors import ConfigError

MAX_LENGTH = 10_000_000
"""Maximum length in tokens. No model's context is longer, but a typo may be."""
MAX_SIGMA = 5.0
SPELLINGS = "128 (always), 64:256 (uniform) or lognormal:128,0.6[,2048] (median, sigma[, maximum])"


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `num_tokens`."""

    num_tokens: int

    @property
    def most(self) -> int:
        return self.num_tokens

    def draw(self, rng: random.Random) -> int:
        return self.num_tokens

    def __str__(self) -> str:
        return str(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each whole number from `least` to `most`, both included, with the same probability."""

    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal draw with this median, and `sigma` as its logarithm's standard deviation, clamped to 1..`most`."""

    median: int
    sigma: float
    most: int = MAX_LENGTH

    def draw(self, rng: random.Random) -> int:
        return min(self.most, max(1, round(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0)))))

    def __str__(self) -> str:
        return f"lognormal:{self.median},{self.sigma:g}" + (f",{self.most}" if self.most != MAX_LENGTH else "")


Lengths = Fixed | Uniform | LogNormal


def parse_lengths(option: str, text: str) -> Lengths:
    """Read the text of `option`. Raises `ConfigError`, which names the option."""
    try:
        return _parse(text.strip())
    except ValueError as error:
        raise ConfigError(f"{option} must be {SPELLINGS}, but got {text!r}{_because(error)}") from None


class _RuleError(ValueError):
    """The text has the right form, but a number in it breaks a rule."""


def _because(error: ValueError) -> str:
    return f": {error}" if isinstance(error, _RuleError) else ""


def _parse(text: str) -> Lengths:
    kind, colon, rest = text.partition(":")
    if not colon:
        return Fixed(_count(text))
    if kind != "lognormal":
        least, most = _count(kind), _count(rest)
        if least > most:
            raise _RuleError(f"{least} is above {most}")
        return Uniform(least, most)
    median, sigma, *most_text = rest.split(",")
    if len(most_text) > 1:
        raise ValueError
    lengths = LogNormal(_count(median), _sigma(sigma), _count(most_text[0]) if most_text else MAX_LENGTH)
    if lengths.most < lengths.median:
        raise _RuleError(f"the maximum, {lengths.most}, is below the median, {lengths.median}")
    return lengths


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError
    number = int(text) if len(text) <= len(str(MAX_LENGTH)) else MAX_LENGTH + 1
    if not 1 <= number <= MAX_LENGTH:
        raise _RuleError(f"a length must be from 1 to {MAX_LENGTH}")
    return number


def _sigma(text: str) -> float:
    sigma = float(text)
    if not 0 < sigma <= MAX_SIGMA:
        raise _RuleError(f"sigma must be above 0 and at most {MAX_SIGMA:g}")
    return sigma
