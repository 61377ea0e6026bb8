"""Captures and replays of CUDA graphs on a recorded GPU, in place of `torch.cuda.CUDAGraph`.

The work of a capture runs at once, so that its results have shapes. A replay repeats it without the Python code around
it, as `capturing` does: it finds memory of the capture full of NaN. It uses memory from outside by its address alone,
as a GPU does, so a graph keeps none of it alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.cpu.capturing import Kernel, again
from tests.cpu.recorded_gpu.memory import Memory
from tests.cpu.recorded_gpu.order import Uses, Work, here

if TYPE_CHECKING:
    from tests.cpu.recorded_gpu.device import RecordedGpu

Access = tuple[bool, bool]
"""(whether it reads, whether it writes)."""


@dataclass(eq=False)
class Pool:
    """Memory that graphs share. A graph that is captured later gets what an earlier one used for a while."""

    uses: Uses = field(default_factory=Uses)
    graphs: WeakSet[Graph] = field(default_factory=WeakSet)
    num_captures: int = 0
    is_taken: bool = False
    """Whether a capture uses it, or one that could not be ended."""


class Capture:
    """A capture that goes on."""

    def __init__(self, gpu: RecordedGpu, pool: Pool, stream: int, mode: str) -> None:
        self._gpu = gpu
        self.pool, self.stream, self.mode, self.thread = pool, stream, mode, threading.get_ident()
        self.streams, self.is_invalid, self.where = {stream}, False, here()
        self.last: dict[int, Work] = {}
        """The last work of each stream."""
        self.uses: dict[Memory, Uses] = {}
        self.accesses: dict[Memory, Access] = {}
        self.own: list[Memory] = []
        self.taken: list[Tensor] = []
        self._own_storages: set[int] = set()
        self.calls: list[Callable[[], object]] = []
        self.has_products = False

    @property
    def is_mine(self) -> bool:
        """Whether this thread captures."""
        return self.thread == threading.get_ident()

    def note(self, memory: Memory, access: Access) -> None:
        before = self.accesses.get(memory, (False, False))
        self.accesses[memory] = (before[0] or access[0], before[1] or access[1])

    def keep(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor], fresh: Sequence[Tensor]
    ) -> None:
        """Keep an operation. `made`: its results, of which `fresh` are new memory."""
        self.taken += fresh
        self._own_storages.update(tensor.untyped_storage()._cdata for tensor in fresh)
        if not func.name().startswith("aten::empty"):
            args, given = tree_map_only(Tensor, self._without_owner, (tuple(args), dict(kwargs)))
            made = [self._without_owner(tensor) for tensor in made]
            self.calls.append(lambda: again(func, args, given, made))

    def _without_owner(self, tensor: Tensor) -> Tensor:
        if tensor.is_mkldnn or tensor.untyped_storage()._cdata in self._own_storages:
            return tensor
        # A number from the host is an argument of the kernel.
        return by_address(tensor) if self._gpu.memories.of(tensor) is not None else tensor.clone()

    def keep_kernel(self, address: int, packed: bytes) -> None:
        kernel = Kernel(address)
        self.calls.append(lambda: kernel(packed))


def by_address(tensor: Tensor) -> Tensor:
    """The same memory, which this tensor does not keep alive."""
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(  # type: ignore[call-overload,no-any-return]
        alias, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self, gpu: RecordedGpu) -> None:
        self._gpu, self._capture = gpu, None
        self._pool: Pool | None = None
        self.captured: Capture | None = None
        self.order = 0
        """Number of this capture among those of its pool."""
        self.num_replays = 0

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        gpu = self._gpu
        self._pool = gpu.pool(pool)
        if self._pool.is_taken:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if gpu.capture is not None:
            gpu.fault("a capture begins within another one")
        if gpu.current == 0:
            gpu.fault("the default stream cannot be captured")
        self._pool.is_taken = True
        gpu.capture = Capture(gpu, self._pool, gpu.current, capture_error_mode)

    def capture_end(self) -> None:
        gpu, pool = self._gpu, self._pool
        capture, gpu.capture = gpu.capture, None
        assert capture is not None and pool is not None
        if capture.is_invalid:
            # torch leaves the stream of the capture the current one, and the pool taken.
            gpu.local.is_left = True
            raise RuntimeError("operation failed due to a previous error during capture")
        for stream in capture.streams - {capture.stream}:
            if not capture.last[stream].is_known_to(gpu.streams.clock(capture.stream)):
                gpu.fault(f"the capture at {capture.where} ends before {capture.last[stream].what} on another stream")
        pool.is_taken, pool.num_captures = False, pool.num_captures + 1
        self.order, self.captured = pool.num_captures, capture
        pool.graphs.add(self)
        for memory in capture.own:
            memory.stale = f"the graph captured at {capture.where} was not replayed: a capture computes nothing"
        gpu.graphs.add(self)

    def replay(self) -> None:
        gpu, capture, pool = self._gpu, self.captured, self._pool
        assert capture is not None and pool is not None, "a graph that was not captured"
        gpu.refuse_in_capture("a graph is replayed")
        self.check_memory()
        self.num_replays += 1
        what = f"a replay of the graph captured at {capture.where}"
        work = gpu.queue(what)
        gpu.order(pool.uses, work, "the memory that graphs share", is_write=True)
        for memory, (is_read, is_write) in self._outside():
            gpu.touch(memory, work, is_read=is_read, is_write=is_write)
        for other in pool.graphs:
            if other.captured is not None and other.order > self.order:
                for memory in other.captured.own:
                    memory.stale = f"{what} may have overwritten it: it shares memory with the graph that wrote it"
        for memory in capture.own:
            memory.stale = ""
            memory.uses.note(work, is_write=True)
        with gpu.off():
            gpu.fill(capture.taken)
            for call in capture.calls:
                call()

    def check_memory(self) -> None:
        """A fault if memory that the graph uses is gone."""
        assert self.captured is not None
        for memory, _ in self._outside():
            if memory.is_freed:
                self._gpu.fault(f"the graph captured at {self.captured.where} uses {memory.label}, which was freed")

    def _outside(self) -> Iterable[tuple[Memory, Access]]:
        assert self.captured is not None
        own = set(self.captured.own)
        return [(memory, access) for memory, access in self.captured.accesses.items() if memory not in own]
