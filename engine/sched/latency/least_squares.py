"""Recursive least squares with forgetting and bounds: coefficients that follow the measurements.

Kept as normal equations, sum(w x x^T) theta = sum(w x y), with weights that fall with age, and solved after each
measurement. For four unknowns that is as fast as updating an inverse, and it loses no digits over millions of updates.
It also allows coefficients to be held at 0 or above exactly; clipping those of an updated inverse drives the others
off.

A small weight on the first guess decides what is not measured, or not any more. A residual counts up to a few times the
usual one, so that a pause of the machine moves little. Pure arithmetic: the same measurements give the same bits.
"""

from __future__ import annotations

_CLIP = 5.0
"""Largest residual of one measurement, in usual residuals."""
_SPREAD_GAIN = 0.05
"""Weight of the newest residual in the usual one."""
_NUM_TRUSTED = 16
"""Number of first measurements that count in full: compared with a guess, any true value looks like an outlier."""
_MIN_SPREAD = 0.02

Matrix = list[list[float]]


class LeastSquares:
    """Fits y = sum(theta[i] * x[i]) with theta >= 0, from theta = 1 on. Callers scale x so that 1 is their guess."""

    __slots__ = ("_forgetting", "_moments", "_prior", "_spread", "_totals", "num_seen", "theta")

    def __init__(self, size: int, *, forgetting: float, prior: float) -> None:
        """`forgetting`: weight of a measurement relative to the next one, below 1. `prior`: weight of the first guess
        relative to one measurement."""
        self.theta = [1.0] * size
        self._forgetting, self._prior = forgetting, prior
        self._moments: Matrix = [[0.0] * size for _ in range(size)]
        self._totals = [0.0] * size
        self._spread = 1.0
        self.num_seen = 0

    def update(self, x: list[float], y: float) -> None:
        """Add one measurement."""
        expected = sum([a * b for a, b in zip(self.theta, x, strict=True)])
        residual = y - expected
        self.num_seen += 1
        if self.num_seen > _NUM_TRUSTED:
            limit = _CLIP * self._spread
            residual = max(-limit, min(limit, residual))
        self._spread = max(_MIN_SPREAD, self._spread + _SPREAD_GAIN * (min(abs(residual), 1.0) - self._spread))
        kept, y = self._forgetting, expected + residual
        self._moments = [
            [kept * moment + a * b for moment, b in zip(row, x, strict=True)]
            for row, a in zip(self._moments, x, strict=True)
        ]
        self._totals = [kept * total + a * y for total, a in zip(self._totals, x, strict=True)]
        self.theta = self._solve()

    def _solve(self) -> list[float]:
        """The least squares over the unknowns that are not held at 0. Holds the lowest one until none is below 0.

        The choice of those to hold is allowed, and not always the best.
        """
        free = list(range(len(self.theta)))
        theta = [0.0] * len(free)
        while free:
            matrix = [[self._moments[i][j] + (self._prior if i == j else 0.0) for j in free] for i in free]
            found = solve(matrix, [self._totals[i] + self._prior for i in free])
            lowest = min(found)
            if lowest >= 0.0:
                for i, value in zip(free, found, strict=True):
                    theta[i] = value
                break
            del free[found.index(lowest)]
        return theta


def solve(matrix: Matrix, totals: list[float]) -> list[float]:
    """Solve matrix theta = totals for a symmetric positive definite matrix, by elimination. Overwrites both."""
    size = len(totals)
    for i in range(size):
        pivot = matrix[i]
        for j in range(i + 1, size):
            row = matrix[j]
            factor = row[i] / pivot[i]
            for k in range(i + 1, size):
                row[k] -= factor * pivot[k]
            totals[j] -= factor * totals[i]
    for i in range(size - 1, -1, -1):
        row = matrix[i]
        totals[i] = (totals[i] - sum([row[k] * totals[k] for k in range(i + 1, size)])) / row[i]
    return totals
