"""What a row gives: points, each one thing that was checked, timed, or both. Imports no torch: who reads results needs
none.

A point's floor is a sum of phases that follow one another, each as long as the slower of its bytes and its operations
takes at the rates of the device. Who made a point says bytes and operations; rates are measured by a row of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device was measured at, a second."""

    copy_bytes: float
    """Bytes read and bytes written by a large copy."""
    flops: Mapping[str, float]
    """Operations of a large product, by precision of its operands."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Work that overlaps nothing else of its point."""

    num_bytes: float
    num_flops: float = 0.0
    precision: str = "bf16"

    def floor_s(self, rates: Rates) -> float:
        """Where the device has no rate for the precision, that of bf16 counts."""
        flops = rates.flops.get(self.precision) or rates.flops["bf16"]
        return max(self.num_bytes / rates.copy_bytes, self.num_flops / flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be measured: known before any device is."""

    table: str
    labels: Mapping[str, str]
    """Columns that tell it from the table's other points."""
    phases: Sequence[Phase] = ()
    amount: float = 0.0
    """Units that one run produces; 0: a run is what counts."""
    unit: str = "tok"
    goal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of a case."""

    seconds: float | None = None
    """Median of a run; None where nothing was timed."""
    error: float | None = None
    """Distance from the reference; None where there is none, infinite where it was not even a number."""
    tolerance: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else was seen, each under its name with its unit."""
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """NaN is wrong."""
        return self.error is not None and not (self.tolerance is not None and self.error <= self.tolerance)

    def without_speed(self) -> Trial:
        return Trial(error=self.error, tolerance=self.tolerance, note=self.note)


@dataclass(frozen=True, slots=True)
class Point:
    """A case and what came of it."""

    case: Case
    trial: Trial

    def floor_s(self, rates: Rates | None) -> float | None:
        if rates is None or not self.case.phases:
            return None
        return sum(phase.floor_s(rates) for phase in self.case.phases)

    def as_json(self) -> dict[str, Any]:
        """A wrong trial has no speed, whoever reads it. JSON has no infinity: such an error is null, and wrong."""
        trial = self.trial.without_speed() if self.trial.is_wrong else self.trial
        told = asdict(trial)
        if trial.error is not None and not math.isfinite(trial.error):
            told["error"] = None
        return {"case": asdict(self.case), "trial": {**told, "is_wrong": trial.is_wrong}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Point:
        case, trial = dict(value["case"]), dict(value["trial"])
        case["phases"] = tuple(Phase(**phase) for phase in case["phases"])
        if trial.pop("is_wrong") and trial["error"] is None:
            trial["error"] = math.inf
        return cls(Case(**case), Trial(**trial))
