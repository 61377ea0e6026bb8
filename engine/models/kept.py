"""Packed weights across starts: `PackedWatch` sees how a decoder's weights are packed, `Kept` gives them back.

A layer packs its weights when the last of its parameters is complete. In a later start it is given parameters of the
right shape without their values, runs the same code, and finds every packed tensor filled. Only parameters that it
keeps, or reads otherwise than to pack them, have their values. Both classes watch every operation: to read values that
are not there is an error, never a wrong result.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inferd.engine.api.weight_cache import Contents, Mapped, Parameter, Piece
from inferd.engine.layers import parameter
from inferd.kernels.cpu import native, pages

Parameters = Mapping[str, parameter.Parameter]
_ANY_CALL = "a C++ kernel was called with weights outside of pages.filled and pages.scratch"


class NotKeptError(RuntimeError):
    """A layer asks for something else than was kept. The message says for what."""


@dataclass(slots=True)
class _Seen:
    """Memory with weights, or with what was computed from them."""

    storage: StorageWeakRef
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_scratch: bool = False
    values: Tensor | None = None
    """A parameter's values, if something read them otherwise than to pack them."""

    def whole(self) -> Tensor | None:
        """The parameter, if something still refers to it."""
        if self.storage.expired():  # type: ignore[no-untyped-call]
            return None
        own = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return None if own is None else _of_storage(own, self)


def _of_storage(storage: torch.UntypedStorage, seen: _Seen) -> Tensor:
    flat = torch.empty(0, dtype=seen.dtype).set_(storage, 0, (math.prod(seen.shape),), (1,))
    return flat.view(seen.shape)


class PackedWatch:
    """Sees a decoder's weights while they are packed."""

    def __init__(self) -> None:
        self.failure = ""
        """Why the weights cannot be kept; empty if they can."""
        self._packed: list[Tensor] = []
        self._parameters: dict[str, _Seen] = {}
        self._by_address: dict[int, _Seen] = {}
        self._is_packing = False

    @contextmanager
    def watching(self, parameters: Parameters) -> Iterator[None]:
        """Record what becomes of these parameters while they are loaded."""
        for name, own in parameters.items():
            own.intercept(partial(self._take, name))
        with pages.kept_by(self), native.recorded(self._see_call):
            yield

    def contents(self, label: str) -> tuple[Contents, list[memoryview]]:
        """The packed tensors, then the parameters that something refers to or has read. Call it once all is loaded."""
        gc.collect()
        tensors, parameters = list(self._packed), []
        for name, seen in self._parameters.items():
            values = seen.whole() if seen.values is None else seen.values
            parameters.append(Parameter(name, None if values is None else len(tensors)))
            tensors += [] if values is None else [values]
        pieces = tuple(Piece(_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)
        contents = Contents(label=label, pieces=pieces, num_packed=len(self._packed), parameters=tuple(parameters))
        return contents, [_bytes(tensor) for tensor in tensors]

    def filled(self, size: int, dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
        made = pages.empty(size, dtype)
        with self._packing():
            fill(made)
        self._packed.append(made)
        return made

    def scratch(self, like: pages.Like, fill: Callable[..., object], device: torch.device) -> list[Tensor]:
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in like]
        with self._packing():
            fill(*made)
        for tensor in made:
            self._note(tensor, is_scratch=True)
        return made

    @contextmanager
    def _packing(self) -> Iterator[None]:
        was, self._is_packing = self._is_packing, True
        try:
            yield
        finally:
            self._is_packing = was

    def _take(self, name: str, data: Tensor, use: Callable[[Tensor], None]) -> None:
        self._parameters[name] = self._note(data)
        with _Watch(self._see):
            use(data)

    def _note(self, data: Tensor, *, is_scratch: bool = False) -> _Seen:
        storage = data.untyped_storage()
        seen = _Seen(StorageWeakRef(storage), tuple(data.shape), data.dtype, is_scratch)  # type: ignore[no-untyped-call]
        self._by_address[storage.data_ptr()] = seen
        return seen

    def _see(self, func: Any, tensors: Sequence[Tensor]) -> None:
        if self._is_packing:
            return
        for tensor in tensors:
            storage = tensor.untyped_storage()
            seen = self._by_address.get(storage.data_ptr())
            if seen is None or seen.storage.expired() or seen.values is not None:  # type: ignore[no-untyped-call]
                continue
            if seen.is_scratch:
                self.failure = self.failure or f"{func} reads what was computed from weights"
            else:
                values = _of_storage(storage, seen)
                seen.values = values.clone() if func._schema.is_mutable else values

    def _see_call(self, kernel: int, arguments: bytes) -> None:
        if not self._is_packing:
            self.failure = self.failure or _ANY_CALL


class Kept:
    """Gives back what an earlier process recorded."""

    def __init__(self, mapped: Mapped) -> None:
        self._mapped, self._contents = mapped, mapped.contents
        self._next = 0
        self._missing: list[Tensor] = []

    def fill(self, parameters: Parameters) -> None:
        """Complete all parameters. Raises `NotKeptError` if the layers ask for anything else than was kept. They are
        useless then."""
        with pages.kept_by(self), native.recorded(self._see_call), _Watch(self._see):
            for own in self._contents.parameters:
                if own.name not in parameters:
                    raise NotKeptError(f"there is no parameter {own.name}")
                give = self._without_values if own.piece is None else partial(self._piece, own.piece)
                parameters[own.name].give(give)
        if self._next != self._contents.num_packed:
            raise NotKeptError(f"{self._next} of {self._contents.num_packed} packed tensors were asked for")
        incomplete = [name for name, own in parameters.items() if own.missing_rows]
        if incomplete:
            raise NotKeptError(f"{', '.join(incomplete[:3])} have no values")

    def filled(self, size: int, dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
        number, self._next = self._next, self._next + 1
        if number >= self._contents.num_packed:
            raise NotKeptError(f"only {number} packed tensors were kept")
        return self._piece(number, (size,), dtype)

    def scratch(self, like: pages.Like, fill: Callable[..., object], device: torch.device) -> list[Tensor]:
        return [self._without_values(shape, dtype) for shape, dtype in like]

    def _without_values(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that nothing may read. All of them share memory that is never touched, so it takes no page."""
        size = math.prod(shape) * dtype.itemsize
        if not self._missing or size > self._missing[-1].numel():
            self._missing.append(torch.empty(2 * size, dtype=torch.uint8))
        return self._missing[-1][:size].view(dtype).view(shape)

    def _piece(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        known = self._contents.pieces[number]
        if (known.dtype, known.shape) != (_name(dtype), shape):
            raise NotKeptError(f"{_name(dtype)} {shape} is asked for, and {known.dtype} {known.shape} was kept")
        flat = torch.frombuffer(
            self._mapped.pages, dtype=dtype, count=math.prod(shape), offset=self._mapped.offsets[number]
        )
        return flat.view(shape)

    def _see(self, func: Any, tensors: Sequence[Tensor]) -> None:
        missing = {tensor.data_ptr() for tensor in self._missing}
        if any(tensor.untyped_storage().data_ptr() in missing for tensor in tensors):
            raise NotKeptError(f"{func} reads values that were not kept")

    def _see_call(self, kernel: int, arguments: bytes) -> None:
        raise NotKeptError(_ANY_CALL)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each operation to `see` before it runs, unless it only makes a view."""

    def __init__(self, see: Callable[[Any, Sequence[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._show = see

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True would make torch 2.13 import its compiler, 900 modules in a second, and nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if not func.is_view:
            self._show(func, [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)])
        return func(*args, **given)


def _bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(flat)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
