"""Predicts how long a step takes from its rows, by a model that is fitted to measured steps.

    t = c0 + c1 tokens + c2 sum(context of decodes) + c3 sum(2 L x + x^2 of chunks)

A decode is a row of one token behind a context; a chunk is x > 1 tokens behind L. Steps with chunks and steps without
have coefficients of their own. The first are bound by arithmetic and launched call by call, the second by memory and
recorded; one line through both fits neither. Steps for which a draft model makes drafts are a third kind, with two more
terms: the passes of the draft model, and its tokens.

Starts from prior costs, such as the roofline's. Pure: no clock, no randomness; seconds come in as arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from inferd.engine.sched.plan import Row

_FORGETTING = 0.99
"""A step counts e times less than one 100 steps later of its kind."""
_PRIOR = 1e-4
"""Weight of the prior costs, in steps. It decides what was never measured, and next to nothing else."""
_LEAST_STEP_S = 1e-6
"""No step is predicted to take less: paces are tokens divided by predictions."""
_LEAST_SHARE = 0.1
"""Least unit of a step, in times that the prior costs expect. If the expected time has fallen to near 0, a unit of that
would keep it there: each further short step would outweigh hundreds of others, and the equations would lose their
digits."""
_NUM_ERRORS = 256
"""Number of steps that the errors cover."""
_CLIP = 5.0
"""Largest residual of one measurement, in usual residuals."""
_SPREAD_GAIN = 0.05
"""Weight of the newest residual in the usual one."""
_NUM_TRUSTED = 16
"""Number of first measurements that count in full: compared with a guess, any true value looks like an outlier."""
_MIN_SPREAD = 0.02

Matrix = list[list[float]]


class StepLoad(NamedTuple):
    """The figures of a step that its time depends on."""

    num_tokens: int
    context: int
    """Tokens of context before the decodes, summed."""
    pairs: int
    """2 L x + x^2, summed over the chunks; 0 if there is none."""
    passes: int = 0
    """Times that the draft model runs, one behind the other; 0 if it makes no drafts."""
    draft_tokens: int = 0
    """Tokens that it computes in all of them."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepLoad:
        num_tokens = sum([row.num_tokens for row in rows])
        if num_tokens == len(rows):
            return cls(num_tokens, sum([row.start for row in rows]), 0)
        context = pairs = passes = draft_tokens = 0
        for _, start, count, _, draft_ids, num_to_draft, draft_start in rows:
            num_drafts = len(draft_ids) or num_to_draft
            if num_to_draft:
                passes = max(passes, num_to_draft)
                draft_tokens += start + num_to_draft - draft_start
            if count == 1 + num_drafts:  # each draft is a decode behind one more token
                context += count * start + num_drafts * count // 2
            else:
                pairs += (2 * start + count) * count
        return cls(num_tokens, context, pairs, passes, draft_tokens)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of the model, in seconds, all at least 0."""

    step_s: float
    token_s: float
    context_s: float
    """Per token of context that a decode sees."""
    pair_s: float = 0.0
    """Per unit of 2 L x + x^2."""
    pass_s: float = 0.0
    """Per pass of the draft model."""
    draft_s: float = 0.0
    """Per token that it computes."""

    def predict(self, load: StepLoad) -> float:
        seconds = self.step_s + self.token_s * load.num_tokens + self.context_s * load.context
        if load.passes:
            seconds += self.pass_s * load.passes + self.draft_s * load.draft_tokens
        return seconds + self.pair_s * load.pairs


@dataclass(frozen=True, slots=True)
class PriorCosts:
    """Expected cost of steps before any was measured."""

    decode: Coefficients
    chunked: Coefficients
    drafted: Coefficients | None = None
    """Steps with drafts of a draft model; None if there is no such model."""


_UNKNOWN_STEP = Coefficients(1e-3, 1e-5, 1e-8, 1e-10, 1e-4, 1e-6)
UNKNOWN = PriorCosts(Coefficients(1e-3, 1e-5, 1e-8), Coefficients(1e-3, 1e-5, 1e-8, 1e-10))
"""Prior costs of an unknown device: orders of magnitude, corrected by the first steps."""


class _Fit:
    """The coefficients of one kind of step.

    The fitted values are factors on the prior costs, and times are in units of the expected time. So a residual is a
    relative error, and a short step counts as much as a long one.
    """

    __slots__ = ("_prior", "_squares", "coefficients")

    def __init__(self, prior: Coefficients, unknown: Coefficients, size: int) -> None:
        """A coefficient of 0 in `prior` is unknown, and may turn out to be more."""
        self._prior = [value or guess for value, guess in zip(astuple(prior)[:size], astuple(unknown), strict=False)]
        self._squares = LeastSquares(size, forgetting=_FORGETTING, prior=_PRIOR)
        self.coefficients = prior

    def observe(self, load: StepLoad, seconds: float, predicted_s: float) -> None:
        # The measured time is no good unit: one near 0 would outweigh all other steps. If the prior costs are far too
        # low, the expected one is none either: the first steps would outweigh the others.
        costs_s = [prior * feature for prior, feature in zip(self._prior, (1, *load), strict=False)]
        unit_s = max(predicted_s, seconds / 2, _LEAST_SHARE * sum(costs_s))
        x = [cost_s / unit_s for cost_s in costs_s]
        self._squares.update(x, seconds / unit_s)
        scaled = [prior * factor for prior, factor in zip(self._prior, self._squares.theta, strict=True)]
        self.coefficients = Coefficients(max(scaled[0], _LEAST_STEP_S), *scaled[1:])


class StepTimeModel:
    """Predicts steps, learns from measured ones, and knows its own error."""

    def __init__(self, prior: PriorCosts = UNKNOWN) -> None:
        self._decode, self._chunked = _Fit(prior.decode, UNKNOWN.decode, 3), _Fit(prior.chunked, UNKNOWN.chunked, 4)
        self._drafted = _Fit(prior.drafted or _UNKNOWN_STEP, _UNKNOWN_STEP, 6)
        self.has_draft_model = prior.drafted is not None
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)
        self.num_steps = 0

    @property
    def decode(self) -> Coefficients:
        return self._decode.coefficients

    @property
    def chunked(self) -> Coefficients:
        return self._chunked.coefficients

    @property
    def drafted(self) -> Coefficients:
        return self._drafted.coefficients

    def predict(self, load: StepLoad) -> float:
        """Predicted seconds of a step."""
        return self._fit_of(load).coefficients.predict(load)

    def _fit_of(self, load: StepLoad) -> _Fit:
        return self._drafted if load.passes else self._chunked if load.pairs else self._decode

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that took `seconds`. A step of no time was not measured, and is skipped."""
        if seconds <= 0.0:
            return
        fit = self._fit_of(load)
        predicted_s = fit.coefficients.predict(load)
        self._errors.append(abs(predicted_s - seconds) / max(predicted_s, seconds))
        self.num_steps += 1
        fit.observe(load, seconds, predicted_s)

    def error(self, *quantiles: float) -> tuple[float, ...]:
        """Quantiles of |predicted - measured|, as a share of the larger, over the newest steps; 0 if there was none.

        Each step was predicted before it was measured. The larger is the base because a host that is late for one
        step's end finds the next one done. Then one measured time is too long and the next is near 0, but their sum is
        right.
        """
        ordered = sorted(self._errors)
        if not ordered:
            return (0.0,) * len(quantiles)
        return tuple(ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] for quantile in quantiles)


class LeastSquares:
    """Recursive least squares with forgetting and bounds: coefficients that follow the measurements.

    Fits y = sum(theta[i] * x[i]) with theta >= 0, from theta = 1 on. Callers scale x so that 1 is their guess. Kept as
    normal equations, sum(w x x^T) theta = sum(w x y), with weights that fall with age, and solved after each
    measurement. For four unknowns that is as fast as updating an inverse, and it loses no digits over millions of
    updates. It also allows coefficients to be held at 0 or above exactly; clipping those of an updated inverse drives
    the others off.

    A small weight on the first guess decides what is not measured, or not any more. A residual counts up to a few times
    the usual one, so that a pause of the machine moves little. The same measurements give the same bits.
    """

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
