"""One CUDA device: it copies through pinned memory, and records steps as CUDA graphs.

Work is queued on the current stream, and the host learns a step's ids while the next step runs. While serving, only
`_PinnedCopy.wait` waits for the device. Large host tensors are copied through two pinned buffers in turn (`Staging`):
the host fills one while the GPU reads the other. Without them the driver copies pageable memory in pieces on one
thread, and the GPU waits for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from inferd.engine.api.memory.activations import GPU_ROW_BUCKETS, GPU_TOKEN_BUCKETS
from inferd.engine.worker.device import HostCopy, Recording
from inferd.engine.worker.pool_memory import PoolMemory
from inferd.kernels import gpu
from inferd.kernels.cpu.tape import NotRecordableError
from inferd.kernels.gpu import early_starts, from_host
from inferd.kernels.registry import KernelError

BUFFER_BYTES = 16 * 2**20
"""Bytes of one buffer: the GPU reads it in about 0.3 ms at 50 GB/s, many times longer than a launch takes."""


class Event(Protocol):
    """A point in the GPU's queue."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait for the point that was recorded last, if any."""


def send(goal: Tensor, part: Tensor) -> None:
    """Queue a copy from pinned memory."""
    goal.copy_(part, non_blocking=True)


class Staging:
    """Buffers of bytes in pinned memory, and for each the event behind the last copy that reads it. Knows no weights
    and no stream: copies go to the current one, in order."""

    def __init__(self, buffers: Sequence[tuple[Tensor, Event]], send: Callable[[Tensor, Tensor], None] = send) -> None:
        self._turns, self._send = cycle(buffers), send

    @classmethod
    def on_current_device(cls) -> Staging:
        """Two buffers, and copies to the current GPU."""
        return cls(
            [
                (torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
        )

    def copy(self, goal: Tensor, values: Tensor) -> None:
        """Copy `values` of the host to `goal`, which is contiguous, and convert them to its dtype on the host. `values`
        may change when this returns."""
        assert goal.shape == values.shape
        flat_goal, flat_values = goal.view(-1), values.reshape(-1)
        first = 0
        while first < len(flat_goal):
            buffer, is_read = next(self._turns)
            is_read.synchronize()
            part = buffer.view(goal.dtype)[: len(flat_goal) - first]
            part.copy_(flat_values[first : first + len(part)])
            self._send(flat_goal[first : first + len(part)], part)
            is_read.record()
            first += len(part)


logger = logging.getLogger(__name__)

_FIRST_WARM_UP_RUNS, _WARM_UP_RUNS = 2, 1
"""Number of runs before the first capture, and before each later one. In a step's first run its kernels are compiled
and loaded, and in the first run of all libraries allocate what they keep."""


class CudaDevice:
    """The CUDA device `index` of those visible to this process."""

    row_buckets: Sequence[int] = GPU_ROW_BUCKETS
    token_buckets: Sequence[int] = GPU_TOKEN_BUCKETS
    records_all = True
    pool_memory: PoolMemory | None = None

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.name = self.processor = torch.cuda.get_device_name(self.torch_device)
        self._staging: Staging | None = None
        """Buffers of `upload`, which exist while weights are loaded."""
        self.properties = gpu.properties_of(self.torch_device)
        if not self.properties.is_known:
            logger.warning(
                "%s has compute capability %s, for which no kernel was compiled and judged: it gets the safest forms",
                self.name,
                self.properties.capability,
            )
        self._starts_early = self.properties.starts_early
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._capture_stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._has_recorded = False

    def empty_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros, because a library's attention multiplies what lies behind a sequence's end by 0, and 0 * NaN is
        NaN."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)

    def to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return from_host(torch.tensor(values, dtype=dtype), self.torch_device)

    def write(self, goal: Tensor, values: Sequence[int]) -> None:
        goal.copy_(torch.tensor(values, dtype=goal.dtype, pin_memory=True), non_blocking=True)

    def upload(self, goal: Tensor, values: Tensor) -> None:
        if self._staging is None:
            self._staging = Staging.on_current_device()
        self._staging.copy(goal, values)

    def copy_to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        return _PinnedCopy(tensors)

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """A CUDA graph of `run`. All graphs share memory, because they are replayed one at a time. If it cannot be
        captured with kernels that start early, it is captured without, and so are all later ones."""
        if self._starts_early:
            try:
                with early_starts():
                    return self._captured(run)
            except NotRecordableError as error:
                if isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                logger.warning("a step is captured again, without kernels that start early: %s", error)
        recording = self._captured(run)
        self._starts_early = False
        return recording

    def _captured(self, run: Callable[[], Tensor]) -> Recording:
        num_runs = _WARM_UP_RUNS if self._has_recorded else _FIRST_WARM_UP_RUNS
        self._has_recorded = True
        stream, current = self._capture_stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                for _ in range(num_runs):
                    run()
            # thread_local: the core's thread may wait for the previous step's event during the capture.
            with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream, capture_error_mode="thread_local"):
                output = run()
        except RuntimeError as error:
            torch.cuda.set_stream(current)
            if isinstance(error, KernelError):
                raise
            if not isinstance(error, torch.OutOfMemoryError):
                # A pool serves one capture at a time. torch does not notice the end of a capture that the driver gave
                # up.
                self._graph_pool = torch.cuda.graph_pool_handle()
            # The context has the error that ended the capture; `error` says that it could not be ended properly.
            raise NotRecordableError(f"the step cannot be captured: {error.__context__ or error}") from error
        finally:
            # Runs that were cut short may still write to tensors that the next step writes.
            current.wait_stream(stream)
        graph.replay()  # a capture computes nothing
        return _CudaGraph(graph, output)

    def memory_in_use(self) -> int:
        """Memory that torch holds. The driver's own context comes on top and is not part of the memory plan."""
        return torch.cuda.memory_reserved(self.torch_device)

    def time_s(self, run: Callable[[], object]) -> float:
        """Time by the device's own clock, starting with an idle device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.torch_device)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def give_back_freed(self) -> None:
        self._staging = None
        if not self._has_recorded:
            _clear_workspaces()
        torch.cuda.empty_cache()


def _clear_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream. `empty_cache` leaves them, because torch holds them. The
    next product makes a new one. Products of a graph would still write to the freed one, so no graph may be in use."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()


class _PinnedCopy:
    """Copies that are queued after the work that produces their sources."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def wait(self) -> Sequence[Tensor]:
        self._arrived.synchronize()
        return self._copies
