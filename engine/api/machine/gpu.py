"""Detects the GPU that this process would serve on: it asks the driver, without torch and without using GPU memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pynvml

MIN_CAPABILITY = (8, 0)
"""Least compute capability: the kernels need bfloat16 on the tensor cores, and asynchronous copies."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One NVIDIA GPU."""

    name: str
    capability: tuple[int, int]
    memory_total_bytes: int
    memory_free_bytes: int


class NoAcceleratorError(Exception):
    """No GPU can be used. The message says why."""


def detect() -> Accelerator:
    """The first GPU that CUDA_VISIBLE_DEVICES allows. Raises `NoAcceleratorError`."""
    torch_version = metadata.version("torch")
    if torch_version.endswith("+cpu"):
        raise NoAcceleratorError(f"torch {torch_version} is built for the CPU only; install its CUDA build")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        pynvml.nvmlInit()
        try:
            accelerator = _read(_handle(visible))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoAcceleratorError(f"the NVIDIA driver says: {error}") from error
    if accelerator.capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (accelerator.capability, MIN_CAPABILITY))
        raise NoAcceleratorError(f"{accelerator.name} has compute capability {have}, but at least {need} is needed")
    return accelerator


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
