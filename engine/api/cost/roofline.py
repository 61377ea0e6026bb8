"""The roofline model: the least time of a step on a machine, and which resource bounds the step (Williams, Waterman and
Patterson 2009, doi:10.1145/1498765.1498785).

    ideal by compute = FLOPs / peak FLOPs a second        ideal by memory = bytes / peak bytes a second
    floor            = the larger of the two: no step takes less

Knows no model and no scheduling: a step is its FLOPs, its bytes and its seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

StepPhase = Literal["prefill", "decode", "mixed"]
"""Kind of a step by its rows: only chunks of several tokens, only single tokens, or both."""

Bound = Literal["compute", "memory", "host"]
"""Resource that bounded a step. "host": neither of the others explains half of its time. Then launches, planning and
sampling took it, or kernels that are far from both peaks."""

HOST_BOUND_FROM = 2.0
"""A step that took longer than this many floors was bound by the host."""


class Peaks(msgspec.Struct, frozen=True, array_like=True):
    """Peak rates of a device, measured at the worker's start; both above 0."""

    read_bytes_per_s: float
    """Bytes read from memory a second, with no other work."""
    flops_per_s: float
    """Operations a second of a large matrix product in the served precision; a multiply-add counts as two."""

    def floor_s(self, flops: float, num_bytes: float) -> float:
        """The least time that so much work takes."""
        return max(flops / self.flops_per_s, num_bytes / self.read_bytes_per_s)

    def bound_by(self, flops: float, num_bytes: float, duration_s: float) -> Bound:
        """The resource that bounded a step of `duration_s`."""
        by_compute, by_memory = flops / self.flops_per_s, num_bytes / self.read_bytes_per_s
        if duration_s > HOST_BOUND_FROM * max(by_compute, by_memory):
            return "host"
        return "compute" if by_compute > by_memory else "memory"

    def __str__(self) -> str:
        return f"reads {self.read_bytes_per_s / 1e9:.1f} GB/s, multiplies at {_rate(self.flops_per_s)}"


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.0f} TFLOP/s" if flops_per_s >= 1e13 else f"{flops_per_s / 1e9:.0f} GFLOP/s"
