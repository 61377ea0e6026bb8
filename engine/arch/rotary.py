"""Rotary embeddings as plain data. `rope` reads them from a config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every rotary frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The rope's base grows with the number of positions served beyond the original ones ("dynamic NTK")."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """A frequency is divided by `factor` if it turns fewer than `beta_slow` times over the original context, and kept
    if it turns more than `beta_fast` times. Between these it is interpolated (YaRN: Peng et al. 2023,
    arXiv:2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the two ends of the interpolation are rounded to whole indices of frequencies."""


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Every frequency has its own divisor: from `short_factors` if at most the original positions are served, else from
    `long_factors` (Ding et al. 2024, arXiv:2402.13753)."""

    original_max_positions: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first `num_turned` pairs of elements turn, by frequencies divided by `factor`."""

    num_turned: int
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept, those between them interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | ProportionalScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """A query at position p is multiplied by 1 + beta * ln(1 + floor(p / original_max_positions)), so that attention
    stays sharp over long contexts (Llama 4's temperature tuning)."""

    beta: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` elements of each head."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    attention_factor: float = 1.0
    """Factor of every cosine and sine. An attention score is multiplied by its square."""
    query_growth: QueryGrowth | None = None
    """Factor of the queries, in a model whose rope turns whole heads."""
    turns_neighbours: bool = False
    """Whether the pairs that turn are elements 2i and 2i + 1 of the stored heads, not i and i + `rotary_dim` / 2.
    The loader reorders the rows of such heads, so that kernels know one order."""
