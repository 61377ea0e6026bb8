"""A CPU device with the rules of CUDA graphs, for tests of recorded steps.

It records the operations of torch and C++ kernels with the tensors that they were given, and repeats them without the
Python code around them. A replay does not see data at other addresses than in the capture, or on the host. It finds
memory that was allocated during the capture full of NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.waiting import waits
from inferd.engine.worker.device import CpuDevice, HostCopy, Recording
from inferd.kernels.cpu import native
from inferd.kernels.cpu.tape import NotRecordableError

_WARM_UP_RUNS = 2
_POISON = {torch.float64: float("nan"), torch.float32: float("nan"), torch.bfloat16: float("nan"), torch.bool: True}
_POISONED_INTEGER = 99

Kernel = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class CapturingDevice(CpuDevice):
    """The CPU as a GPU: it pads, records whole steps, and copies results while the next step runs."""

    row_buckets: Sequence[int] = (1, 2, 4, 7)
    token_buckets: Sequence[int] = (4, 9, 24)
    records_all = True

    def __init__(self) -> None:
        super().__init__(1)
        self.events: list[str] = []
        """Requests of the worker to the device, in order."""
        self.is_busy = False
        """Whether the device is inside one of its own calls. Operations outside of them were launched by the worker."""

    @contextmanager
    def doing(self, event: str) -> Iterator[None]:
        self.events.append(event)
        self.is_busy = True
        yield
        self.is_busy = False

    def to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        with self.doing("to device"):
            return super().to_device(values, dtype)

    def write(self, goal: Tensor, values: Sequence[int]) -> None:
        with self.doing("write"):
            super().write(goal, values)

    def copy_to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        with self.doing(f"copy {len(tensors)}"):
            return super().copy_to_host([tensor.clone() for tensor in tensors])

    def record(self, run: Callable[[], Tensor]) -> Recording:
        capture = _Capture()
        for _ in range(_WARM_UP_RUNS):
            run()
        with capture, native.recorded(capture.keep_kernel):
            output = run()
        graph = _Graph(self, capture, output)
        graph.replay()
        self.events[-1] = "record"
        return graph


class _Graph:
    def __init__(self, device: CapturingDevice, capture: _Capture, output: Tensor) -> None:
        self._device, self._capture, self.output = device, capture, output

    def replay(self) -> None:
        with self._device.doing("replay"):
            poison(self._capture.taken)
            for call in self._capture.calls:
                call()


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []
        self.taken: list[Tensor] = []
        """Memory that belongs to the recording."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, torch would import its compiler."""
        return False

    def keep_kernel(self, address: int, packed: bytes) -> None:
        kernel = Kernel(address)
        self.calls.append(lambda: kernel(packed))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if waits(func, args, given):
            raise NotRecordableError(f"{func} waits for the device")
        if func is torch.ops.aten.lift_fresh.default:
            raise NotRecordableError("host memory is gone when a recording is replayed")
        results = func(*args, **given)
        made = tensors_in(results)
        addresses = {_memory(tensor) for tensor in tensors_in((args, given))}
        self.taken += [tensor for tensor in made if _memory(tensor) not in addresses]
        if not func.name().startswith("aten::empty"):
            self.calls.append(lambda: again(func, args, given, made))
        return results


def poison(tensors: Sequence[Tensor]) -> None:
    """Fill memory with numbers that no result may hold."""
    for tensor in tensors:
        tensor.fill_(_POISON.get(tensor.dtype, _POISONED_INTEGER))


def again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]) -> None:
    """Repeats the operation into the memory of the first run's results."""
    for kept, result in zip(made, tensors_in(func(*args, **kwargs)), strict=True):
        if _memory(kept) != _memory(result):
            kept.copy_(result)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in tuples, lists and mappings of some depth."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for part in tree for tensor in tensors_in(part)]


def _memory(tensor: Tensor) -> int:
    """Addresses of the tensor's memory. A packed weight does not tell its own."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()
