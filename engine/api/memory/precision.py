"""Formats of weights, K and V: the dtypes, the quantized formats, and which matrices use them. Only this file says it.

Knows no model: a matrix is rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from inferd.engine.api.memory.formula import NOTHING, Formula, term
from inferd.engine.arch.stored import Fp8Layout, Layout

Quantization = Literal["none", "fp8", "int8", "int4"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

KVCache = Literal["auto", "fp8"]
"""Formats of K and V: the dtype, or 8-bit floats (e4m3)."""
KV_SCALE_BYTES = 4
"""Bytes of a scale in an 8-bit cache. Each head of a token has one for K and one for V."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """Format of a quantized matrix [out, in]: small numbers, and a scale for each group of them."""

    weights_per_byte: int
    group_size: int | None
    """Number of inputs that share a scale; None: one scale for each output row."""
    scale_bytes: int
    max_inputs: int | None = None
    """Most inputs whose products can be summed in 32 bits; None: no such limit."""
    group_rows: int = 1
    """Number of output rows that share the scales of their groups."""
    offset_bytes: int = 0
    """Bytes of a group's zero point or minimum."""
    column_bytes: int = 0
    """Bytes that each column takes once: its place in an order."""

    def num_bytes(self, rows: int, columns: int) -> Formula:
        packed = term(columns) // term(self.weights_per_byte) if self.weights_per_byte > 1 else term(columns)
        scales = term(self.scale_bytes + self.offset_bytes)
        if self.group_rows > 1:
            assert self.group_size is not None
            blocks = term(-(-rows // self.group_rows), "blocks") * term(-(-columns // self.group_size))
            return term(rows) * packed + blocks * scales
        if self.group_size is not None:
            scales = term(columns) // term(self.group_size) * scales
        order = term(columns) * term(self.column_bytes) if self.column_bytes else NOTHING
        return term(rows) * (packed + scales) + order

    def refuses(self, columns: int) -> str | None:
        """Why a matrix with so many inputs cannot be stored so; None if it can."""
        if self.group_size is not None and self.group_rows == 1 and columns % self.group_size:
            return f"has {columns} inputs, which must be a multiple of the group size {self.group_size}"
        if self.max_inputs is not None and columns > self.max_inputs:
            return f"has {columns} inputs, and the sum of more than {self.max_inputs} may not fit 32 bits"
        return None


FP8 = StoredAs(weights_per_byte=1, group_size=None, scale_bytes=4)
FP8_BLOCKS = StoredAs(weights_per_byte=1, group_size=128, scale_bytes=4, group_rows=128)
"""Format of some checkpoints."""
INT8 = StoredAs(weights_per_byte=1, group_size=None, scale_bytes=4, max_inputs=65536)
INT4 = StoredAs(weights_per_byte=2, group_size=32, scale_bytes=2)
_ZERO_BYTES = {4: 1, 8: 2}
"""Bytes of a zero point, by the bits of the weights."""
_SCALE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


def stored_as(layout: Layout) -> StoredAs:
    """Format of a matrix of a quantized checkpoint."""
    if isinstance(layout, Fp8Layout):
        return FP8_BLOCKS if layout.has_blocks else FP8
    scale_bytes = _SCALE_BYTES[layout.scale_dtype]
    offset_bytes = {"none": 0, "zeros": _ZERO_BYTES[layout.bits], "minimums": scale_bytes}[layout.offsets]
    return StoredAs(
        weights_per_byte=8 // layout.bits,
        group_size=layout.group_size,
        scale_bytes=scale_bytes,
        offset_bytes=offset_bytes,
        column_bytes=4 if layout.has_order else 0,
    )


LINEARS_STORED_AS: Mapping[Quantization, StoredAs | None] = {"none": None, "fp8": FP8, "int8": INT8, "int4": INT4}
"""Format of the matrices of attention and MLP. The embedding, norms and biases stay in the dtype."""
HEAD_STORED_AS: Mapping[Quantization, StoredAs | None] = {"none": None, "fp8": FP8, "int8": INT8, "int4": INT8}
"""Format of the head. It has at least 8 bits, because its error reaches every token."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision of activations (`dtype`), of the linear layers' weights (`quantization`), and of K and V
    (`kv_cache`)."""

    dtype: str
    quantization: Quantization = "none"
    kv_cache: KVCache = "auto"

    def head_bytes(self, head_dim: int) -> Formula:
        """Bytes of a head of K, or of V, of one token."""
        head = term(head_dim).named("head")
        if self.kv_cache == "fp8":
            return head * term(1, "B") + term(KV_SCALE_BYTES, "B").named("scale")
        return head * self.dtype_bytes

    @property
    def name(self) -> str:
        """Short name for messages: "bfloat16", or "int8" if weights are quantized."""
        return self.dtype if self.quantization == "none" else self.quantization

    @property
    def dtype_bytes(self) -> Formula:
        return term(DTYPE_BYTES[self.dtype], "B")
