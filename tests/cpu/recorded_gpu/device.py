"""Stands in for `torch.cuda`, so that the whole worker of a GPU runs on a CPU, and its mistakes are found.

Tensors lie in the CPU's memory. `modes` tells the worker that those of the device are on "cuda", and sees every
operation. C++ kernels compute in place of Triton's. Work runs at once, in the order of the host, and `order` judges
whether a GPU would keep that order. `streams` and `graphs` stand in for torch's classes.

`RecordedGpu.faults` names what a GPU would refuse, or do in another order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu as kernels_gpu
from inferd.kernels.cpu import native
from inferd.kernels.registry import Op
from tests.cpu.capturing import poison, tensors_in
from tests.cpu.recorded_gpu.graphs import Capture, Graph, Pool
from tests.cpu.recorded_gpu.memory import Memories, Memory
from tests.cpu.recorded_gpu.modes import Placing, Watching
from tests.cpu.recorded_gpu.order import Clock, FaultError, Streams, Uses, Work, here, join
from tests.cpu.recorded_gpu.streams import Event, On, Stream


class _Local(threading.local):
    """State of each thread."""

    stream = 0
    is_off = False
    """Whether the recorder itself computes."""
    making: str | None = None
    """Place in which a function that runs makes its tensors: "device", "host" or "pinned"."""
    kernel: str | None = None
    """The op whose kernel runs."""
    is_left = False
    """Whether the current stream is that of a capture which could not be ended."""


class RecordedGpu:
    """A GPU of compute capability `sm`."""

    def __init__(self, sm: int = 90) -> None:
        self.sm = sm
        self.faults: list[str] = []
        self.local, self.streams, self.memories = _Local(), Streams(), Memories()
        self.capture: Capture | None = None
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.may_wait = self.may_allocate = True
        """Whether anything but an event may be waited for, and whether memory of the device may be allocated."""
        self._layers: set[type] = set()
        self._pools: dict[tuple[int, int], Pool] = {}

    # -- faults --------------------------------------------------------------------------------------------------------

    def fault(self, text: str) -> None:
        """Note a fault, and raise it. A capture does not survive one."""
        text = f"{here()}: {text}"
        self.faults.append(text)
        if self.capture is not None:
            self.capture.is_invalid = True
        raise FaultError(text)

    def check(self) -> None:
        """Raises the first fault, also one that the worker has caught, and one that a later replay would meet."""
        if self.faults:
            raise FaultError(self.faults[0])
        for graph in list(self.graphs):
            graph.check_memory()

    def refuse_in_capture(self, what: str) -> None:
        """A fault if `what` may not happen because of a capture. In mode "global", it may happen in no thread."""
        capture = self.capture
        if capture is None:
            return
        if capture.is_mine:
            self.fault(f"{what} within a capture")
        if capture.mode == "global":
            self.fault(f'{what} in another thread than that of a capture, whose mode is "global"')

    # -- work ----------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> int:
        return self.local.stream

    @property
    def my_capture(self) -> Capture | None:
        """The capture that gets the work of this thread."""
        return self.capture if self.capture is not None and self.capture.is_mine else None

    def queue(self, what: str) -> Work:
        """Work on the current stream."""
        if self.local.is_left:
            self.fault("the current stream is still that of a capture which failed")
        capture = self.my_capture
        work = self.streams.queue(self.current, f"{what} ({here()})")
        if capture is not None:
            if self.current not in capture.streams:
                self.fault(f"{what} within a capture, on a stream that is not captured")
            capture.last[self.current] = work
        return work

    def order(self, uses: Uses, work: Work, what: str, *, is_write: bool) -> None:
        """Note an access. A fault if nothing orders it after another one that conflicts."""
        conflict = uses.conflict(self.streams.clock(work.stream), is_write=is_write)
        if conflict is not None:
            does, other = conflict
            self.fault(
                f"{work.what} on {self.streams.names[work.stream]} {'writes' if is_write else 'reads'} {what}, which "
                f"{other.what} on {self.streams.names[other.stream]} {does}: no event or stream orders them"
            )
        uses.note(work, is_write=is_write)

    def touch(self, memory: Memory, work: Work, *, is_read: bool, is_write: bool) -> None:
        """Note that work of the device accesses memory."""
        capture = self.my_capture
        if memory.stale and is_read:
            self.fault(f"{work.what} reads {memory.label}, but {memory.stale}")
        if capture is not None:
            capture.note(memory, (is_read, is_write))
        uses = memory.uses if capture is None else capture.uses.setdefault(memory, Uses())
        self.order(uses, work, memory.label, is_write=is_write)

    def host_accesses(self, memory: Memory, *, is_write: bool) -> None:
        """The host reads or writes pinned memory now. A fault if a copy may still use it."""
        conflict = memory.uses.conflict(self.streams.host, is_write=is_write)
        if conflict is not None:
            does, other = conflict
            self.fault(
                f"the host {'writes' if is_write else 'reads'} {memory.label}, which {other.what} {does}: the host has "
                "not waited for an event behind it"
            )

    def waits(self, what: str, clock: Clock | None) -> None:
        """The host waits for the device in a way that a launch may not."""
        self.refuse_in_capture(what)
        if not self.may_wait:
            self.fault(f"{what}, so a launch waits for the device")
        self.streams.synchronize(clock)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it, nothing is recorded."""
        before, self.local.is_off = self.local.is_off, True
        try:
            yield
        finally:
            self.local.is_off = before

    @contextmanager
    def making(self, place: str | None) -> Iterator[None]:
        before, self.local.making = self.local.making, place
        try:
            yield
        finally:
            self.local.making = before

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        before = self.local.kernel
        self.local.kernel = before or name
        try:
            yield
        finally:
            self.local.kernel = before

    @contextmanager
    def serving(self, *, may_allocate: bool = True) -> Iterator[None]:
        """Within it, no launch may wait for the device."""
        self.may_wait, self.may_allocate = False, may_allocate
        try:
            yield
        finally:
            self.may_wait = self.may_allocate = True

    # -- memory --------------------------------------------------------------------------------------------------------

    def is_on_device(self, tensor: Tensor) -> bool:
        memory = self.memories.of(tensor)
        return memory is not None and not memory.is_pinned

    def allocated(self, tensor: Tensor, *, is_pinned: bool) -> Memory:
        """Note new memory. A fault if it may not be allocated now, or if work may still use what it was before."""
        memory, capture = self.memories.add(tensor, self.current, is_pinned=is_pinned), self.my_capture
        if is_pinned:
            self.refuse_in_capture("pinned memory is allocated")
        elif capture is None:
            self.refuse_in_capture("memory of the device is allocated")
            if not self.may_allocate:
                self.fault(f"a replayed step allocates memory of the device: {memory.label}")
            self._reuse()
        else:
            if self.current not in capture.streams:
                self.fault(f"{memory.label} does not come from the memory of the graph: its stream is not captured")
            memory.is_of_graph = True
            capture.own.append(memory)
        return memory

    def _reuse(self) -> None:
        found = self.memories.reuse(self.current, self.streams.clock(self.current))
        if found is not None:
            memory, work = found
            self.fault(
                f"{memory.label} was freed, and its memory is used again on {self.streams.names[self.current]}, but "
                f"{work.what} on {self.streams.names[work.stream]} may still use it"
            )

    # -- torch.cuda ----------------------------------------------------------------------------------------------------

    def pool(self, handle: tuple[int, int] | None) -> Pool:
        return self._pools[self.new_pool() if handle is None else handle]

    def new_pool(self) -> tuple[int, int]:
        handle = (0, len(self._pools) + 1)
        self._pools[handle] = Pool()
        return handle

    def clear_workspaces(self) -> None:
        for graph in self.graphs:
            if graph.captured is not None and graph.captured.has_products:
                self.fault(f"workspaces of cuBLAS are freed, but the graph captured at {graph.captured.where} uses one")

    def empty_cache(self) -> None:
        self.refuse_in_capture("memory is given back to the driver")

    def native_call(self, address: int, packed: bytes) -> None:
        """A C++ kernel has run. Which of its tensors it writes is not known, so all count as written."""
        if self.local.is_off:
            return
        memories = [one for one in self.memories.at(memoryview(packed).cast("q")) if not one.is_pinned]
        name, capture = self.local.kernel or "a kernel", self.my_capture
        if not memories:
            if capture is not None:
                self.fault(f"{name} computes on the host within a capture")
            return
        work = self.queue(name)
        for memory in memories:
            self.touch(memory, work, is_read=True, is_write=True)
        if capture is not None:
            capture.has_products |= "linear" in name
            capture.keep_kernel(address, packed)

    def set_stream(self, stream: Stream) -> None:
        self.local.stream, self.local.is_left = stream.number, False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace what torch and the registry of kernels have."""
        properties = SimpleNamespace(
            name="a GPU", major=self.sm // 10, minor=self.sm % 10, multi_processor_count=132, total_memory=2**34,
            shared_memory_per_block_optin=227 << 10, L2_cache_size=2**16,
        )  # fmt: skip
        stand_ins: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "get_device_name": lambda *_: properties.name,
            "get_device_properties": lambda *_: properties,
            "mem_get_info": lambda *_: (2**33, 2**34),
            "memory_reserved": lambda *_: self.memories.num_bytes,
            "graph_pool_handle": self.new_pool,
            "Stream": _of(Stream, self),
            "Event": _of(Event, self),
            "CUDAGraph": _of(Graph, self),
            "current_stream": lambda *_: Stream(self, number=self.current),
            "default_stream": lambda *_: Stream(self, number=0),
            "set_stream": self.set_stream,
            "stream": partial(On, self),
            "synchronize": lambda *_: self.waits("the host waits for the device", None),
            "empty_cache": self.empty_cache,
        }
        for name, value in stand_ins.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(kernels_gpu, "properties_of", kernels_gpu.properties_of.__wrapped__)
        self.install_kernels(patch)
        self._install_threads(patch)

    def install_kernels(self, patch: pytest.MonkeyPatch) -> None:
        """Have C++ kernels compute."""
        patch.setattr(native, "_recorder", self.native_call)
        resolve, choice = Op.resolve, Op.choice

        def resolved(op: Op[Any, Any], key: Any) -> Any:
            run = resolve(op, _on_host(key))
            return run if key.device_type == "cpu" else partial(self._run, patch, op.name, run)

        patch.setattr(Op, "resolve", resolved)
        patch.setattr(Op, "choice", lambda op, key: choice(op, _on_host(key)))

    def _install_threads(self, patch: pytest.MonkeyPatch) -> None:
        """Have the threads of executors use the GPU. A thread gets the clock of the one that gave it work, and the
        one that takes the result gets its clock."""
        submit, result, learned = ThreadPoolExecutor.submit, Future.result, WeakKeyDictionary[Future[Any], Clock]()

        def submitted(pool: ThreadPoolExecutor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
            given, gained = dict(self.streams.host), Clock()

            def run() -> Any:
                join(self.streams.host, given)
                try:
                    with self.watching():
                        return function(*args, **kwargs)
                finally:
                    gained.update(self.streams.host)

            future = submit(pool, run)
            learned[future] = gained
            return future

        def taken(future: Future[Any], timeout: float | None = None) -> Any:
            try:
                return result(future, timeout)
            finally:
                join(self.streams.host, learned.get(future, {}))

        patch.setattr(ThreadPoolExecutor, "submit", submitted)
        patch.setattr(Future, "result", taken)

    def _run(self, patch: pytest.MonkeyPatch, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a kernel. If it is one that binds a layer, calls of the layer are calls of a kernel too."""
        self._check_arguments(name, (args, kwargs))
        with self.kernel(name):
            result = run(*args, **kwargs)
        for tensor in tensors_in(result):
            if not tensor.is_mkldnn and self.memories.of(tensor) is None:
                self.allocated(tensor, is_pinned=False)  # pages of the system
        if not callable(result) or isinstance(result, Tensor):
            return result
        if isinstance(result, FunctionType):
            return partial(self._run, patch, name, result)
        kind = type(result)
        if kind not in self._layers:
            self._layers.add(kind)
            for method in {"__call__", "rows"} & set(dir(kind)):
                patch.setattr(kind, method, self._in_kernel(name, getattr(kind, method)))
        return result

    def _check_arguments(self, name: str, arguments: Any) -> None:
        """A fault if a kernel gets memory of the host."""
        for tensor in tensors_in(arguments):
            if not tensor.is_mkldnn and not self.is_on_device(tensor):
                self.fault(
                    f"the kernel {name} gets a tensor of the host ({str(tensor.dtype)[6:]} {list(tensor.shape)})"
                )

    def _in_kernel(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(layer: Any, x: Tensor, *others: Any) -> Any:
            if not self.is_on_device(x):
                return call(layer, x, *others)
            with self.kernel(name):
                return call(layer, x, *others)

        return called

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Give memory a content before work is repeated that has to write it."""
        poison(tensors)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, this thread uses the GPU."""
        with Watching(self), Placing(self):  # type: ignore[no-untyped-call]
            yield


def _of(kind: type, gpu: RecordedGpu) -> type:
    """The class for this GPU. Others name torch's classes in annotations, so it must be one."""
    return type(
        kind.__name__, (kind,), {"__init__": lambda own, *args, **kwargs: kind.__init__(own, gpu, *args, **kwargs)}
    )  # type: ignore[misc]


def _on_host(key: Any) -> Any:
    return key._replace(device_type="cpu")


@contextmanager
def recorded_gpu(sm: int = 90, kind: type[RecordedGpu] = RecordedGpu) -> Iterator[RecordedGpu]:
    """A GPU, which this thread and those of executors use. Raises `FaultError` at the end if there was a fault."""
    gpu = kind(sm)
    with pytest.MonkeyPatch.context() as patch:
        gpu.install(patch)
        with gpu.watching():
            yield gpu
    gpu.check()
