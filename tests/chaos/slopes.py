"""How fast a quantity grows, told apart from noise: the median of all slopes between two samples, and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.96
"""Of the normal distribution, 95% on both sides."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Per unit of x: the best guess, and between what it lies with 95% confidence."""

    value: float
    low: float
    high: float


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """The Theil-Sen estimator, whatever up to 29% of the samples are, with the interval of P. K. Sen, "Estimates of the
    Regression Coefficient Based on Kendall's Tau", 1968. `xs` ascend, two at least; samples are taken as independent.
    """
    assert len(xs) == len(ys) >= 2, "a slope needs two samples"
    first, second = np.triu_indices(len(xs), k=1)
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    spread = _Z * math.sqrt(len(xs) * (len(xs) - 1) * (2 * len(xs) + 5) / 18)
    low, high = math.floor((len(slopes) - spread) / 2) - 1, math.ceil((len(slopes) + spread) / 2)
    return Slope(float(np.median(slopes)), float(slopes[max(low, 0)]), float(slopes[min(high, len(slopes) - 1)]))
