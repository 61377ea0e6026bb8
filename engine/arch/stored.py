"""The types that describe a quantized checkpoint: the format of each matrix, and the layout that a kernel gets from it.

A `Format` says which tensors hold a matrix in the files. A `Layout` says in which form a kernel multiplies by it. Many
formats share one layout. This file knows no names of config.json and no tensor library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

BLOCK = 128
"""Number of rows, and of columns, of a block of FP8 weights that share a scale."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of numbers that are not quantized, as safetensors headers name them."""

GROUP_SIZES = (16, 32, 64, 128)
"""Numbers of inputs that may share a scale in a kernel. The other choice is one scale for a whole row."""


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """Numbers in e4m3. An output row has a scale, or each block of 128 x 128 has one."""

    has_blocks: bool = False
    has_input_scale: bool = False
    """Whether the checkpoint holds the scale of the activations."""

    @property
    def kind(self) -> Literal["fp8"]:
        return "fp8"

    def may_begin_at(self, row: int) -> bool:
        """Whether a stored matrix can become the rows from `row` on of a fused matrix."""
        return not self.has_blocks or row % BLOCK == 0


@dataclass(frozen=True, slots=True)
class IntLayout:
    """Integers of 2 to 8 bits, with a scale for each group of inputs of an output row."""

    bits: Literal[2, 3, 4, 5, 6, 8]
    """5 in groups of 32 inputs; 2, 3 and 6 in groups of 16. 2 bits have scales and minimums of 4 bits, with factors."""
    group_size: int | None
    """Number of inputs that share a scale; None: an output row has one scale."""
    scale_dtype: str
    """Dtype of the scales, as safetensors headers name it."""
    offsets: Literal["none", "zeros", "minimums"] = "none"
    """The part of a weight beside scale x integer: none, -zero point x scale, or a minimum in the scales' dtype."""
    table: Literal["centred", "e2m1", "iq4nl"] = "centred"
    """The 16 values of a number of 4 bits."""
    has_order: bool = False
    """Whether the inputs of a group may be any inputs."""
    block_size: int | None = None
    """Number of inputs whose groups share a factor of `scale_dtype`: then scales and minimums are signed bytes, and
    minimums have a factor too. None: scales and minimums have that dtype themselves."""
    declares_activations: bool = False
    """Whether the checkpoint declares activations of 8 bits with one scale a token, as the writer tried the model."""

    @property
    def on_gpu(self) -> IntLayout:
        """The layout that the kernels of a GPU take: integers of 4 or 8 bits, and no factors."""
        bits: Literal[4, 8] = 4 if self.kind == "int4" else 8
        scale_dtype = self.scale_dtype if self.block_size is None else "F32"
        return replace(self, bits=bits, scale_dtype=scale_dtype, block_size=None)

    @property
    def kind(self) -> Literal["int4", "int8"]:
        return "int4" if self.bits <= 4 else "int8"

    def may_begin_at(self, row: int) -> bool:
        return True


Layout = Fp8Layout | IntLayout


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

    def found(self, dtypes: Mapping[str, str]) -> Format:
        """The same format with what config.json does not say: the dtypes of a matrix's tensors, by their suffixes."""
        ...


def is_in_blocks(form: Format) -> bool:
    """Whether blocks of 128 x 128 weights share a scale."""
    return isinstance(form.layout, Fp8Layout) and form.layout.has_blocks


FormatOf = Callable[[str], Format | None]
"""Gives the format of a module by the checkpoint's name for it; None for numbers that are not quantized."""


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
    embedding: Format | None = None
    shares_head: bool = False
    """Whether the head is the tensor of the embedding, so that one matrix can be both."""

    @classmethod
    def of(cls, formats: Mapping[str, Format | None], head: Format | None) -> Stored:
        """From the format of each module of the layers."""
        counts = Counter(form for form in formats.values() if form is not None)
        most = counts.most_common(1)[0][0] if counts else None
        return cls(most, head, tuple((module, form) for module, form in formats.items() if form != most))
