"""What the worker asks of the device it runs on, so that the runner reads the same on every one of them."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from inferd.kernels.tape import Buffers, record

_MAX_CPU_ROWS = 64
"""At 32 rows the calls were 7% of a step (0.6B shape in bfloat16, 2 cores of an AMD EPYC Zen 4, 2026-11-21), and their
share falls as rows grow: above, recordings would hold memory for little."""


class HostCopy(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Sequence[Tensor]:
        """The tensors on the host, once the work before has produced them."""
        ...


class Recording(Protocol):
    """Work that was recorded once, and the output that it writes."""

    output: Tensor

    def replay(self) -> None:
        """Do it again, on what its inputs hold now."""
        ...


class Device(Protocol):
    """One accelerator, or the processor."""

    name: str
    torch_device: torch.device
    row_buckets: Sequence[int]
    """Numbers of rows, ascending, that a decode step is recorded for; a step of fewer rows than one has is padded."""
    records_all: bool
    """Whether `record` takes whatever the device computes, or C++ kernels alone."""

    def empty_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the KV pool. Its content is undefined: no slot is read before it was written."""
        ...

    def to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Host integers as a tensor on the device, without waiting for it."""
        ...

    def write(self, goal: Tensor, values: Sequence[int]) -> None:
        """Host integers into a tensor on the device, in its place, without waiting for it."""
        ...

    def copy_to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start bringing tensors to the host as they are behind the work before, without waiting for them."""
        ...

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Run `run`, once or more, and record what it does. Raises `NotRecordableError`."""
        ...

    def time_s(self, run: Callable[[], object]) -> float:
        """Seconds that the device takes for what `run` has it do."""
        ...

    def memory_in_use(self) -> int:
        """Bytes of the device's memory that this process holds, as the system counts them."""
        ...

    def give_back_freed(self) -> None:
        """Return to the system what an allocator keeps of freed memory."""
        ...


class CpuDevice:
    """The processor: everything is on the host already."""

    row_buckets: Sequence[int] = range(1, _MAX_CPU_ROWS + 1)
    records_all = False

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.name = (
            f"cpu, {num_threads} thread{'s' if num_threads > 1 else ''}, {torch.backends.cpu.get_cpu_capability()}"
        )
        self.torch_device = torch.device("cpu")
        self._buffers = Buffers()

    def empty_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pages of memory that are only touched, and so only taken, when a block is first written."""
        return torch.empty(tuple(shape), dtype=dtype)

    def to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def write(self, goal: Tensor, values: Sequence[int]) -> None:
        goal.copy_(torch.tensor(values, dtype=goal.dtype))

    def copy_to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        return _OnTheHost(tensors)

    def record(self, run: Callable[[], Tensor]) -> Recording:
        return record(run, self._buffers)

    def memory_in_use(self) -> int:
        """Resident memory that belongs to no file, so that a checkpoint's mapped pages do not count."""
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    def time_s(self, run: Callable[[], object]) -> float:
        started_s = time.perf_counter()
        run()
        return time.perf_counter() - started_s

    def give_back_freed(self) -> None:
        """Each matrix as it was read lay between packed ones that stay, and glibc keeps such holes: 90 MiB of a 2.1 GiB
        model (measured: 2 cores, AMD EPYC Zen 4, 2026-11-21)."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class _OnTheHost:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Sequence[Tensor]:
        return self._tensors
