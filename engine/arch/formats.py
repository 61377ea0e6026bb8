"""The formats of quantized matrices in safetensors: their tensors, and the layouts that they become.

K is the number of inputs, N of outputs, G of inputs in a group. `engine/quant/checkpoints` unpacks the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, Self

from inferd.engine.arch.stored import BLOCK, FLOATS, GROUP_SIZES, Fp8Layout, IntLayout, StoredTensor

_SCALES = ("BF16", "F16", "F32")
_MAX_GROUP = GROUP_SIZES[-1]
_WORD_BITS = 32
_UNIT = 32
"""Number of inputs that kernels compute at once."""
_MAX_INPUTS = 65536


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

    @property
    def name(self) -> str:
        return "fp8"

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

    def found(self, dtypes: Mapping[str, str]) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class _Integers:
    """Base of the formats of integers with scales for groups of inputs."""

    bits: Literal[4, 8]
    group_size: int | None
    """One of `GROUP_SIZES`, or a multiple of the largest; None: an output row has one scale."""
    is_symmetric: bool
    has_order: bool = False
    """Whether a group's inputs may be any inputs: act-order."""
    scale_dtype: str = "F16"
    declares_activations: bool = False
    """Whether activations are declared to have 8 bits and one scale a token, found in each step."""

    @property
    def layout(self) -> IntLayout:
        has_rows = self.bits == 8 and self.group_size is None and self.is_symmetric
        return IntLayout(
            self.bits,
            self.group_size if self.group_size is None else min(self.group_size, _MAX_GROUP),
            self.scale_dtype,
            "none" if self.is_symmetric else "zeros",
            has_order=self.has_order,
            declares_activations=self.declares_activations and has_rows,
        )

    def refuses(self, out_size: int, in_size: int) -> str | None:
        size = self.group_size
        if size is not None and in_size % size:
            return f"cannot be stored in groups of {size} inputs: {in_size % size} inputs are left over"
        if in_size % _UNIT:
            return f"has {in_size} inputs, which must be a multiple of {_UNIT}"
        if in_size > _MAX_INPUTS:
            return f"has {in_size} inputs, and the sum of more than {_MAX_INPUTS} may not fit 32 bits"
        return None

    def num_groups(self, in_size: int) -> int:
        return 1 if self.group_size is None else in_size // self.group_size


def _words(num_values: int, bits: int) -> int:
    """Number of 32-bit words that hold so many packed values."""
    return -(-num_values * bits // _WORD_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackQuantized(_Integers):
    """compressed-tensors `pack-quantized`: integers along the inputs of a row in words, 2^(bits - 1) added to each."""

    has_tensor_scale: bool = False
    """Whether the whole matrix has one scale."""

    @property
    def name(self) -> str:
        return "pack-quantized"

    def tensors(self, out_size: int, in_size: int) -> tuple[StoredTensor, ...]:
        num_groups, num_rows = self.num_groups(in_size), 1 if self.has_tensor_scale else out_size
        found = [
            StoredTensor("weight_packed", (out_size, _words(in_size, self.bits)), ("I32",)),
            StoredTensor("weight_scale", (num_rows, num_groups), _SCALES, has_free_axes=True),
            StoredTensor("weight_shape", (2,), ("I64", "I32"), is_optional=True),
            StoredTensor("weight_g_idx", (in_size,), ("I32", "I64"), is_optional=not self.has_order),
        ]
        if not self.is_symmetric:
            found.append(StoredTensor("weight_zero_point", (_words(num_rows, self.bits), num_groups), ("I32",)))
        return tuple(found)

    def found(self, dtypes: Mapping[str, str]) -> Self:
        return replace(self, scale_dtype=dtypes.get("weight_scale", self.scale_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class IntQuantized(_Integers):
    """compressed-tensors `int-quantized`: integers in bytes, also those of 4 bits."""

    has_tensor_scale: bool = False
    """Whether the whole matrix has one scale."""

    @property
    def name(self) -> str:
        return "int-quantized"

    def tensors(self, out_size: int, in_size: int) -> tuple[StoredTensor, ...]:
        scales = (1 if self.has_tensor_scale else out_size, self.num_groups(in_size))
        found = [
            StoredTensor("weight", (out_size, in_size), ("I8",)),
            StoredTensor("weight_scale", scales, _SCALES, has_free_axes=True),
            StoredTensor("input_scale", (1,), FLOATS, has_free_axes=True, is_optional=True),
            StoredTensor("input_zero_point", (1,), ("I8", *FLOATS), has_free_axes=True, is_optional=True),
        ]
        if not self.is_symmetric:
            found.append(StoredTensor("weight_zero_point", scales, ("I8",), has_free_axes=True))
        return tuple(found)

    def found(self, dtypes: Mapping[str, str]) -> Self:
        return replace(self, scale_dtype=dtypes.get("weight_scale", self.scale_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(_Integers):
    """GPTQ: unsigned integers along the inputs in words, and all tensors transposed."""

    is_v2: bool
    """Whether zero points are stored as they are. Version 1 stores them less 1."""

    @property
    def name(self) -> str:
        return "gptq"

    def tensors(self, out_size: int, in_size: int) -> tuple[StoredTensor, ...]:
        num_groups = self.num_groups(in_size)
        return (
            StoredTensor("qweight", (_words(in_size, self.bits), out_size), ("I32",)),
            StoredTensor("qzeros", (num_groups, _words(out_size, self.bits)), ("I32",)),
            StoredTensor("scales", (num_groups, out_size), _SCALES),
            StoredTensor("g_idx", (in_size,), ("I32", "I64"), is_optional=not self.has_order),
            StoredTensor("bias", (out_size,), FLOATS, is_optional=True),
        )

    def found(self, dtypes: Mapping[str, str]) -> Self:
        return replace(self, scale_dtype=dtypes.get("scales", self.scale_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(_Integers):
    """AutoAWQ's GEMM packing: unsigned integers along the outputs in words, in an order of their own."""

    bits: Literal[4, 8] = 4

    @property
    def name(self) -> str:
        return "awq"

    def refuses(self, out_size: int, in_size: int) -> str | None:
        per_word = _WORD_BITS // self.bits
        if out_size % per_word:
            return f"has {out_size} outputs, which must be a multiple of {per_word} in AWQ's packing"
        return _Integers.refuses(self, out_size, in_size)

    def tensors(self, out_size: int, in_size: int) -> tuple[StoredTensor, ...]:
        num_groups, num_words = self.num_groups(in_size), _words(out_size, self.bits)
        return (
            StoredTensor("qweight", (in_size, num_words), ("I32",)),
            StoredTensor("qzeros", (num_groups, num_words), ("I32",), is_optional=self.is_symmetric),
            StoredTensor("scales", (num_groups, out_size), _SCALES),
            StoredTensor("bias", (out_size,), FLOATS, is_optional=True),
        )

    def found(self, dtypes: Mapping[str, str]) -> Self:
        return replace(self, scale_dtype=dtypes.get("scales", self.scale_dtype))


@dataclass(frozen=True, slots=True)
class Fp4:
    """Numbers of 4 bits in e2m1, two in a byte. MXFP4 has a power of two for 32 inputs. NVFP4 has an e4m3 scale for 16
    inputs, and one scale for the matrix."""

    weight: str = "weight_packed"
    """Name of the numbers."""
    global_scale: str | None = None
    """Name of the scale of an NVFP4 matrix; None: the matrix is in MXFP4."""
    is_divisor: bool = False
    """Whether weights are divided by the matrix's scale."""

    @property
    def name(self) -> str:
        return "fp4"

    @property
    def group_size(self) -> int:
        return 32 if self.global_scale is None else 16

    @property
    def layout(self) -> IntLayout:
        return IntLayout(4, self.group_size, "BF16" if self.global_scale is None else "F32", table="e2m1")

    def tensors(self, out_size: int, in_size: int) -> tuple[StoredTensor, ...]:
        groups = (out_size, in_size // self.group_size)
        found = [StoredTensor(self.weight, (out_size, in_size // 2), ("U8",))]
        if self.global_scale is None:
            return (*found, StoredTensor("weight_scale", groups, ("U8", "F8_E8M0")))
        return (
            *found,
            StoredTensor("weight_scale", groups, ("F8_E4M3",)),
            StoredTensor(self.global_scale, (1,), ("F32",), has_free_axes=True),
            *(
                StoredTensor(name, (1,), ("F32",), has_free_axes=True, is_optional=True)
                for name in ("input_global_scale", "input_scale")
            ),
        )

    def refuses(self, out_size: int, in_size: int) -> str | None:
        left = in_size % self.group_size
        return f"cannot be stored in groups of {self.group_size} inputs: {left} inputs are left over" if left else None

    def found(self, dtypes: Mapping[str, str]) -> Self:
        return self
