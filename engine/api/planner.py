"""Memory as a plan: bytes of weights and of KV cache, from a model's shape alone.

No torch and no device: the same arithmetic answers before anything is loaded, and is compared with what was allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes the engine will allocate."""

    weights_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of an architecture that memory depends on."""

    num_params: int
    """Weights, tied ones counted once."""
    num_packed_twice: int
    """Elements of a head that shares the embedding's weights: a CPU holds a packed copy beside the table."""
    kv_elements_per_token: int
    """Elements of keys and values that one token holds in all layers: 2 x layers x KV heads x head size."""
    max_positions: int
    vocab_size: int
    """Rows of the embedding."""

    def weights_bytes(self, dtype: str) -> int:
        return (self.num_params + self.num_packed_twice) * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        return self.kv_elements_per_token * DTYPE_BYTES[dtype]

    def plan(self, dtype: str, block_size: int, num_blocks: int) -> MemoryPlan:
        return MemoryPlan(self.weights_bytes(dtype), self.kv_bytes_per_token(dtype) * block_size * num_blocks)


def format_bytes(num_bytes: float) -> str:
    """Bytes as people read them: binary units, one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
