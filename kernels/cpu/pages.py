"""Memory for packed weights, in huge pages of 2 MiB, or of an earlier start.

A step reads the weights from end to end. The processor translates an address for each page, and its own prefetching
stops at the end of each. If the system gives no huge pages, plain ones take their place.

Tensors lie side by side in chunks, so a small matrix needs no page of its own. Pages take no memory before they are
written, so a chunk wastes less than one page. It is freed with the last of its tensors.

A `Keeper` may keep packed weights, and give them to a later process, which then packs nothing: it knows neither the
weights nor what was computed from them. So what packs weights makes every tensor by `filled` or `scratch`.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

PAGE_BYTES = 2 * 2**20
_CHUNK_BYTES = 256 * 2**20
"""Address space of a chunk, unless a tensor needs more."""
_CACHE_LINE_BYTES = 64
_CPU = torch.device("cpu")

Like = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each of several tensors."""


class _Chunks:
    """The chunk that tensors are cut from, one after another."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._next = 0

    def cut(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """(chunk, offset) of memory that begins on a cache line."""
        with self._lock:
            chunk = None if self._newest is None else self._newest()
            if chunk is None or self._next + num_bytes > len(chunk):
                chunk, self._next = _mapped(max(num_bytes, _CHUNK_BYTES))
                self._newest = weakref.ref(chunk)
            start = self._next
            self._next = _rounded_up(start + num_bytes, _CACHE_LINE_BYTES)
            return chunk, start

    @contextmanager
    def apart(self) -> Iterator[None]:
        with self._lock:
            kept = self._newest, self._next
            self._newest = None
        try:
            yield
        finally:
            with self._lock:
                self._newest, self._next = kept


_chunks = _Chunks()


class Keeper(Protocol):
    """Keeps packed weights, or gives back those that were kept."""

    def filled(self, size: int, dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
        """As the function `filled`."""
        ...

    def scratch(self, like: Like, fill: Callable[..., object], device: torch.device) -> list[Tensor]:
        """As the function `scratch`."""
        ...


_keeper: Keeper | None = None


def apart() -> AbstractContextManager[None]:
    """Tensors made meanwhile have a chunk of their own, which is freed with them."""
    return _chunks.apart()


def empty(size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A tensor [size] that begins on a cache line. Its content is undefined."""
    chunk, start = _chunks.cut(size * dtype.itemsize)
    return torch.frombuffer(chunk, dtype=dtype, count=size, offset=start)


@contextmanager
def kept_by(keeper: Keeper) -> Iterator[None]:
    """Have `keeper` make the tensors of `filled` and `scratch`."""
    global _keeper
    assert _keeper is None, "weights are kept already"
    _keeper = keeper
    try:
        yield
    finally:
        _keeper = None


def filled(size: int, dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
    """A tensor [size] of packed weights, as `fill` fills it, now or in an earlier process. Only `fill` may read what
    the weights are."""
    if _keeper is not None:
        return _keeper.filled(size, dtype, fill)
    made = empty(size, dtype)
    fill(made)
    return made


def copied(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of `values` in `dtype`, for packed weights."""
    return filled(values.numel(), dtype, lambda goal: goal.view(values.shape).copy_(values)).view(values.shape)


def scratch(like: Like, fill: Callable[..., object], device: torch.device = _CPU) -> list[Tensor]:
    """Tensors that `fill(*tensors)` computes from the weights. Only the `fill` of other tensors may read them."""
    if _keeper is not None:
        return _keeper.scratch(like, fill, device)
    made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in like]
    fill(*made)
    return made


def _mapped(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Memory of the system, and the offset of the first huge page in it."""
    mapping = mmap.mmap(-1, _rounded_up(num_bytes, PAGE_BYTES) + PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # the system has no huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % PAGE_BYTES


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
