"""Which dtype a device computes in for weights stored in another, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype of weights and activations in memory. `reason` is None where the weights are stored in it."""

    dtype: torch.dtype
    reason: str | None


def compute_dtype(stored: torch.dtype, device: torch.device) -> DtypeChoice:
    """The dtype to compute in: float16 never on a CPU, bfloat16 where its matrix kernels exist."""
    if device.type != "cpu" or stored == torch.float32:
        return DtypeChoice(stored, None)
    if stored == torch.float16:
        return DtypeChoice(torch.float32, "this CPU path has no float16 matrix product; float32 holds float16 exactly")
    if stored == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return DtypeChoice(torch.float32, "this CPU has no bfloat16 matrix product; float32 holds bfloat16 exactly")
    return DtypeChoice(stored, None)
