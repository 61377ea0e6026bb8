"""How long a step must take on a machine, and so what held it up: the roofline model (Williams, Waterman and Patterson
2009, doi:10.1145/1498765.1498785).

    ideal by compute = FLOPs / peak FLOPs a second        ideal by memory = bytes / peak bytes a second
    floor            = the larger of the two: no step takes less

Knows no model and no scheduling: a step is its FLOPs, its bytes and its seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

StepPhase = Literal["prefill", "decode", "mixed"]
"""What a step's rows were: all chunks of several tokens, all single tokens, or both."""

Bound = Literal["compute", "memory", "host"]
"""What held a step up. "host": neither explains half of its time, so launches, planning, sampling, or kernels that are
far from both peaks."""

HOST_BOUND_FROM = 2.0
"""A step that took more than so many floors was held up by something else."""


class Peaks(msgspec.Struct, frozen=True, array_like=True):
    """What a device reached when it was measured, at the worker's start; both above 0."""

    read_bytes_per_s: float
    """Of memory, with nothing but reading to do."""
    flops_per_s: float
    """Of a large matrix product in the precision that is served; two operations for each multiply-add."""

    def floor_s(self, flops: float, num_bytes: float) -> float:
        """The least time that so much work takes."""
        return max(flops / self.flops_per_s, num_bytes / self.read_bytes_per_s)

    def bound_by(self, flops: float, num_bytes: float, duration_s: float) -> Bound:
        """What held up a step that took `duration_s`."""
        by_compute, by_memory = flops / self.flops_per_s, num_bytes / self.read_bytes_per_s
        if duration_s > HOST_BOUND_FROM * max(by_compute, by_memory):
            return "host"
        return "compute" if by_compute > by_memory else "memory"

    def __str__(self) -> str:
        return f"reads {self.read_bytes_per_s / 1e9:.1f} GB/s, multiplies at {_rate(self.flops_per_s)}"


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.0f} TFLOP/s" if flops_per_s >= 1e13 else f"{flops_per_s / 1e9:.0f} GFLOP/s"
