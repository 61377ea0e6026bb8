"""What a weight is stored in, and K and V: the dtypes, the quantized forms, and which matrices take them, said here
alone.

Knows no model: a matrix is rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from inferd.engine.api.memory.formula import Formula, term

Quantization = Literal["none", "fp8", "int8", "int4"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

KVCache = Literal["auto", "fp8"]
"""What can be asked for K and V: the dtype, or 8-bit floats (e4m3)."""
KV_SCALE_BYTES = 4
"""Of each head of each token in 8 bits, for K and for V."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a quantized matrix [out, in] is stored: small numbers, and a scale for each group of them."""

    weights_per_byte: int
    group_size: int | None
    """Inputs that share a scale; None: one scale for each output row."""
    scale_bytes: int
    max_inputs: int | None = None
    """Products of so many sum within 32 bits."""
    group_rows: int = 1
    """Output rows that share the scales of their groups."""

    def num_bytes(self, rows: int, columns: int) -> Formula:
        packed = term(columns) // term(self.weights_per_byte) if self.weights_per_byte > 1 else term(columns)
        scales = term(self.scale_bytes)
        if self.group_rows > 1:
            assert self.group_size is not None
            blocks = term(-(-rows // self.group_rows), "blocks") * term(-(-columns // self.group_size))
            return term(rows) * packed + blocks * scales
        if self.group_size is not None:
            scales = term(columns) // term(self.group_size) * scales
        return term(rows) * (packed + scales)

    def refuses(self, columns: int) -> str | None:
        """Why a matrix with this many inputs cannot be stored so."""
        if self.group_size is not None and self.group_rows == 1 and columns % self.group_size:
            return f"has {columns} inputs, which is no multiple of its group of {self.group_size}"
        if self.max_inputs is not None and columns > self.max_inputs:
            return f"has {columns} inputs, and the sum of more than {self.max_inputs} may not fit 32 bits"
        return None


FP8 = StoredAs(weights_per_byte=1, group_size=None, scale_bytes=4)
FP8_BLOCKS = StoredAs(weights_per_byte=1, group_size=128, scale_bytes=4, group_rows=128)
"""As some checkpoints have it."""
INT8 = StoredAs(weights_per_byte=1, group_size=None, scale_bytes=4, max_inputs=65536)
INT4 = StoredAs(weights_per_byte=2, group_size=32, scale_bytes=2)

LINEARS_STORED_AS: Mapping[Quantization, StoredAs | None] = {"none": None, "fp8": FP8, "int8": INT8, "int4": INT4}
"""The matrices of attention and MLP. The embedding, norms and biases stay in the dtype."""
HEAD_STORED_AS: Mapping[Quantization, StoredAs | None] = {"none": None, "fp8": FP8, "int8": INT8, "int4": INT8}
"""Four bits in the head would be seen in every token."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Of activations (`dtype`), of the linear layers' weights (`quantization`), and of K and V (`kv_cache`)."""

    dtype: str
    quantization: Quantization = "none"
    kv_cache: KVCache = "auto"

    def head_bytes(self, head_dim: int) -> Formula:
        """Of a head of K or of V of one token."""
        head = term(head_dim).named("head")
        if self.kv_cache == "fp8":
            return head * term(1, "B") + term(KV_SCALE_BYTES, "B").named("scale")
        return head * self.dtype_bytes

    @property
    def name(self) -> str:
        """What a person calls it: "bfloat16", or "int8" for weights that are smaller than the activations."""
        return self.dtype if self.quantization == "none" else self.quantization

    @property
    def dtype_bytes(self) -> Formula:
        return term(DTYPE_BYTES[self.dtype], "B")
