"""Smoothing of keys for a KV cache in int8 (SmoothAttention of QServe, Lin et al. 2024, arXiv:2405.04532).

Elements of a head that share a scale lose their bits to the largest of them. In some models a few channels of K are
tens or hundreds of times as large as the others, in every token. So each large channel has a factor for all tokens: K
is divided by it, and q is multiplied by it, which leaves their products as they were. Two channels that rotate against
each other have one factor, so rotation changes nothing. Factors are powers of two, so q keeps its bits.

The factors follow from the weights alone, so every start finds the same ones. No text is needed.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

NUM_ROWS = 64
"""Rows of noise. Sizes of channels found by so many are off by 6%."""
_LARGE = 2.0
"""Sizes up to so many times the median of a head stay. On SmolLM2, which has few large channels, factors for all
channels cost 0.0001 nats more than none (2026-11-29)."""
_MOST = 2.0**8
"""Queries are multiplied by at most this, so that in float16 they overflow only beyond 255. The largest factors found
are 4 (SmolLM2), 8 (Gemma 3 270M), 64 and 128 (Qwen2.5-Coder 0.5B and 1.5B; 2026-11-29)."""
_SEED = 0


def noise(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[NUM_ROWS, size] of 1 and -1 in a fixed random order, in place of hidden states."""
    # Python's own generator: torch's needs a part of torch that engines leave out.
    drawn = torch.frombuffer(bytearray(Random(_SEED).randbytes(NUM_ROWS * size)), dtype=torch.uint8)
    return ((drawn & 1) * 2.0 - 1.0).view(NUM_ROWS, size).to(dtype).to(device)


def factors(keys: Tensor, rotary_dim: int) -> Tensor:
    """[2, G, D] fp32, powers of two: the factors of q's channels, by the KV head that q reads, and those of K's.

    keys [T, G, D]: examples of K before it is rotated. The pairs (i, i + rotary_dim / 2) of the first rotary_dim
    channels rotate.
    """
    squares, half = keys.to(torch.float32).square().mean(0), rotary_dim // 2
    pairs = (squares[:, :half] + squares[:, half:rotary_dim]) / 2
    sizes = torch.cat([pairs, pairs, squares[:, rotary_dim:]], 1).sqrt()
    large = (sizes / (_LARGE * sizes.median(1, keepdim=True).values)).nan_to_num(1.0).clamp(1.0, _MOST)
    # The nearest power of two by the logarithm, from the bits of the number.
    mantissas, exponents = torch.frexp(large)
    own = torch.ldexp(torch.ones_like(large), exponents - (mantissas < 0.5**0.5).to(exponents.dtype))
    return torch.stack([own, 1 / own])
