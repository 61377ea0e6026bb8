"""What a decoder-only family can vary, as plain data. Built by the family files, read by the decoder and by the
planner.

Knows no tensor library and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ArchError(ValueError):
    """config.json describes nothing that can be served: which field, its value, and what would do."""


class Activation(StrEnum):
    """The gate of the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


_MAX_UNUSED_PLANES = 0.15


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every rotary frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low rotary frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` elements of each head."""

    theta: float
    rotary_dim: int
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table per request, because they see the same positions.

    Every group of a model has at most as many layers as the largest, so that one block serves any group: layer
    `layers[i]` uses plane i of the block's memory.
    """

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One decoder: `num_layers` times (norm, attention, add, norm, gated MLP, add), then norm and head."""

    architecture: str
    """The name in config.json's `architectures`."""
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: Activation
    rope: Rope
    attention_scale: float
    tie_embeddings: bool
    dtype: str
    """Of the stored weights, as config.json names it: float32, bfloat16 or float16."""
    windows: tuple[int | None, ...]
    """Per layer: how many last positions its attention sees, None for all."""
    has_qk_norm: bool = False
    """RMS norm over each head of q and k, before the rotation."""
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token holds in all layers."""
        return self.num_layers * 2 * self.kv_size

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers by what they see, in groups of like size: full attention first, then windows, widest first.

        One pool serves all groups, and a block holds as many layers as the largest group has. So each kind of layer is
        cut into groups of the largest size that leaves at most `_MAX_UNUSED_PLANES` of the blocks' memory unused.
        """
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            kinds.setdefault(window, []).append(layer)
        ordered = sorted(kinds, key=lambda window: (window is not None, -(window or 0)))

        def planes(size: int) -> int:
            return sum(-(-len(layers) // size) * size for layers in kinds.values())

        smallest = min(len(layers) for layers in kinds.values())
        allowed = self.num_layers * (1 + _MAX_UNUSED_PLANES)
        size = next(size for size in range(smallest, 0, -1) if planes(size) <= allowed)
        return tuple(
            CacheGroup(window, tuple(kinds[window][first : first + size]))
            for window in ordered
            for first in range(0, len(kinds[window]), size)
        )

    @property
    def tied_head_elements(self) -> int:
        """Elements of a head that shares the embedding's weights: what a device that packs its heads holds twice."""
        return self.vocab_size * self.hidden_size if self.tie_embeddings else 0
