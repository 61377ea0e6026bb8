"""The options of a load run. They are every choice that changes its figures, so that a report can be repeated.

Lengths of prompts and answers are fixed, uniform, or log-normal with the long tail of real traffic. `parse_lengths`
reads a flag's text as one of the three. A draw depends on nothing but the generator that it is given.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from typing import Any, Literal

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench.slo import Objective

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


DEFAULT_CONCURRENCY = 8
DEFAULT_INPUT_LEN = Fixed(128)
DEFAULT_OUTPUT_LEN = Fixed(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One run. Lengths are in tokens. With `api` "chat" the input length is approximate; the report shows the real."""

    base_url: str
    model: str | None = None
    """Model to ask; None takes the first that the server lists."""
    api: Literal["completions", "chat"] = "completions"
    prompts: Literal["ids", "words"] = "ids"
    """Contents of a completion's prompt: token ids, or words if the server accepts no ids. Chats are always words."""
    num_requests: int = 64
    concurrency: int = DEFAULT_CONCURRENCY
    """Number of requests in flight in a closed loop."""
    rate: float | None = None
    """Requests that an open loop starts per second, whether or not earlier ones are done."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    burstiness: float = 1.0
    """Shape of the gamma distribution of random gaps. 1 is Poisson; below 1 requests come in bursts."""
    input_len: Lengths = DEFAULT_INPUT_LEN
    output_len: Lengths = DEFAULT_OUTPUT_LEN
    shared_prefix: int = 0
    """Tokens with which all prompts begin. A shorter prompt is the beginning of the prefix."""
    num_prefixes: int = 1
    """Number of different shared prefixes, which the requests use in turn."""
    goodput: Objective | None = None
    temperature: float = 0.0
    seed: int = 0
    warmup: int = 2
    """Number of requests that are sent before measuring. The report leaves them out."""
    timeout_s: float = 600.0
    vocab_size: int | None = None
    """Draw prompt ids below this number instead of calling the server's tokenizer."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for the first option that is out of bounds."""
        for name, low in (("num_requests", 1), ("concurrency", 1), ("num_prefixes", 1), ("warmup", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, but got {getattr(self, name)}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size must be at least 1, but got {self.vocab_size}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate must be a number above 0 (requests per second), but got {self.rate}")
        if not 0 < self.burstiness < float("inf"):
            raise ConfigError(f"burstiness must be a number above 0 (1: Poisson), but got {self.burstiness}")
        if not 0 <= self.shared_prefix <= self.input_len.most:
            raise ConfigError(
                f"shared_prefix must be from 0 to input_len ({self.input_len}), but got {self.shared_prefix}"
            )
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must begin with http:// or https://, but got {self.base_url!r}")

    def as_json(self) -> dict[str, Any]:
        """Every option by name. Lengths and targets are written as on the command line."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value if isinstance(value, int | float | str | None) else str(value) for name, value in values}

    @property
    def path(self) -> str:
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"
