"""The memory of a pool's places on a device, as a tier below reads and writes it: copied to and from host memory.

A GPU copies on a stream of the calling thread, from and to pinned memory, and the thread waits for its copies. So they
run beside the steps, and order themselves with them by what the host knows: a place is read after the step that wrote
it was applied, and written while no launched step touches it. The steps' stream is never awaited. On a CPU the same
copies are plain ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.pool_memory import PoolMemory
from inferd.engine.worker.states import StatePool

_Rows = Sequence[tuple[int, int] | None]
"""(place, cache group) of each row; None for one without content."""
_Buffers = Sequence[Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class _Held:
    """Places `first` to `end - 1` are the items of a tensor from `first_item` on."""

    content: Tensor
    """[planes, items, bytes of an item] uint8."""
    first: int
    end: int
    first_item: int
    planes: tuple[int, ...]
    """Number of planes that a place of each group uses."""

    def parts(self, place: int, group: int) -> Sequence[Tensor]:
        """The bytes of a place, [bytes of an item] in each plane that its group uses."""
        num_planes = self.planes[group] if group < len(self.planes) else len(self.content)
        return self.content[:num_planes, self.first_item + place - self.first].unbind()


class CopyStream(Protocol):
    """A queue of copies between a device and the host."""

    def copy(self, goals: list[Tensor], sources: list[Tensor]) -> None:
        """Queue copies of contiguous tensors of one dtype, and return."""
        ...

    def wait(self) -> None:
        """Wait until all queued copies have arrived."""
        ...


class _CudaCopies:
    """A stream of a GPU beside that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def copy(self, goals: list[Tensor], sources: list[Tensor]) -> None:
        # One call: the loop over the copies does not hold the interpreter's lock. Each is one transfer without
        # temporary memory, because both sides are contiguous.
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(goals, sources, non_blocking=True)

    def wait(self) -> None:
        self._stream.synchronize()


class _PlainCopies:
    """On a CPU a copy is done when the call returns."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    @torch.inference_mode()
    def copy(self, goals: list[Tensor], sources: list[Tensor]) -> None:
        torch._foreach_copy_(goals, sources)

    def wait(self) -> None:
        """Nothing is left to wait for."""


_STREAMS: dict[str, Callable[[torch.device], CopyStream]] = {"cuda": _CudaCopies, "cpu": _PlainCopies}


class DeviceMemory:
    """The places of tensors that lie on a device."""

    def __init__(self, device: torch.device, open_stream: Callable[[torch.device], CopyStream] | None = None) -> None:
        """`open_stream` opens a stream of the calling thread; None: that of this kind of device."""
        self._device, self._open_stream = device, open_stream or _STREAMS[device.type]
        self._held: list[_Held] = []
        self._of_thread = threading.local()
        """The stream and the host memory of each thread that copies."""

    @classmethod
    def of(cls, model: LoadedModel, num_blocks: int, num_checkpoints: int) -> DeviceMemory:
        """The memory of a loaded model's blocks and checkpoints. A draft model's pool is no part of it."""
        memory = cls(model.device.torch_device)
        hold_places(memory, model.kv, model.states, num_blocks, num_checkpoints, model.decoder.arch)
        return memory

    def hold(self, tensor: Tensor, first: int, end: int, planes: Sequence[int] = (), first_item: int = 0) -> None:
        """As `PoolMemory.hold`."""
        self._held.append(_Held(tensor.flatten(2).view(torch.uint8), first, end, first_item, tuple(planes)))

    @property
    def row_layout(self) -> str:
        return repr([(held.content.shape[2], held.content.shape[0], held.planes) for held in self._held])

    @property
    def block_bytes(self) -> int:
        """Most bytes of a block of any group."""
        of_blocks = [held for held in self._held if held.planes]
        num_groups = max((len(held.planes) for held in of_blocks), default=0)
        return max(
            (sum(held.planes[group] * held.content.shape[2] for held in of_blocks) for group in range(num_groups)),
            default=0,
        )

    def row_bytes(self, place: int, group: int) -> int:
        return sum(len(part) for part in self._parts(place, group))

    def _parts(self, place: int, group: int) -> list[Tensor]:
        return [part for held in self._held if held.first <= place < held.end for part in held.parts(place, group)]

    # -- host memory -------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> memoryview:
        """Host memory that the device reads and writes by itself. It lives as long as views of it. torch rounds pinned
        memory up to a power of two. Raises `RuntimeError` if there is none."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first one
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return memoryview(tensor.numpy().data)

    def buffers(self, rows: _Rows) -> list[list[memoryview]]:
        """Parts of a buffer of the calling thread, which grows to the largest piece."""
        sizes = [0 if row is None else self.row_bytes(*row) for row in rows]
        buffer: memoryview | None = getattr(self._of_thread, "buffer", None)
        if buffer is None or len(buffer) < sum(sizes):
            self._of_thread.buffer = None  # frees it first
            del buffer
            buffer = self._of_thread.buffer = self.allocate(sum(sizes))
        found, start = list[list[memoryview]](), 0
        for size in sizes:
            found.append([buffer[start : start + size]] if size else [])
            start += size
        return found

    # -- copies ------------------------------------------------------------------------------------------------------

    def fetch(self, rows: _Rows, buffers: _Buffers) -> bool:
        on_device, on_host = self._pairs(rows, buffers)
        self._copy(on_host, on_device)
        return True

    def store(self, rows: _Rows, buffers: _Buffers) -> None:
        on_device, on_host = self._pairs(rows, buffers)
        self._copy(on_device, on_host)

    def _copy(self, goals: list[Tensor], sources: list[Tensor]) -> None:
        """Copy on this thread's stream, and wait for it. Neither side may be freed before."""
        stream: CopyStream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            stream = self._of_thread.stream = self._open_stream(self._device)
        if goals:
            stream.copy(goals, sources)
            stream.wait()

    def _pairs(self, rows: _Rows, buffers: _Buffers) -> tuple[list[Tensor], list[Tensor]]:
        """Parts of the places, and as many of the host memory, each contiguous and as long as the other."""
        of_places, of_hosts = list[Tensor](), list[Tensor]()
        for row, views in zip(rows, buffers, strict=True):
            if row is None:
                continue
            parts, hosts = self._parts(*row), [torch.frombuffer(view, dtype=torch.uint8) for view in views]
            if len(hosts) == 1:
                of_places += parts
                of_hosts += hosts[0].split_with_sizes([len(part) for part in parts])
            else:
                for part, host in _cut(parts, hosts):
                    of_places.append(part)
                    of_hosts.append(host)
        return of_places, of_hosts


def _cut(parts: Sequence[Tensor], hosts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Two cuts of the same bytes, cut further so that both have the same borders."""
    assert sum(map(len, parts)) == sum(map(len, hosts))
    left = list(reversed(hosts))
    for whole in parts:
        part = whole
        while len(part):
            host = left.pop()
            size = min(len(part), len(host))
            yield part[:size], host[:size]
            part = part[size:]
            if size < len(host):
                left.append(host[size:])


def hold_places(
    memory: PoolMemory | DeviceMemory,
    kv: KVPool,
    states: StatePool | None,
    num_blocks: int,
    num_checkpoints: int,
    arch: Arch,
) -> None:
    """Tell a memory where the places of a KV pool and of its checkpoints lie. The checkpoints follow the blocks."""
    planes = tuple(group.num_planes for group in arch.cache_groups)
    for tensor in (kv.data, kv.scales):
        if tensor is not None:
            memory.hold(tensor, 0, num_blocks, planes)
    if states is not None:
        for tensor in (states.matrices, states.inputs):
            memory.hold(tensor, num_blocks, num_blocks + num_checkpoints, first_item=states.num_slots)
