"""Modes of torch that make tensors of the CPU look like tensors of a recorded GPU, and see every operation on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.waiting import waits
from tests.cpu.capturing import tensors_in
from tests.cpu.recorded_gpu.memory import Memory
from tests.cpu.recorded_gpu.order import Work

if TYPE_CHECKING:
    from tests.cpu.recorded_gpu.device import RecordedGpu

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
_PRODUCTS = ("mm", "addmm", "bmm", "linear", "_linear_pointwise")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
_KNOWS_SHAPES_ALONE = ("empty", "new_empty")

Args = Sequence[Any]
Kwargs = dict[str, Any]


class Placing(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """Puts tensors that are made for the GPU, and pinned ones, into memory of the CPU, and says where tensors are."""

    def __init__(self, gpu: RecordedGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if self._gpu.local.is_off:
            return func(*args, **given)
        special = _SPECIAL.get(func)
        return _placed(self._gpu, func, args, given) if special is None else special(self._gpu, func, args, given)


def _placed(gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> Any:
    """A function that may name a device."""
    device, is_pinned = given.get("device"), given.pop("pin_memory", False)
    if device is not None:
        given["device"] = HOST
    for index, value in enumerate(args):
        if isinstance(value, torch.device):
            device, args = value, [*args[:index], HOST, *args[index + 1 :]]
    if device is None and not is_pinned:
        return func(*args, **given)
    place = "pinned" if is_pinned else "host" if torch.device(device).type == "cpu" else "device"
    with gpu.making(place):
        result = func(*args, **given)
    if place != "host":
        for tensor in tensors_in(result):
            if gpu.memories.of(tensor) is None:
                gpu.allocated(tensor, is_pinned=is_pinned)
    return result


def _from_values(gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> Any:
    """`torch.tensor`: torch makes the tensor on the host and copies it."""
    device = torch.device(given.pop("device", None) or HOST)
    made = _placed(gpu, func, args, given)
    return made if device.type == "cpu" else _moved(gpu, made, to_device=True)


def _moved(gpu: RecordedGpu, tensor: Tensor, *, to_device: bool, non_blocking: bool = False) -> Tensor:
    if gpu.is_on_device(tensor) == to_device:
        return tensor
    with gpu.making("device" if to_device else "host"):
        moved = torch.empty_like(tensor)
    return moved.copy_(tensor, non_blocking=non_blocking)


def _to(gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> Tensor:
    tensor, others = args[0], list(args[1:])
    device = given.pop("device", None)
    if others and isinstance(others[0], (str, torch.device)):
        device = others.pop(0)
    elif others and isinstance(others[0], Tensor):
        other = others.pop(0)
        device, given["dtype"] = DEVICE if gpu.is_on_device(other) else HOST, other.dtype
    if device is not None:
        is_pending = bool(given.get("non_blocking"))
        tensor = _moved(gpu, tensor, to_device=torch.device(device).type == "cuda", non_blocking=is_pending)
    given.pop("non_blocking", None)
    result: Tensor = func(tensor, *others, **given) if others or given else tensor
    return result


def _pinned(gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> Tensor:
    with gpu.making("pinned"):
        pinned = torch.empty_like(args[0])
    return pinned.copy_(args[0])


def _set(gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> Any:
    """`goal[key] = value`: torch makes a tensor on the device of a number."""
    goal, key, value = args
    if gpu.is_on_device(goal) and isinstance(value, (bool, int, float)):
        with gpu.making("device"):
            value = torch.full((), value, dtype=goal.dtype)
    return func(goal, key, value)


def _copies(gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> None:
    """Many copies in one call, which torch makes one by one between the host and the device."""
    for goal, source in zip(args[0], args[1], strict=True):
        goal.copy_(source, **given)


def _product(gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> Any:
    """`torch.mm`, of which the CPU has no form with wider results."""
    dtype = given.pop("out_dtype", None)
    return func(*(x if dtype is None else x.to(dtype) for x in args), **given)


def _read(gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> Any:
    """A function that gives the host the values of a tensor."""
    memory = gpu.memories.of(args[0])
    if memory is not None and memory.is_pinned:
        gpu.host_accesses(memory, is_write=False)
    elif memory is not None:
        gpu.waits(f"the host reads {memory.label}", gpu.streams.clock(gpu.current))
        gpu.touch(memory, gpu.queue("a read by the host"), is_read=True, is_write=False)
    return func(*args, **given)


_SPECIAL: dict[Any, Callable[[RecordedGpu, Any, Args, Kwargs], Any]] = {
    Tensor.device.__get__: lambda gpu, func, args, given: DEVICE if gpu.is_on_device(args[0]) else HOST,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda gpu, func, args, given: gpu.is_on_device(args[0]),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda gpu, func, args, given: not gpu.is_on_device(args[0]),  # type: ignore[attr-defined]
    Tensor.is_pinned: lambda gpu, func, args, given: getattr(gpu.memories.of(args[0]), "is_pinned", False),
    Tensor.pin_memory: _pinned,
    Tensor.to: _to,
    Tensor.cpu: lambda gpu, func, args, given: _moved(gpu, args[0], to_device=False),
    Tensor.cuda: lambda gpu, func, args, given: _moved(gpu, args[0], to_device=True),
    Tensor.__setitem__: _set,
    Tensor.tolist: _read,
    Tensor.numpy: _read,
    torch.device: lambda gpu, func, args, given: func(*args, **given),
    torch._foreach_copy_: _copies,
    torch.mm: _product,
    torch.tensor: _from_values,
    torch.as_tensor: _from_values,
}


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, and gives those of the GPU to its current stream."""

    def __init__(self, gpu: RecordedGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, torch would import its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        gpu, given = self._gpu, dict(kwargs or {})
        if gpu.local.is_off:
            return func(*args, **given)
        call, making = _Call(gpu, func, args, given), gpu.local.making
        is_on_device = making == "device" if making else call.is_on_device or gpu.local.kernel is not None
        return call.on_device() if is_on_device else call.on_host()


class _Call:
    """One operation of torch."""

    def __init__(self, gpu: RecordedGpu, func: Any, args: Args, given: Kwargs) -> None:
        self._gpu, self._func, self._args, self._given = gpu, func, args, given
        self.name: str = func.name().removeprefix("aten::").split(".")[0]
        self._tensors = tensors_in((args, given))
        self._memories = [gpu.memories.of(tensor) for tensor in self._tensors]
        self.is_on_device = any(memory is not None and not memory.is_pinned for memory in self._memories)

    def on_host(self) -> Any:
        for memory, _, is_write in self._accesses():
            if memory.is_pinned:
                self._gpu.host_accesses(memory, is_write=is_write)
        result = self._func(*self._args, **self._given)
        if self._gpu.local.making == "pinned":
            for tensor in self._fresh(result):
                self._gpu.allocated(tensor, is_pinned=True)
        return result

    def on_device(self) -> Any:
        gpu = self._gpu
        if gpu.local.kernel is None and gpu.local.making is None:
            self._check_places()
            if self.name == "copy_" and not all(m is not None and not m.is_pinned for m in self._memories[:2]):
                return self._copy_between()
            if waits(self._func, self._args, self._given):
                gpu.waits(f"{self.name} asks for values", gpu.streams.clock(gpu.current))
        capture, accesses = gpu.my_capture, self._accesses()
        if capture is not None and self.name == "lift_fresh":
            gpu.fault("a kernel reads memory of the host, which is gone when its graph is replayed")
        result = self._func(*self._args, **self._given)
        fresh = self._fresh(result)
        if not fresh and not any(is_write for *_, is_write in accesses) and self._func.is_view:
            return self._keep(result, fresh)
        allocated = [gpu.allocated(tensor, is_pinned=False) for tensor in fresh]
        if self.name.startswith(_KNOWS_SHAPES_ALONE):
            with gpu.off():
                gpu.fill(fresh)
        if not self.name.startswith(_KNOWS_SHAPES_ALONE):
            work = gpu.queue(gpu.local.kernel or self.name)
            self._touch(work, [*accesses, *((memory, False, True) for memory in allocated)])
        return self._keep(result, fresh)

    def _touch(self, work: Work, accesses: Sequence[tuple[Memory, bool, bool]]) -> None:
        for memory, is_read, is_write in accesses:
            self._gpu.touch(memory, work, is_read=is_read, is_write=is_write)

    def _keep(self, result: Any, fresh: Sequence[Tensor]) -> Any:
        """Keep the operation for replays, if there is a capture."""
        capture = self._gpu.my_capture
        if capture is not None:
            capture.has_products |= self.name in _PRODUCTS
            capture.keep(self._func, self._args, self._given, tensors_in(result), fresh)
        return result

    def _check_places(self) -> None:
        """A fault if tensors of the host and of the device meet. Numbers may, and torch copies indices."""
        gpu = self._gpu
        if self.name == "copy_":
            return
        for tensor, memory in zip(self._tensors, self._memories, strict=True):
            if tensor.is_mkldnn or (memory is not None and not memory.is_pinned):
                continue
            if self.name in _INDEXED and any(tensor is index for index in tensors_in(self._args[1])):
                gpu.waits("an index of the host is copied to the device", gpu.streams.clock(gpu.current))
            elif tensor.dim():
                gpu.fault(f"{self.name} of tensors on the device and on the host ({list(tensor.shape)})")

    def _copy_between(self) -> Any:
        """A copy between the host and the device, by the rules of torch's `copy_kernel_cuda`."""
        gpu, (goal, source), (to, origin) = self._gpu, self._args[:2], self._memories[:2]
        is_pending = bool(self._given.get("non_blocking") or (len(self._args) > 2 and self._args[2]))
        is_upload = to is not None and not to.is_pinned
        on_host = source if is_upload else goal
        pinned = origin if is_upload else to
        if is_upload and (source.dtype != goal.dtype or not source.is_contiguous()):
            pinned = None  # torch converts it on the host, into memory that is not pinned
        if pinned is None:
            gpu.refuse_in_capture("a copy of memory of the host that is not pinned")
        if gpu.my_capture is not None and not is_pending:
            gpu.fault("the host waits for a copy within a capture")
        work = gpu.queue("a copy to the device" if is_upload else "a copy to the host")
        self._touch(work, [(m, r, w) for m, r, w in self._accesses() if not m.is_pinned or pinned is m])
        if pinned is None or not is_pending:
            gpu.waits(
                f"a copy of {'pageable ' * (pinned is None)}memory of the host, {list(on_host.shape)}",
                gpu.streams.clock(gpu.current),
            )
        result = self._func(*self._args, **self._given)
        return self._keep(result, ())

    def _accesses(self) -> list[tuple[Memory, bool, bool]]:
        """(memory, whether it is read, whether it is written) of the arguments."""
        found, gpu = list[tuple[Memory, bool, bool]](), self._gpu
        reads_shapes = self.name.startswith(("empty", "new_")) or self.name.endswith("_like")
        only_writes = self.name in ("copy_", "fill_", "zero_")
        for argument, value in self._arguments():
            alias = argument.alias_info
            is_write = alias is not None and alias.is_write
            if not is_write and (reads_shapes or (alias is not None and self._func.is_view)):
                continue
            is_read = not (is_write and (only_writes or argument.is_out))
            for tensor in tensors_in(value):
                memory = gpu.memories.of(tensor)
                if memory is not None:
                    found.append((memory, is_read, is_write))
        return found

    def _arguments(self) -> Iterator[tuple[Any, Any]]:
        arguments = self._func._schema.arguments
        yield from zip(arguments, self._args, strict=False)
        for argument in arguments[len(self._args) :]:
            if argument.name in self._given:
                yield argument, self._given[argument.name]

    def _fresh(self, result: Any) -> list[Tensor]:
        """The results that are new memory."""
        old = {tensor.untyped_storage()._cdata for tensor in self._tensors if not tensor.is_mkldnn}
        made = [tensor for tensor in tensors_in(result) if not tensor.is_mkldnn]
        return [tensor for tensor in made if tensor.untyped_storage()._cdata not in old]
