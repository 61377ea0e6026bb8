"""The description of a quantized checkpoint: the format of each matrix, and the layout that a kernel gets from it.

A `Format` says which tensors hold a matrix in the files. A `Layout` says in which form a kernel multiplies by it. Many
formats share one layout. This file knows no names of config.json and no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

BLOCK = 128
"""Number of rows, and of columns, of a block of FP8 weights that share a scale."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of numbers that are not quantized, as safetensors headers name them."""


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """Numbers in e4m3. An output row has a scale, or each block of 128 x 128 has one."""

    has_blocks: bool = False
    has_input_scale: bool = False
    """Whether the checkpoint holds the scale of the activations."""

    kind: Literal["fp8"] = "fp8"

    def may_begin_at(self, row: int) -> bool:
        """Whether a stored matrix can become the rows from `row` on of a fused matrix."""
        return not self.has_blocks or row % BLOCK == 0


Layout = Fp8Layout


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the tensors that hold a matrix in a file."""

    suffix: str
    """End of the tensor's name, after the module's name and a dot."""
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Dtypes that the tensor may have, as safetensors headers name them."""
    has_free_axes: bool = False
    """Whether the file may add or leave out axes of size 1."""
    is_optional: bool = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        if not self.has_free_axes:
            return shape == self.shape
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]


class Format(Protocol):
    """One way in which files hold a matrix [out, in]."""

    @property
    def name(self) -> str:
        """Key of the reader in `engine/quant/checkpoints`."""
        ...

    @property
    def layout(self) -> Layout: ...

    def tensors(self, out_size: int, in_size: int) -> tuple[StoredTensor, ...]: ...

    def refuses(self, out_size: int, in_size: int) -> str | None:
        """Why a matrix of this shape cannot be stored so; None if it can."""
        ...


class Scales(StrEnum):
    """The part of an FP8 matrix that shares a scale."""

    TENSOR = "tensor"
    ROW = "channel"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Fp8:
    """e4m3 numbers in `weight`, and scales."""

    scales: Scales
    weight_scale: str
    """Name of the scales."""
    input_scale: str | None = None
    """Name of the one scale that calibration found for the matrix's activations; None if activations are quantized with
    scales found in each step."""
    name: Literal["fp8"] = "fp8"

    @property
    def layout(self) -> Fp8Layout:
        return Fp8Layout(self.scales is Scales.BLOCK, self.input_scale is not None)

    def tensors(self, out_size: int, in_size: int) -> tuple[StoredTensor, ...]:
        scales = {
            Scales.TENSOR: (1, 1),
            Scales.ROW: (out_size, 1),
            Scales.BLOCK: (-(-out_size // BLOCK), -(-in_size // BLOCK)),
        }
        found = [
            StoredTensor("weight", (out_size, in_size), ("F8_E4M3",)),
            StoredTensor(self.weight_scale, scales[self.scales], FLOATS, has_free_axes=True),
        ]
        if self.input_scale is not None:
            found.append(StoredTensor(self.input_scale, (1, 1), FLOATS, has_free_axes=True))
        return tuple(found)

    def refuses(self, out_size: int, in_size: int) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class Stored:
    """The formats of a checkpoint's matrices. None as a format: numbers that are not quantized."""

    layers: Format | None
    """Format of the matrices of attention and MLP."""
    head: Format | None = None
    """Format of the matrix of the logits, if it is no tied embedding."""
    exceptions: tuple[tuple[str, Format | None], ...] = ()
    """Formats of those modules of the layers that have another one than `layers`. Modules have the checkpoint's names,
    without `.weight`: `model.layers.0.mlp.down_proj`."""
