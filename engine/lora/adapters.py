"""The LoRA adapters of one decoder: their weights, and which adapter each slot has.

`engine/api/adapter` checks an adapter's files, whose weights are read here. A step's rows find their adapters by their
slots, so that a recorded step holds for any adapters. Steps in which no row has one do not compute with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferd.engine.api.adapter import WEIGHTS, read_adapter
from inferd.engine.api.errors import ModelError
from inferd.engine.api.pinned_files import source_of
from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import weights
from inferd.kernels.ops.lora import LoraWeights, add_lora


@dataclass(frozen=True, slots=True)
class Update:
    """Weights that an adapter adds to one module: scale * B A."""

    matrix: str
    """Our matrix that holds the module: `layers.0.attention.qkv`."""
    part: int
    """Number of the matrix's modules before this one."""
    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scale: float


def read_updates(path: Path, digest: str, arch: Arch, max_rank: int) -> list[Update]:
    """Raises `ModelError` if the files are not those that `digest` was made from, or hold NaN or infinities."""
    files, updates = read_adapter(path, arch, max_rank), list[Update]()
    modules = weights(arch).modules()
    if files.digest != digest:
        raise ModelError(f"the adapter in {path} has changed since it was loaded: unload it, and load it again")
    try:
        with safe_open(source_of(path / WEIGHTS), framework="pt") as tensors:
            for low in files.updates:
                a, b = (tensors.get_tensor(name) for name in (low.a, low.b))
                for name, tensor in ((low.a, a), (low.b, b)):
                    if not tensor.isfinite().all():
                        raise ModelError(
                            f"{path / WEIGHTS}: {name} must hold finite numbers, but holds NaN or infinity"
                        )
                row_order = modules[low.matrix][low.part].row_order
                b = b if row_order is None else b[row_order.order(len(b))]
                updates.append(Update(low.matrix, low.part, a, b, low.scale))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path / WEIGHTS} cannot be read: {error}") from error
    return updates


_NONE = -1
"""Index of the adapter of a slot without one."""

Empty = Callable[[Sequence[int], torch.dtype], Tensor]


class Adapters:
    """Space for some adapters of one model, by index, and for their use by some slots."""

    matrices: Mapping[str, MatrixLora]
    """By the names of our matrices: `layers.0.attention.qkv`."""

    def __init__(
        self, weights: Mapping[str, LoraWeights], max_rank: int, num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        """`weights`: space for the weights of each matrix."""
        self.max_rank = max_rank
        self.matrices = {matrix: MatrixLora(self, own) for matrix, own in weights.items()}
        self.of_slot = torch.full((num_slots,), _NONE, dtype=torch.int64, device=device)
        """[slots]: index of the adapter of each slot's request."""
        self.token_slots: Tensor | None = None
        """[T]: slot of each token of the step that is being computed, if one of them has an adapter."""
        self._index_of: dict[int, int] = {}
        """Slot -> index of its adapter, of slots that have one."""

    @classmethod
    def allocate(
        cls,
        arch: Arch,
        num_adapters: int,
        max_rank: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        empty: Empty | None = None,
    ) -> Adapters:
        """Space for so many adapters, in `dtype`. `empty` makes large tensors."""
        space = {
            matrix: LoraWeights.empty(
                num_adapters, max_rank, own[0].in_size, [module.out_size for module in own], dtype, device, empty
            )
            for matrix, own in weights(arch).modules().items()
        }
        return cls(space, max_rank, num_slots, device)

    def put(self, index: int, updates: Iterable[Update]) -> None:
        """Give the adapter of this index its weights. No row of a later step may need those it had."""
        for matrix in self.matrices.values():
            matrix.weights.clear(index)
        for update in updates:
            self.matrices[update.matrix].weights.put(index, update.part, update.a, update.b, update.scale)

    def assign(self, slot: int, index: int | None) -> None:
        """Have the rows of a slot use this adapter; None: no adapter."""
        if self._index_of.get(slot) == index:
            return
        if index is None:
            del self._index_of[slot]
        else:
            self._index_of[slot] = index
        self.of_slot[slot] = _NONE if index is None else index

    def has_any(self, slots: Iterable[int]) -> bool:
        """Whether one of these slots has an adapter."""
        return bool(self._index_of) and any(slot in self._index_of for slot in slots)

    @contextmanager
    def used_by(self, token_slots: Tensor) -> Iterator[None]:
        """Compute a step of tokens in these slots, negative for padding."""
        self.token_slots = token_slots
        try:
            yield
        finally:
            self.token_slots = None


class MatrixLora:
    """The updates of one matrix by all adapters."""

    def __init__(self, adapters: Adapters, weights: LoraWeights) -> None:
        self._adapters, self.weights = adapters, weights

    @property
    def is_used(self) -> bool:
        """Whether a row of the step has an adapter."""
        return self._adapters.token_slots is not None

    def add(self, y: Tensor, x: Tensor) -> None:
        """Add to y [T, out] what the rows' adapters give for x [T, in], in place. Only if `is_used`."""
        token_slots = self._adapters.token_slots
        assert token_slots is not None
        add_lora(y, x, self.weights, token_slots, self._adapters.of_slot)
