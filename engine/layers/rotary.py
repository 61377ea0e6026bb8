"""Rotary angles: the table of cosines and sines that every layer reads by absolute position.

Frequencies and angles are formed in fp32, as the models were trained: a more exact angle at position 100,000 would be
another one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inferd.engine.arch.description import LinearScaling, Llama3Scaling, Rope


def cos_sin_table(rope: Rope, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, rotary_dim] fp32: per position rotary_dim / 2 cosines, then as many sines."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def inverse_frequencies(rope: Rope) -> Tensor:
    """[rotary_dim / 2] fp32, in radians per position, scaled as `rope` says."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _scale_llama3(frequencies, scaling)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep wavelengths that fit `high_freq_factor` times into the original context, divide those that do not fit
    `low_freq_factor` times, interpolate between (Llama 3.1's reference code)."""
    wavelengths = 2 * math.pi / frequencies
    fits = scaling.original_max_positions / wavelengths
    smooth = (fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    slowed = frequencies / scaling.factor
    between = (1 - smooth) * slowed + smooth * frequencies
    is_low = wavelengths > scaling.original_max_positions / scaling.low_freq_factor
    is_high = wavelengths < scaling.original_max_positions / scaling.high_freq_factor
    return torch.where(is_low, slowed, torch.where(is_high, frequencies, between))
