"""`EncoderArch`: an encoder as plain data, with every choice that families make differently.

An encoder gives every token of a text a hidden state that depends on the whole text. It keeps no state between texts.
The family files in `encoders` build the description; the model and the weight map read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from inferd.engine.arch.description import Activation
from inferd.engine.arch.rotary import Rope
from inferd.engine.arch.stored import Stored

_MAX_PAIRS = 2**23
"""Most pairs of a query and a key, of all heads together, that have a number of their own in memory."""


class HeadActivation(StrEnum):
    """Activation between the two matrices of a classifier."""

    TANH = "tanh"
    RELU = "relu"
    GELU_ERF = "gelu_erf"


class Pooling(StrEnum):
    """Hidden states of a text that a classifier reads."""

    FIRST = "first"
    """That of the first token."""
    MEAN = "mean"
    """The mean of all tokens."""
    LATE = "late"
    """Each token's. The text's logits are the mean of theirs."""


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A learned row for each position, added to the embedding."""

    num_rows: int
    first_row: int = 0
    """Row of a text's first token."""
    padding_id: int | None = None
    """Id of a token that has the row before the first one, wherever it stands, and takes no position; None: every token
    takes one."""


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """A learned number for each head and each bucket of distances from query to key, added to scores in all layers.

    Half of the buckets are for keys behind the query. A half has single distances first, and then ranges that grow,
    up to `max_distance` (T5: Raffel et al. 2019, arXiv:1910.10683).
    """

    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class Disentangled:
    """DeBERTa's attention: a query also meets a key for each bucket of distances, and a key a query for each. These are
    the projections of a learned row of hidden size."""

    num_buckets: int
    """Buckets of each sign; all buckets beyond them are the last."""
    max_distance: int
    """Distance from which on there is one bucket. 0: every bucket is one distance."""
    has_norm: bool
    """Whether the rows have a norm."""

    @property
    def num_rows(self) -> int:
        return 2 * self.num_buckets

    def heads_at_once(self, num_heads: int, num_tokens: int) -> int:
        """Number of heads whose numbers for all pairs of `num_tokens` tokens are in memory at once."""
        return min(num_heads, max(1, _MAX_PAIRS // max(1, num_tokens * num_tokens)))


@dataclass(frozen=True, slots=True)
class Classifier:
    """Logits of a text: out(norm(activation(dense(pooled hidden state))))."""

    num_labels: int
    activation: HeadActivation = HeadActivation.TANH
    pooling: Pooling = Pooling.FIRST
    has_dense_bias: bool = True
    has_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderArch:
    """One encoder: an embedding with a norm, then `num_layers` times (attention, add, norm, MLP, add, norm). The fields
    after `dtype` say how a family departs from that."""

    architecture: str
    """The name in config.json's `architectures`."""
    vocab_size: int
    """Number of rows of the embedding."""
    hidden_size: int
    intermediate_size: int
    """Size of an MLP between its matrices."""
    num_layers: int
    num_heads: int
    head_dim: int
    max_positions: int
    """Most tokens of a text."""
    norm_eps: float
    activation: Activation
    dtype: str
    """Dtype of the stored weights, as config.json names it: float32, bfloat16 or float16."""
    num_kv_heads: int | None = None
    """Heads of K and of V; None: as many as of q."""
    projected_from: int | None = None
    """Size of the embedding's rows and norm, if a matrix makes hidden states of them; None: they have hidden size."""
    num_uses: int = 1
    """Number of layers, one after another, that have the same weights."""
    positions: PositionTable | None = None
    num_token_types: int = 0
    """Number of rows of the table of token types (first or second text of a pair), which are added to the embedding; 0
    for none."""
    ropes: tuple[Rope, ...] = ()
    """Rope of each layer; empty for none."""
    windows: tuple[int | None, ...] = ()
    """Number of tokens before and behind a token that each layer's attention sees; None for all. Empty: all layers see
    all."""
    relative_bias: RelativeBias | None = None
    disentangled: Disentangled | None = None
    has_alibi: bool = False
    """Whether scores fall with the distance, in each head by a factor of its own."""
    has_pre_norms: bool = False
    """Whether norms come before attention and MLP, and one behind the layers, and not after the adds. The first layer's
    attention then has none if the embedding has one."""
    has_embedding_norm: bool = True
    """False: the first layer's attention has a norm before it, as all others."""
    has_norm_bias: bool = True
    has_rms_norms: bool = False
    """Whether norms divide by the root mean square, and subtract no mean. They have no bias."""
    scales_scores: bool = True
    """Whether scores are divided by the root of the head size."""
    has_gate: bool = False
    """Whether the MLP is down(activation(gate(x)) * up(x)); without a gate it is down(activation(up(x)))."""
    splits_gate: bool = False
    """Whether the checkpoint has the MLP's gate and up one by one, although the family has one tensor of both."""
    has_qkv_bias: bool = True
    has_o_bias: bool = True
    has_up_bias: bool = True
    """Whether the matrix of the MLP before the activation has a bias, with a gate or without."""
    has_down_bias: bool = True
    classifier: Classifier | None = None
    stored: Stored | None = None
    """Formats of the matrices that a GGUF file's blocks are kept for; None: none are."""

    def __post_init__(self) -> None:
        assert len(self.ropes) in (0, self.num_layers) and len(self.windows) in (0, self.num_layers)
        assert self.num_layers % self.num_uses == 0
        assert self.has_embedding_norm or (self.has_pre_norms and self.positions is None and not self.num_token_types)
        assert not (self.has_rms_norms and self.has_norm_bias)
        assert self.positions is None or self.max_positions <= self.positions.num_rows - self.positions.first_row

    @property
    def is_native(self) -> bool:
        """Whether code of our own computes it, as `Arch.is_native`."""
        return True

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see those behind them, as `Arch.is_bidirectional`."""
        return True

    @property
    def num_labels(self) -> int:
        """Number of labels of the classifier; 0 for none."""
        return 0 if self.classifier is None else self.classifier.num_labels

    @property
    def embedding_size(self) -> int:
        """Size of the embedding's rows."""
        return self.projected_from or self.hidden_size

    @property
    def num_stored_layers(self) -> int:
        """Number of layers with weights of their own."""
        return self.num_layers // self.num_uses

    @property
    def attention_size(self) -> int:
        """Size of all heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Number of heads of q, k and v."""
        num_kv_heads = self.num_kv_heads or self.num_heads
        return self.num_heads, num_kv_heads, num_kv_heads

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return float(self.head_dim**-0.5) if self.scales_scores else 1.0

    def has_attention_norm(self, layer: int) -> bool:
        """Whether the attention of a layer has a norm, before it or after its add."""
        return layer > 0 or not (self.has_pre_norms and self.has_embedding_norm)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def rope(self, layer: int) -> Rope | None:
        return self.ropes[layer] if self.ropes else None
