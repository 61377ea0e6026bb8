"""What a decoder-only family can vary, as plain data. Built by the family files, read by the decoder and by the
planner.

Knows no tensor library and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from inferd.engine.arch import paging


class ArchError(ValueError):
    """config.json describes nothing that can be served: which field, its value, and what would do."""


class Activation(StrEnum):
    """Of the MLP's gate, or of the whole MLP where it has no gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class NormKind(StrEnum):
    """How a layer's input is brought to size."""

    RMS = "rms"
    RMS_ONE_PLUS = "rms_one_plus"
    """RMS norm whose stored weight is what is added to one."""
    LAYER = "layer"
    """Layer norm: mean taken off, weight and bias."""


class QKNorm(StrEnum):
    """What the RMS norm of q and k, before the rotation, runs over."""

    NONE = "none"
    HEAD = "head"
    PROJECTION = "projection"
    """All heads of a token at once."""


_MAX_UNUSED_PLANES = 0.15
"""Share of the KV memory that may stay empty so that there are fewer block tables to keep."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every rotary frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base grows with the number of positions served beyond the original ones ("dynamic NTK")."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Divided by `factor` where a frequency turns fewer than `beta_slow` times over the original context, kept where it
    turns more than `beta_fast` times, between the two in between (YaRN: Peng et al. 2023, arXiv:2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the two ends of the ramp are whole numbers of frequencies."""


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """A divisor per frequency: `short_factors` up to the original positions, `long_factors` where more are served
    (Ding et al. 2024, arXiv:2402.13753)."""

    original_max_positions: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low rotary frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` elements of each head."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    attention_factor: float = 1.0
    """Multiplies every cosine and sine, and so a score by its square."""


class Scales(StrEnum):
    """What of a stored matrix shares a scale."""

    TENSOR = "tensor"
    ROW = "channel"
    BLOCK = "block"


BLOCK = 128
"""Rows and columns of a block of weights that share a scale."""


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """The checkpoint's matrices of attention and MLP but `plain`, and with `has_head` that of the logits, are e4m3
    numbers times scales."""

    scales: Scales
    weight_scale: str
    """What the scales of `x.weight` are called after `x.`"""
    input_scale: str | None = None
    """The same of the one scale that calibration found for its activations; None: they are quantized as they come."""
    has_head: bool = False
    plain: frozenset[str] = frozenset()
    """Modules of the layers, as the checkpoint calls them, that were left out: `model.layers.0.mlp.down_proj`."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table per request, because they see the same positions.

    Every group of a model has at most as many layers as the largest, so that one block serves any group: layer
    `layers[i]` uses plane i of the block's memory.
    """

    window: int | None
    layers: tuple[int, ...]

    def max_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks of this group that a sequence of `num_tokens` needs at once, `step_tokens` a step at most."""
        return paging.max_blocks(self.window, num_tokens, step_tokens, block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One decoder: `num_layers` times (norm, attention, add, norm, MLP, add), then norm and head; the fields after
    `windows` say where a family departs from that."""

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
    ropes: tuple[Rope | None, ...]
    """Per layer; None where a layer knows no positions."""
    attention_scale: float
    tie_embeddings: bool
    dtype: str
    """Of the stored weights, as config.json names it: float32, bfloat16 or float16."""
    windows: tuple[int | None, ...]
    """Per layer: how many last positions its attention sees, None for all."""
    norm: NormKind = NormKind.RMS
    has_pre_norms: bool = True
    """Attention and MLP read their input normed."""
    has_post_norms: bool = False
    """The outputs of attention and MLP are normed before they are added."""
    qk_norm: QKNorm = QKNorm.NONE
    has_gate: bool = True
    """MLP: down(activation(gate(x)) * up(x)); without a gate, down(activation(up(x)))."""
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    """To the dtype that the model runs in, before it multiplies."""
    residual_multiplier: float = 1.0
    """Of the outputs of attention and MLP, before they are added."""
    logits_divisor: float = 1.0
    stored: StoredFp8 | None = None
    """None: the checkpoint holds its matrices in `dtype`."""

    def __post_init__(self) -> None:
        assert len(self.ropes) == len(self.windows) == self.num_layers
        assert self.residual_multiplier == 1.0 or not self.has_post_norms, "one thing before the add, not two"

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
