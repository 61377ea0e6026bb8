"""The results of a row: points, each one thing that was checked, timed, or both. Imports no torch, so that readers of
results need none.

A point's floor is a sum of phases that run one after another. A phase takes as long as the slower of its bytes and its
operations at the device's rates. The point gives bytes and operations; a separate row measures the rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KERNEL_TESTS = "kernel tests"
"""The table whose points are tests, labelled by file ("tests") and name ("test")."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of a device, per second."""

    copy_bytes: float
    """Bytes read and bytes written by a large copy."""
    flops: Mapping[str, float]
    """Operations of a large product, by precision of its operands."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Work that overlaps no other work of its point."""

    num_bytes: float
    num_flops: float = 0.0
    precision: str = "bf16"

    def floor_s(self, rates: Rates) -> float:
        """Least seconds. The rate of bf16 stands in for a precision without a rate."""
        flops = rates.flops.get(self.precision) or rates.flops["bf16"]
        return max(self.num_bytes / rates.copy_bytes, self.num_flops / flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measurement to make, known before any device is used."""

    table: str
    labels: Mapping[str, str]
    """Columns that identify it in its table."""
    phases: Sequence[Phase] = ()
    amount: float = 0.0
    """Units that one run produces; 0: runs are counted."""
    unit: str = "tok"
    goal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of a case."""

    seconds: float | None = None
    """Median of a run; None if nothing was timed."""
    error: float | None = None
    """Distance from the reference; None without a reference, infinite if the result was not a number."""
    tolerance: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures, by a name with its unit."""
    note: str = ""

    @classmethod
    def missing(cls, why: str) -> Trial:
        """The result of a case that should have run and did not. It counts as wrong."""
        return cls(error=math.inf, tolerance=0.0, note=why)

    @property
    def is_wrong(self) -> bool:
        """Whether the error exceeds its limit; NaN does."""
        return self.error is not None and not (self.tolerance is not None and self.error <= self.tolerance)

    @property
    def is_found(self) -> bool:
        """Whether there is anything besides a note."""
        return self.seconds is not None or self.error is not None or bool(self.figures)

    def without_speed(self) -> Trial:
        return Trial(error=self.error, tolerance=self.tolerance, note=self.note)


@dataclass(frozen=True, slots=True)
class Point:
    """A case and its result."""

    case: Case
    trial: Trial

    def floor_s(self, rates: Rates | None) -> float | None:
        if rates is None or not self.case.phases:
            return None
        return sum(phase.floor_s(rates) for phase in self.case.phases)

    def as_json(self) -> dict[str, Any]:
        """JSON without the speed of a wrong result. JSON has no infinity: such an error becomes null, and counts as
        wrong."""
        trial = self.trial.without_speed() if self.trial.is_wrong else self.trial
        fields = asdict(trial)
        if trial.error is not None and not math.isfinite(trial.error):
            fields["error"] = None
        return {"case": asdict(self.case), "trial": {**fields, "is_wrong": trial.is_wrong}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Point:
        case, trial = dict(value["case"]), dict(value["trial"])
        case["phases"] = tuple(Phase(**phase) for phase in case["phases"])
        if trial.pop("is_wrong") and trial["error"] is None:
            trial["error"] = math.inf
        return cls(Case(**case), Trial(**trial))
