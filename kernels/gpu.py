"""What the Triton kernels share: on what they run, and the account that each gives of the forms it is compiled in.

A kernel's parameters that change its code (block sizes, warps, stages) are chosen by a function of the shapes alone, so
that all of its forms can be listed: `shipped` in each `triton.py` lists them, and `aot.py` compiles every one for every
supported architecture on a machine without a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv"}
"""Triton's names of the dtypes that kernels take."""

FP8_MIN_SM = 89
"""The first architecture that converts to and from 8-bit floats."""

_is_interpreted = False


def interpret(is_on: bool) -> None:
    """Let Triton kernels take the CPU's tensors, by Triton's interpreter: for tests, with TRITON_INTERPRET=1 set before
    anything imports Triton."""
    global _is_interpreted
    _is_interpreted = is_on


def refuses(device_type: str, *dtypes: torch.dtype) -> str | None:
    """Why no Triton kernel takes tensors of these, or None: the part that all predicates share. The first is that of
    activations, which only what is stored beside them may be narrower than."""
    if device_type != "cuda" and not _is_interpreted:
        return "runs on a GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    others = [str(dtype) for dtype in dtypes if dtype not in DTYPES]
    if others:
        return f"takes {', '.join(map(str, DTYPES))}, not {', '.join(others)}"
    if dtypes[:1] == (torch.float8_e4m3fn,):
        return f"computes from 16 bits or more, not {dtypes[0]}"
    if torch.float8_e4m3fn in dtypes and device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor < FP8_MIN_SM:
            return f"converts to 8-bit floats from compute capability 8.9 on, not {major}.{minor}"
    return None


def refuses_weight(dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    """Why a kernel does not multiply rows of `dtype` by a vector of `weight_dtype`, or None."""
    if weight_dtype in (dtype, torch.float32):
        return None
    return f"takes weights in the rows' {dtype} or in float32, not {weight_dtype}"


def from_host(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, behind what was queued there, without waiting for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Shipped:
    """One form of a kernel that may be launched."""

    op: str
    config: str
    """What tells it from the op's other forms."""
    kernel: Any
    signature: Mapping[str, str]
    """Types of the arguments that are not constants, by name: `*bf16`, `i32`, `fp32`."""
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    is_matrix: bool = False
    """Has to multiply on the tensor cores; on sm_90 by their warp group instructions."""
    is_warp_matrix: bool = False
    """Has to multiply on the tensor cores by the instructions of single warps on every architecture: with fewer than 64
    rows there are no others, and results that have to round alike everywhere need one kind."""
    is_streaming: bool = False
    """Has to read memory in loads of 16 bytes a thread."""
    multiples: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16, as Triton finds out at a launch; addresses always are."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Compiler options besides."""
    min_sm: int = 0
    """The first architecture that has what it needs."""
