"""The worker's interface to its device, and the CPU as such a device. The runner's code is the same on every device."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from inferd.engine.api.process.logs import counted
from inferd.engine.worker.pool_memory import PoolMemory
from inferd.kernels.cpu import tape
from inferd.kernels.device import DeviceProperties

_MAX_CPU_ROWS = 64
"""Most rows of a recorded step: recordings of more would hold memory for little gain. At 32 rows calls from Python took
7% of a step, and their share falls as rows grow (0.6B in bfloat16, 2 cores of an AMD EPYC Zen 4, 2026-11-21)."""


class HostCopy(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Sequence[Tensor]:
        """The tensors on the host, when the work queued before has produced them."""
        ...


class Recording(Protocol):
    """Work that was recorded once, and the output that it writes."""

    output: Tensor

    def replay(self) -> None:
        """Do the work again, with the present content of its inputs."""
        ...


class Device(Protocol):
    """One GPU, or the CPU."""

    name: str
    processor: str
    """The kind of GPU or processor, without the number of threads."""
    torch_device: torch.device
    row_buckets: Sequence[int]
    """Numbers of rows, ascending, that decode steps are recorded for. Other steps are padded to the next number."""
    token_buckets: Sequence[int]
    """Numbers of tokens, ascending, that the layers of steps with prompts are recorded for; none unless
    `records_all`."""
    pool_memory: PoolMemory | None
    """Memory of its pools that outlives this engine; None if they end with it."""
    records_all: bool
    """Whether `record` records all that the device computes, or C++ kernels only."""

    @property
    def properties(self) -> DeviceProperties | None:
        """Properties that kernels choose their forms by; None for a CPU."""
        ...

    def empty_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the KV pool. On a CPU its content is undefined, because no slot is read before it is written."""
        ...

    def to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """A tensor of host integers on the device, without waiting for the device."""
        ...

    def write(self, goal: Tensor, values: Sequence[int]) -> None:
        """Copy host integers into the tensor `goal` on the device, without waiting for the device."""
        ...

    def upload(self, goal: Tensor, values: Tensor) -> None:
        """Copy a large tensor of the host into the contiguous tensor `goal` on the device, converted to its dtype."""
        ...

    def copy_to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start copying tensors to the host, after the work queued before, without waiting for it."""
        ...

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Run `run` at least once, and record its work. Raises `NotRecordableError`."""
        ...

    def time_s(self, run: Callable[[], object]) -> float:
        """Seconds that the device takes for the work that `run` gives it."""
        ...

    def memory_in_use(self) -> int:
        """Bytes of the device's memory that this process holds."""
        ...

    def give_back_freed(self) -> None:
        """Return freed memory that an allocator still keeps to the system."""
        ...


class CpuDevice:
    """The CPU, on which all tensors are on the host already."""

    row_buckets: Sequence[int] = range(1, _MAX_CPU_ROWS + 1)
    token_buckets: Sequence[int] = ()
    properties = None
    records_all = False

    def __init__(self, num_threads: int, pool_memory: PoolMemory | None = None) -> None:
        self._num_threads = num_threads
        self.pool_memory = pool_memory
        torch.set_num_threads(num_threads)
        instructions = torch.backends.cpu.get_cpu_capability()
        self.name = f"cpu, {counted(num_threads, 'thread')}, {instructions}"
        self.processor = f"cpu, {instructions}"
        self.torch_device = torch.device("cpu")
        self._buffers = tape.Buffers()

    def empty_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pages of memory that the system allocates only when a block is first written."""
        return (
            torch.empty(tuple(shape), dtype=dtype) if self.pool_memory is None else self.pool_memory.empty(shape, dtype)
        )

    def to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def write(self, goal: Tensor, values: Sequence[int]) -> None:
        goal.copy_(torch.tensor(values, dtype=goal.dtype))

    def upload(self, goal: Tensor, values: Tensor) -> None:
        goal.copy_(values)

    def copy_to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        return _OnTheHost(tensors)

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """On its own number of threads, which the recording keeps: threads on lent cores would never be given back."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return tape.record(run, self._buffers)
        finally:
            torch.set_num_threads(num_threads)

    def memory_in_use(self) -> int:
        """Resident memory without mapped files, so that a checkpoint's pages do not count."""
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
        """glibc keeps the holes that unpacked matrices leave between packed ones: 90 MiB with a 2.1 GiB model
        (measured: 2 cores, AMD EPYC Zen 4, 2026-11-21)."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class _OnTheHost:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Sequence[Tensor]:
        return self._tensors
