"""Shared parts of the Triton kernels: the device that they run on, which inputs they accept, and the list of forms in
which each is compiled.

The parameters that change a kernel's code (block sizes, warps, stages) depend on the shapes and the device alone, so
all of its forms can be listed. `shipped` in each `triton.py` lists them. `aot.py` compiles each for every supported
architecture, on a machine without a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from inferd.kernels.device import DEPENDENT_MIN_SM, DeviceProperties, DoesNotFitError, SharedNeed

DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
}
"""Triton's names of the dtypes that kernels accept."""

INTERPRETED = DeviceProperties.of(90, 5)
"""Properties that are assumed without a GPU."""

_UNITS = {"shared memory": "bytes of ", "tensor memory": "columns of "}
"""Units of what a device may have too little of, by Triton's name of it."""

_is_interpreted = False
_starts_early = False


@functools.cache
def properties_of(device: torch.device | None = None) -> DeviceProperties:
    """Properties of a device, read once. None: the current GPU."""
    if device is not None and device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    shared_bytes: int | None = getattr(found, "shared_memory_per_block_optin", None)
    return DeviceProperties.of(10 * found.major + found.minor, found.multi_processor_count, shared_bytes)


def refused_launch(error: BaseException | None) -> str | None:
    """Why the device cannot launch a kernel at all, if `error` or one of its causes says so. It never will."""
    errors = sys.modules.get("triton.runtime.errors")
    while error is not None:
        if errors is not None and isinstance(error, errors.OutOfResources):
            unit = _UNITS.get(error.name, "")
            return f"a kernel needs {error.required:,} {unit}{error.name}, and this GPU has {error.limit:,}"
        if isinstance(error, DoesNotFitError):
            return str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def interpret(is_on: bool) -> None:
    """For tests: let Triton's interpreter run kernels on CPU tensors. TRITON_INTERPRET=1 must be set before anything
    imports Triton."""
    global _is_interpreted
    _is_interpreted = is_on


@contextmanager
def early_starts() -> Iterator[None]:
    """Within it, kernels that ask for `dependent_options` start while the kernel before them ends (programmatic
    dependent launch, CUDA C++ Programming Guide). Such a kernel waits for that one before it reads or writes anything.
    So when it ends, all kernels before it have ended. The device must have `DEPENDENT_MIN_SM`."""
    global _starts_early
    before, _starts_early = _starts_early, True
    try:
        yield
    finally:
        _starts_early = before


def dependent_options(*, is_allowed: bool = True) -> dict[str, bool]:
    """Arguments of a launch: the kernel's constant `IS_DEPENDENT`, and whether the launch may be early. Each implies
    the other: an early kernel that does not wait would read what is not written yet."""
    is_early = _starts_early and is_allowed
    return {"IS_DEPENDENT": is_early, "launch_pdl": is_early}


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Its packages are imported, it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def refuses(device_type: str, *dtypes: torch.dtype) -> str | None:
    """Why no Triton kernel accepts tensors of these dtypes; None if one may. All predicates share this check. The first
    dtype is that of activations; only data stored beside them may be narrower."""
    if device_type != "cuda" and not _is_interpreted:
        return "runs on GPUs only"
    if not is_installed("triton"):
        return "Triton is not installed"
    others = [str(dtype) for dtype in dtypes if dtype not in DTYPES]
    if others:
        return f"takes {', '.join(map(str, DTYPES))}, not {', '.join(others)}"
    if dtypes and dtypes[0].itemsize == 1:
        return f"computes with dtypes of 16 bits or more, not {dtypes[0]}"
    if torch.float8_e4m3fn in dtypes and device_type == "cuda":
        found = properties_of()
        if not found.converts_e4m3:
            return f"needs compute capability 8.9 for 8-bit floats; this GPU has {found.capability}"
    return None


def refuses_weight(dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    """Why a kernel cannot multiply rows of `dtype` by a vector of `weight_dtype`; None if it can."""
    if weight_dtype in (dtype, torch.float32):
        return None
    return f"takes weights in the rows' {dtype} or in float32, not {weight_dtype}"


def from_host(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to `device`, in the order of the device's queue and without waiting for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Shipped:
    """One form of a kernel that may be launched."""

    op: str
    config: str
    """The form's name among the op's forms."""
    kernel: Any
    signature: Mapping[str, str]
    """Types of the arguments that are not constants, by name: `*bf16`, `i32`, `fp32`."""
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    is_matrix: bool = False
    """Whether it must multiply on the tensor cores; on sm_90 by their warp group instructions."""
    is_warp_matrix: bool = False
    """Whether it must multiply on the tensor cores by instructions of single warps on every architecture. Fewer than 64
    rows have no others, and results that must round alike everywhere need one kind."""
    is_streaming: bool = False
    """Whether each thread must read memory in loads of 16 bytes."""
    multiples: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16, which Triton detects at a launch. Addresses always are."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further compiler options."""
    min_sm: int = 0
    """The first architecture that runs it."""
    max_sm: int = 999
    """The last architecture that runs it."""
    is_prefetching: bool = False
    """Whether it must ask the L2 cache for weights before it waits for the kernel before it."""
    shared: SharedNeed | None = None
    """Shared memory of its loop, if that is pipelined."""

    def stages_on(self, sm: int) -> int:
        """Its stages on an architecture: fewer if its shared memory does not fit; 0 if none fit."""
        if self.shared is None:
            return self.num_stages
        return self.shared.stages_on(DeviceProperties.of(sm, 1), self.num_stages)

    def early(self, *, is_prefetching: bool = False) -> Shipped:
        """This form for launches within `early_starts`."""
        return replace(
            self,
            config=f"{self.config} early",
            constants={**self.constants, "IS_DEPENDENT": True},
            options={**self.options, "launch_pdl": True},
            min_sm=max(self.min_sm, DEPENDENT_MIN_SM),
            is_prefetching=is_prefetching,
        )
