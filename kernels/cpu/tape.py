"""A run of C++ kernels, recorded once and replayed by one call: for the CPU what a CUDA graph is for a GPU.

A decode step is about 250 calls from Python, each 15 us after megabytes of weights went through the caches. A recording
makes them in a C++ loop. The calls are the same, and so are the results, bit for bit. A recording reads and writes the
memory that it was made with. A caller fills its inputs before a replay, and reads its output before the next one.

Recordings share `Buffers`: memory that a run freed while it was recorded is used again, by it and all others. So they
are replayed one at a time.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inferd.kernels.cpu import native


class NotRecordableError(RuntimeError):
    """A run did something other than calling C++ kernels; says what."""


class Buffers:
    """Memory for the tensors between recorded kernels, in pieces of a power of two bytes. Grows, never shrinks."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.num_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """torch.empty, in memory that is used again once the tensor and its views are gone."""
        num_elements = math.prod(shape)
        num_bytes = max(1, num_elements) * dtype.itemsize
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free[size]
        if not free:
            free.append(torch.empty(size, dtype=torch.uint8))
            self.num_bytes += size
        piece = free.pop()
        owner = (ctypes.c_uint8 * size).from_address(piece.data_ptr())
        weakref.finalize(owner, free.append, piece).atexit = False
        return torch.frombuffer(owner, dtype=dtype, count=max(1, num_elements))[:num_elements].view(shape)


class Tape:
    """Recorded calls and their output."""

    def __init__(self, calls: Sequence[tuple[int, bytes]], output: Tensor, buffers: Buffers) -> None:
        self.output = output
        self._buffers = buffers  # keeps the memory that the calls use
        self._arguments = torch.frombuffer(
            bytearray(b"".join(packed for _, packed in calls)), dtype=torch.int64
        ).clone()
        table, offset = [], 0
        for kernel, packed in calls:
            table += [kernel, self._arguments.data_ptr() + offset]
            offset += len(packed)
        self._table = torch.tensor(table)
        self._replay = native.function("inferd_replay")

    def replay(self) -> None:
        """Make every call again, in order."""
        self._replay(self._table.data_ptr(), len(self._table) // 2)


def record(run: Callable[[], Tensor], buffers: Buffers) -> Tape:
    """Run `run` and record the kernels that it calls.

    Its weights, inputs and other data must stay at their addresses. Raises `NotRecordableError` if it computes with
    anything but C++ kernels.
    """
    calls: list[tuple[int, bytes]] = []
    with _Watch(buffers), native.recorded(lambda kernel, packed: calls.append((kernel, packed))):
        output = run()
    if not calls:
        raise NotRecordableError("it calls no C++ kernel")
    assert output.is_contiguous()
    address, size = output.data_ptr(), output.numel() * output.element_size()
    kept = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=output.dtype).view(output.shape)
    return Tape(calls, kept, buffers)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch make tensors (in `buffers`) and views of them, and nothing else. An operation such as `contiguous`
    gives a view or a copy; the address shows which."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True would make torch 2.13 import its compiler, 900 modules in a second, and nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            return self._buffers.empty(args[0], given.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.empty_like.default:
            assert args[0].is_contiguous()
            return self._buffers.empty(args[0].shape, given.get("dtype") or args[0].dtype)
        if func.is_view:
            result = func(*args, **given)
            parts = [result] if isinstance(result, Tensor) else result
            if all(_memory(part) == _memory(args[0]) for part in parts):
                return result
        raise NotRecordableError(f"{func} is no C++ kernel")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
