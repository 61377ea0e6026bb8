"""Rotary angles: the table of cosines and sines that a layer reads by absolute position.

Frequencies and angles are computed in fp32, as in training: a more exact angle at position 100,000 would be a different
one.

Two scalings depend on the length of a sequence: dynamic scaling for its base, LongRoPE for its set of factors. A key is
rotated once and stays in the cache, and a token must not depend on later ones. So one length holds for every sequence:
the model's own, or the longest that the user asked to serve. transformers uses the length of each sequence. Results
agree for sequences of the served length, and for all if the served length is at most the original one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inferd.engine.arch.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)

_PART = 1024
"""Number of positions whose angles are computed at once. Those of all 32,768 positions of a head of 256 would leave
48 MiB of freed memory behind, which the allocator keeps."""


def cos_sin_table(
    rope: Rope | None, num_positions: int, device: torch.device, served_positions: int | None = None
) -> Tensor:
    """[num_positions, rotary_dim] fp32: per position rotary_dim / 2 cosines, then as many sines.

    Scalings that depend on a length use `served_positions` (default: `num_positions`).

    Without rope, two elements of each head are rotated by an angle of 0, because a kernel rotates at least two.
    """
    if rope is None:
        return torch.tensor([[1.0, 0.0]]).repeat(num_positions, 1).to(device)
    frequencies = inverse_frequencies(rope, served_positions or num_positions)
    table = torch.empty(num_positions, rope.rotary_dim)
    for first in range(0, num_positions, _PART):
        part = table[first : first + _PART]
        angles = torch.arange(first, first + len(part), dtype=torch.float32)[:, None] * frequencies
        part.copy_(torch.cat([angles.cos(), angles.sin()], dim=1).mul_(rope.attention_factor))
    return table.to(device)


def query_table(rope: Rope | None, cos_sin: Tensor) -> Tensor | None:
    """The table of `cos_sin_table` for queries, which grow with their position; None if it is that of the keys: in a
    model without such growth, and if no position is long enough for it."""
    growth = None if rope is None else rope.query_growth
    if growth is None or len(cos_sin) <= growth.original_max_positions:
        return None
    positions = torch.arange(len(cos_sin), dtype=torch.float32, device=cos_sin.device)
    factors = 1 + growth.beta * torch.log(1 + torch.floor(positions / growth.original_max_positions))
    return cos_sin * factors[:, None]


def inverse_frequencies(rope: Rope, served_positions: int) -> Tensor:
    """[rotary_dim / 2] fp32, in radians per position, scaled as `rope` says for a length of `served_positions`."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    periods = rope.theta**exponents
    frequencies = 1.0 / periods
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case DynamicScaling() as scaling:
            return 1.0 / _dynamic_base(rope, scaling, served_positions) ** exponents
        case YarnScaling() as scaling:
            return _scale_yarn(periods, rope, scaling)
        case LongRopeScaling() as scaling:
            is_long = served_positions > scaling.original_max_positions
            factors = scaling.long_factors if is_long else scaling.short_factors
            return 1.0 / (torch.tensor(factors) * periods)
        case ProportionalScaling(num_turned, factor):
            is_turned = torch.arange(len(frequencies)) < num_turned
            return torch.where(is_turned, frequencies, 0.0) / factor
        case Llama3Scaling() as scaling:
            return _scale_llama3(frequencies, scaling)


def _dynamic_base(rope: Rope, scaling: DynamicScaling, num_positions: int) -> float:
    stretch = max(num_positions, scaling.original_max_positions) / scaling.original_max_positions
    growth: float = (scaling.factor * stretch - (scaling.factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return rope.theta * growth


def _scale_yarn(periods: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """Blends kept and divided frequencies by a ramp over their indices: the first are kept, the last divided."""

    def index_that_turns(rotations: float) -> float:
        turns = scaling.original_max_positions / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    start, end = index_that_turns(scaling.beta_fast), index_that_turns(scaling.beta_slow)
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, rope.rotary_dim - 1)
    if start == end:
        end += 0.001
    kept = 1 - ((torch.arange(len(periods), dtype=torch.float32) - start) / (end - start)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keeps wavelengths that fit `high_freq_factor` times into the original context, and divides those that do not fit
    `low_freq_factor` times. Interpolates between the two (Llama 3.1's reference code)."""
    wavelengths = 2 * math.pi / frequencies
    fits = scaling.original_max_positions / wavelengths
    smooth = (fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    slowed = frequencies / scaling.factor
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    is_low = wavelengths > scaling.original_max_positions / scaling.low_freq_factor
    is_high = wavelengths < scaling.original_max_positions / scaling.high_freq_factor
    return torch.where(is_low, slowed, torch.where(is_high, frequencies, between))
