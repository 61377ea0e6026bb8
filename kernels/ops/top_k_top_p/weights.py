"""A token's weight in the nucleus: e^score in whole units of 2^-42, the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor

FRACTION_BITS = 42
LOWEST = -32.0
"""A lower score weighs as much as this one: nothing."""

LOG2_E = 1.44269504
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""Their sum is log 2. The first has 9 bits, so its products with the exponents here are exact."""

WHOLE = 12582912.0
"""1.5 * 2^23. Adding it to a number rounds that to a whole number, ties to even."""

COEFFICIENTS = (1.3818296e-3, 8.3685322e-3, 4.1668292e-2, 1.6666523e-1, 4.9999994e-1, 1.0, 1.0)
"""Coefficients of e^r for |r| <= log(2) / 2, highest power first; largest error 1e-7 of the value."""


def weights(scores: Tensor) -> Tensor:
    """int64 weights of scores fp32, 0 at most.

    Products and sums in fp32, each rounded separately, none fused: x = n log 2 + r, a polynomial in r by Horner's rule,
    and n + 42 added to the exponent of its result.
    """
    x = scores.clamp_min(LOWEST)
    exponent = (x * LOG2_E).add_(WHOLE).sub_(WHOLE)
    r = x.sub_(exponent * LN2_HIGH).sub_(exponent * LN2_LOW)
    power = r * COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:-1]:
        power.add_(coefficient).mul_(r)
    power.add_(COEFFICIENTS[-1])
    shift = exponent.add_(FRACTION_BITS).to(torch.int32).bitwise_left_shift_(23)
    return power.view(torch.int32).add_(shift).view(torch.float32).to(torch.int64)


def mass_target(top_p: Tensor, totals: Tensor) -> Tensor:
    """int64: the least mass that is `top_p` (fp64) of `totals` (int64); at least one unit and at most all of it."""
    reached = (top_p * totals.to(torch.float64)).ceil_().to(torch.int64)
    return torch.minimum(reached.clamp_min_(1), totals)
