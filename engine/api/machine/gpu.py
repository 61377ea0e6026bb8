"""Detects the GPUs that this process would serve on: it asks the driver, without torch and without using GPU memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import pynvml

MIN_CAPABILITY = (8, 0)
"""Least compute capability: the kernels need bfloat16 on the tensor cores, and asynchronous copies."""

_AMD = "+rocm"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One NVIDIA GPU, and those like it that ranks can have beside it."""

    name: str
    capability: tuple[int, int]
    memory_total_bytes: int
    memory_free_bytes: int
    others_free_bytes: tuple[int, ...] = ()
    """Free memory of each of the GPUs after it, up to the first one with another name."""


class NoAcceleratorError(Exception):
    """No GPU can be used. The message says why."""


def detect() -> Accelerator:
    """The first GPU that CUDA_VISIBLE_DEVICES allows, and those after it. Raises `NoAcceleratorError`."""
    torch_version = metadata.version("torch")
    if torch_version.endswith("+cpu"):
        raise NoAcceleratorError(f"torch {torch_version} is built for the CPU only; install its CUDA build")
    if _AMD in torch_version:
        raise NoAcceleratorError(f"torch {torch_version} is built for AMD GPUs, and no kernel has run on one yet")
    try:
        pynvml.nvmlInit()
        try:
            first, *others = _visible()
            accelerator = _read(_handle(first))
            accelerator = replace(accelerator, others_free_bytes=tuple(_free_bytes(others, accelerator)))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoAcceleratorError(f"the NVIDIA driver says: {error}") from error
    if accelerator.capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (accelerator.capability, MIN_CAPABILITY))
        raise NoAcceleratorError(f"{accelerator.name} has compute capability {have}, but at least {need} is needed")
    return accelerator


def _visible() -> list[str]:
    """Numbers or UUIDs of GPUs, in the order in which CUDA counts them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return [str(index) for index in range(max(pynvml.nvmlDeviceGetCount(), 1))]
    return [visible.strip() for visible in allowed.split(",")]


def _free_bytes(others: Iterable[str], first: Accelerator) -> Iterator[int]:
    """Free memory of GPUs, up to one that is not like the first, or that the driver does not know: CUDA stops there
    too."""
    for visible in others:
        try:
            other = _read(_handle(visible))
        except (pynvml.NVMLError, NoAcceleratorError):
            return
        if other.name != first.name:
            return
        yield other.memory_free_bytes


def _handle(visible: str) -> Any:
    """The driver's handle of the GPU `visible`, a number or a UUID as in CUDA_VISIBLE_DEVICES."""
    if visible.startswith("GPU-"):
        return pynvml.nvmlDeviceGetHandleByUUID(visible)
    if not visible.isdigit():
        raise NoAcceleratorError(f"CUDA_VISIBLE_DEVICES begins with {visible!r}, which is not a GPU's number or UUID")
    return pynvml.nvmlDeviceGetHandleByIndex(int(visible))


def _read(handle: Any) -> Accelerator:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Accelerator(pynvml.nvmlDeviceGetName(handle), (major, minor), int(memory.total), int(memory.free))
