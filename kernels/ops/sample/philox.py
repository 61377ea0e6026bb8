"""Philox-4x32-10, a counter-based random generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

An output word is a pure function of (key, counter): there is no order of draws, so no draw depends on another. 32-bit
words are held in int64 tensors, because torch lacks a full set of uint32 operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

NOISE_MAX = 17.328680038452148
"""The largest Gumbel noise, from 24 bits that are all set. The smallest is about -2.85."""


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random 32-bit words for each counter and key, all int64 tensors of values below 2^32 that broadcast."""
    c0, c1, c2, c3, _, _ = torch.broadcast_tensors(*counter, *key)  # type: ignore[no-untyped-call]
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two 32-bit words may pass 2^63; int64 wraps, and shift and mask still read the right bits.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (
            _high_word(second).bitwise_xor_(c1).bitwise_xor_(k0),
            _high_word(first).bitwise_xor_(c3).bitwise_xor_(k1),
        )
        c1, c3 = second.bitwise_and_(MASK32), first.bitwise_and_(MASK32)
        k0, k1 = k0 + _KEY_STEPS[0] & MASK32, k1 + _KEY_STEPS[1] & MASK32
    return c0, c1, c2, c3


def _high_word(product: Tensor) -> Tensor:
    return (product >> 32).bitwise_and_(MASK32)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise in fp32 for (seed, absolute position, token id), int64 tensors that broadcast.

    key = (low, high word of the seed); counter = (token id, low, high word of the position, 0); x = the first word; u =
    ((x >> 8) + 0.5) / 2^24; noise = -log(-log(u)) in fp64, rounded to fp32. There are 2^24 noises. Each is the same
    with vectorised, strided and other libraries' logarithms: fp64's last bits are far below fp32's.
    """
    counter = (token_ids, positions & MASK32, positions >> 32, torch.zeros_like(token_ids))
    word = philox4x32(counter, (seeds & MASK32, seeds >> 32 & MASK32))[0]
    return noise_of_bits(word >> 8)


def noise_of_bits(bits: Tensor) -> Tensor:
    """The noise of 24 random bits, given as integers below 2^24."""
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
