"""Formats of weights, K and V: the dtypes, the quantized formats, and which matrices use them. Only this file says it.

Knows no model: a matrix is rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from inferd.engine.api.memory.formula import NOTHING, Formula, term
from inferd.engine.arch.stored import Fp8Layout, Layout

Quantization = Literal["none", "fp8", "int8", "int4"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

KVPrecision = Literal["auto", "fp8", "int8"]
"""Formats of K and V: the dtype, or one of `KV_FORMATS`."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """Format of a quantized matrix [out, in]: small numbers, and a scale for each group of them."""

    bits: int
    group_size: int | None
    """Number of inputs that share a scale; None: one scale for each output row."""
    scale_bytes: int
    max_inputs: int | None = None
    """Most inputs whose products can be summed in 32 bits; None: no such limit."""
    group_rows: int = 1
    """Number of output rows that share the scales of their groups."""
    offset_bytes: int = 0
    """Bytes of a group's zero point or minimum."""
    block_size: int | None = None
    """Number of inputs whose groups share factors; None: there are none."""
    block_bytes: int = 0
    """Bytes of the factors of a block."""
    column_bytes: int = 0
    """Bytes that each column takes once: its place in an order."""

    remainder: Literal["refused", "short group", "one group"] = "refused"
    """The way of a row whose inputs are no multiple of the group size: its last group is shorter, or all of it is
    one group."""
    otherwise: StoredAs | None = None
    """Format of a matrix whose inputs are no multiple of the group size, in place of a remainder."""

    def num_bytes(self, rows: int, columns: int) -> Formula:
        if self.otherwise is not None and self.group_size is not None and columns % self.group_size:
            return self.otherwise.num_bytes(rows, columns)
        packed = term(columns)
        if self.bits < 8:
            whole = 8 % self.bits == 0
            packed = packed // term(8 // self.bits) if whole else packed * term(self.bits) // term(8)
        scales = term(self.scale_bytes + self.offset_bytes)
        if self.group_size is not None:
            is_whole = columns % self.group_size == 0
            num_rest = 1 if self.remainder == "one group" else columns // self.group_size + 1
            scales = (term(columns) // term(self.group_size) if is_whole else term(num_rest)) * scales
        if self.block_size is not None:
            scales += term(columns) // term(self.block_size) * term(self.block_bytes)
        if self.group_rows > 1:
            return term(rows) * packed + term(-(-rows // self.group_rows), "blocks") * scales
        order = term(columns) * term(self.column_bytes) if self.column_bytes else NOTHING
        return term(rows) * (packed + scales) + order

    def refuses(self, columns: int) -> str | None:
        """Why a matrix with so many inputs cannot be stored so; None if it can."""
        if self.group_size is not None and self.remainder == "refused" and columns % self.group_size:
            return f"has {columns} inputs, which must be a multiple of the group size {self.group_size}"
        if self.max_inputs is not None and columns > self.max_inputs:
            return f"has {columns} inputs, and the sum of more than {self.max_inputs} may not fit 32 bits"
        return None


FP8 = StoredAs(bits=8, group_size=128, scale_bytes=4, remainder="short group")
FP8_BLOCKS = replace(FP8, group_rows=128)
"""Format of some checkpoints."""
FP8_ROWS = StoredAs(bits=8, group_size=None, scale_bytes=4)
"""Format of other checkpoints."""
INT8 = StoredAs(bits=8, group_size=64, scale_bytes=2, max_inputs=65536, remainder="one group")
INT8_OF_ENCODER = replace(INT8, group_size=128, otherwise=INT8)
INT4 = StoredAs(bits=4, group_size=32, scale_bytes=2, offset_bytes=2)
_ZERO_BYTES = {4: 1, 8: 2}
"""Bytes of a zero point, by the bits of the weights."""
_SCALE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class KVStoredAs:
    """Format of K and V: numbers of one byte, and a scale for each group of consecutive elements of a head."""

    dtype: str
    """torch's name of the numbers' dtype."""
    group_size: int = 32
    """Number of elements that share a scale. The last group of a head may have fewer."""
    scale_bytes: int = 2

    def head_bytes(self, head_dim: int) -> Formula:
        """Bytes of a head of K, or of V, of one token."""
        scales = term(-(-head_dim // self.group_size), "scales") * term(self.scale_bytes, "B")
        return term(head_dim).named("head") * term(1, "B") + scales


KV_FORMATS: Mapping[KVPrecision, KVStoredAs] = {"fp8": KVStoredAs("float8_e4m3fn"), "int8": KVStoredAs("int8")}
SHORT_KV: KVPrecision = "int8"
"""Format that messages offer if memory is short: the nearest to the dtype, and the one that runs everywhere."""


def stored_as(layout: Layout, device: Literal["cpu", "cuda"] = "cpu") -> StoredAs:
    """Format of a matrix of a quantized checkpoint."""
    if isinstance(layout, Fp8Layout):
        return FP8_BLOCKS if layout.has_blocks else FP8_ROWS
    layout = layout.on_gpu if device == "cuda" else layout
    factor_bytes = _SCALE_BYTES[layout.scale_dtype]
    scale_bytes = factor_bytes if layout.block_size is None else 1
    offset_bytes = {"none": 0, "zeros": _ZERO_BYTES.get(layout.bits, 0), "minimums": scale_bytes}[layout.offsets]
    if layout.bits == 2:
        offset_bytes = 0  # a scale and a minimum share a byte
    return StoredAs(
        bits=layout.bits,
        group_size=layout.group_size,
        scale_bytes=scale_bytes,
        offset_bytes=offset_bytes,
        block_size=layout.block_size,
        block_bytes=factor_bytes if layout.offsets == "none" else 2 * factor_bytes,
        column_bytes=4 if layout.has_order else 0,
    )


LINEARS_STORED_AS: Mapping[Quantization, StoredAs | None] = {"none": None, "fp8": FP8, "int8": INT8, "int4": INT4}
"""Format of the matrices of attention and MLP. The embedding, norms and biases stay in the dtype."""
HEAD_STORED_AS: Mapping[Quantization, StoredAs | None] = {"none": None, "fp8": None, "int8": INT8, "int4": INT8}
"""Format of the head, whose error reaches every token. In 8 bits it needs integers: e4m3 has 3 bits of fraction."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision of activations (`dtype`), of the linear layers' weights (`quantization`), and of K and V
    (`kv_cache`)."""

    dtype: str
    quantization: Quantization = "none"
    kv_cache: KVPrecision = "auto"
    weights_dtype: str = ""
    """Dtype of the embedding and of matrices that are not quantized; empty: `dtype`."""

    def head_bytes(self, head_dim: int) -> Formula:
        """Bytes of a head of K, or of V, of one token."""
        form = KV_FORMATS.get(self.kv_cache)
        return term(head_dim).named("head") * self.dtype_bytes if form is None else form.head_bytes(head_dim)

    @property
    def name(self) -> str:
        """Short name for messages: "bfloat16", or "int8" if weights are quantized."""
        return self.dtype if self.quantization == "none" else self.quantization

    @property
    def weights_name(self) -> str:
        """The format of most weights."""
        return (self.weights_dtype or self.dtype) if self.quantization == "none" else self.quantization

    @property
    def dtype_bytes(self) -> Formula:
        return term(DTYPE_BYTES[self.dtype], "B")

    @property
    def matrix_bytes(self) -> Formula:
        """Bytes of a weight in the embedding, or in a matrix that is not quantized."""
        return term(DTYPE_BYTES[self.weights_dtype or self.dtype], "B")
