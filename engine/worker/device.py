"""What the worker asks of the device it runs on, so that the runner reads the same on every one of them."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class Device(Protocol):
    """One accelerator, or the processor."""

    name: str
    torch_device: torch.device

    def empty_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the KV pool. Its content is undefined: no slot is read before it was written."""
        ...

    def to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Host integers as a tensor on the device, without waiting for it."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor's values on the host, once the work before has produced them."""
        ...

    def memory_in_use(self) -> int:
        """Bytes of the device's memory that this process holds, as the system counts them."""
        ...


class CpuDevice:
    """The processor: everything is on the host already."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.name = (
            f"cpu, {num_threads} thread{'s' if num_threads > 1 else ''}, {torch.backends.cpu.get_cpu_capability()}"
        )
        self.torch_device = torch.device("cpu")

    def empty_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pages of memory that are only touched, and so only taken, when a block is first written."""
        return torch.empty(tuple(shape), dtype=dtype)

    def to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def memory_in_use(self) -> int:
        """Resident memory that belongs to no file, so that a checkpoint's mapped pages do not count."""
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024
