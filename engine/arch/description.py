"""`Arch`: a decoder-only model as plain data, with every choice that families make differently.

The family files build it; the decoder and the planner read it. It knows no tensor library and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from inferd.engine.arch.heads import CacheGroup, Heads, grouped
from inferd.engine.arch.modelled import Modelled
from inferd.engine.arch.recurrent import Recurrent
from inferd.engine.arch.rotary import Rope
from inferd.engine.arch.stored import Stored


class ArchError(ValueError):
    """config.json describes no model that can be served. The message has the field, its value, and what is allowed."""


class Activation(StrEnum):
    """Activation of the MLP's gate. In a family without a gate, activation of the whole MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu_erf"
    """gelu in its exact form, which encoders have."""
    RELU = "relu"
    """That of some encoders without a gate."""


class NormKind(StrEnum):
    """Kind of norm before and after the layers' branches."""

    RMS = "rms"
    RMS_ONE_PLUS = "rms_one_plus"
    """RMS norm that multiplies by 1 + its stored weight."""
    LAYER = "layer"
    """Layer norm, which subtracts the mean, with weight and bias."""


class QKNorm(StrEnum):
    """Dimension of the RMS norm of q and k, which comes before the rotation."""

    NONE = "none"
    HEAD = "head"
    PROJECTION = "projection"
    """All heads of a token together."""


@dataclass(frozen=True, slots=True)
class GateLimit:
    """An activation of experts: (up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit`, and the up from
    -`limit` to `limit` (gpt-oss)."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: several MLPs in some layers, of which a router chooses a few for each token."""

    num_experts: int
    num_chosen: int
    """Number of experts that each token goes to."""
    intermediate_size: int
    """Intermediate size of each expert."""
    normalizes: bool
    """Whether the weights of a token's experts are divided by their sum."""
    layers: tuple[int, ...]
    """Layers that have experts, ascending. The others have an MLP."""
    shared_size: int = 0
    """Intermediate size of the shared expert, whose result every token gets; 0 for none."""
    has_shared_gate: bool = True
    """Whether that result is multiplied by the sigmoid of a gate."""
    has_sigmoid: bool = False
    """Whether an expert's score is the sigmoid of its logit, and not part of a softmax."""
    has_score_bias: bool = False
    """Whether experts are chosen by their scores plus a bias, which the weights do not have."""
    num_groups: int = 1
    """Number of equal groups of experts, of which a token chooses some first."""
    num_chosen_groups: int = 1
    factor: float = 1.0
    """Factor of the weights of a token's experts."""
    added: float = 0.0
    """Number added to the sum that these weights are divided by."""
    has_bias: bool = False
    """Whether the router and the matrices of the experts have biases."""
    limit: GateLimit | None = None
    """The experts' activation in place of the model's; None: that of the model."""
    beside_mlp: bool = False
    """Whether these layers have an MLP too, whose result is added. MLP and experts then have norms of their own. The
    router has a norm of the stream, and its weights are multiplied by a stored number of each expert."""


class DraftHeadKind(StrEnum):
    """Kind of a draft head."""

    EAGLE3 = "EAGLE-3 head"
    MTP = "MTP layer"
    """A layer that the served model's checkpoint holds, with that model's embedding and logits."""


@dataclass(frozen=True, slots=True)
class DraftHeadParts:
    """The parts of a draft head beside its layer. It drafts from hidden states of another model, the served one."""

    kind: DraftHeadKind
    state_size: int
    """Size of a hidden state of the served model."""
    layers_read: tuple[int, ...] | None
    """Number of layers of the served model before each hidden state that is read; None: a low, a middle and a high
    one. Empty: the last one, after its norm."""
    num_tokens: int
    """Number of tokens that it may draft."""
    norms_residual: bool = False
    """Whether the state that its layer adds to is normed."""
    has_embedding: bool = False
    """Whether it has an embedding of its own. Otherwise it has the served model's."""
    maps_tokens: bool = False
    """Whether its tokens have other ids than in the served vocabulary."""
    reads_embedding_first: bool = False
    """For an MTP layer: whether the inputs of its projection are the embedding, and then the hidden state."""
    body: str = ""
    """Prefix of the names of its tensors."""
    layer: str = "midlayer."
    """Prefix of the names of its layer's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One decoder: `num_layers` times (norm, attention, add, norm, MLP, add), then norm and head. The fields after
    `windows` say how a family departs from that."""

    architecture: str
    """The name in config.json's `architectures`."""
    vocab_size: int
    """Number of rows of the embedding."""
    hidden_size: int
    intermediate_size: int
    """Size of an MLP between its matrices, of the widest if they differ."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: Activation
    ropes: tuple[Rope | None, ...]
    """Rope of each layer; None for a layer without position embedding."""
    attention_scale: float
    tie_embeddings: bool
    dtype: str
    """Dtype of the stored weights, as config.json names it: float32, bfloat16 or float16."""
    windows: tuple[int | None, ...]
    """Number of last positions that each layer's attention sees; None for all."""
    layer_heads: tuple[Heads, ...] = ()
    """Heads of each layer, if they differ; then the three fields above are those of some layer."""
    norm: NormKind = NormKind.RMS
    has_pre_norms: bool = True
    """Whether a norm comes before attention and before the MLP."""
    has_post_norms: bool = False
    """Whether the outputs of attention and MLP pass a norm before they are added."""
    qk_norm: QKNorm = QKNorm.NONE
    has_v_norm: bool = False
    """Whether each head of v is divided by its RMS."""
    has_layer_scalars: bool = False
    """Whether the stream is multiplied by a stored number after each layer."""
    mlp_sizes: tuple[int, ...] = ()
    """Intermediate size of each layer's MLP, if they differ."""
    layer_input_size: int = 0
    """Size of the input that each layer gets from the token itself, beside the stream; 0 for none."""
    has_gate: bool = True
    """Whether the MLP is down(activation(gate(x)) * up(x)); without a gate it is down(activation(up(x)))."""
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    """Whether `embedding_multiplier` is rounded to the dtype that the model runs in."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP, before they are added."""
    logits_divisor: float = 1.0
    num_labels: int = 0
    """Number of labels of the classifier, which reads one hidden state of a text; 0 for none."""
    labels_mean: bool = False
    """Whether that is the mean of all hidden states, and not the last one."""
    has_head: bool = True
    """Whether it has the head from which tokens are drawn. An embedding model and a classifier have none, even if their
    files have one, or their config ties one to the embedding."""
    is_bidirectional: bool = False
    """Whether a token sees those behind it too, as in an encoder, so that it keeps no K and V, and draws no tokens. A
    window then counts the positions on each side."""
    has_output_gate: bool = False
    """Whether each attention head is multiplied by the sigmoid of a gate, whose projection follows that of its q."""
    has_sinks: bool = False
    """Whether each attention head has a learned score that takes part in its softmax and has no value."""
    recurrent: Recurrent | None = None
    """The layers with a recurrent state; None if all layers have attention."""
    recurrent_layers: tuple[int, ...] = ()
    """Those layers. They have no rope and no window."""
    experts: Experts | None = None
    """None if every layer has one MLP."""
    stored: Stored | None = None
    """How the checkpoint is quantized; None if it holds all matrices in `dtype`."""
    splits_matrices: bool = False
    """Whether matrices that the family's own checkpoints hold as one lie one by one, as in GGUF files."""
    draft_head: DraftHeadParts | None = None
    """The rest of a draft head, whose layer this is; None for a model that can be served."""
    modelled: Modelled | None = None
    """The model as transformers' own code computes it; None for a native family. Norms, activations, ropes and biases
    are then none of ours, and the fields above do not tell them."""

    def __post_init__(self) -> None:
        assert len(self.ropes) == len(self.windows) == self.num_layers
        assert (self.recurrent is None) == (not self.recurrent_layers) and self.attention_layers
        assert self.residual_multiplier == 1.0 or not self.has_post_norms, "a factor or a norm before the add, not both"

        assert not self.is_bidirectional or (self.attention_softcap is None and not self.has_sinks)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers

    def has_mlp(self, layer: int) -> bool:
        return self.experts is None or self.experts.beside_mlp or layer not in self.experts.layers

    @property
    def num_idle_weights(self) -> int:
        """Number of weights in the experts that a token does not go to."""
        if self.experts is None:
            return 0
        num_idle = len(self.experts.layers) * (self.experts.num_experts - self.experts.num_chosen)
        return num_idle * 3 * self.hidden_size * self.experts.intermediate_size

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.recurrent_layers)

    @property
    def is_native(self) -> bool:
        """Whether our own decoder computes this model."""
        return self.modelled is None

    def heads(self, layer: int) -> Heads:
        """The heads of a layer with attention."""
        return self.layer_heads[layer] if self.layer_heads else Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def attention_size(self) -> int:
        """Size of all heads of a token, in the layer with the most."""
        return max(self.heads(layer).q_size for layer in self.attention_layers)

    def window(self, layer: int) -> int | None:
        return self.windows[layer]

    @property
    def widest_heads(self) -> Heads:
        """The heads of a layer with the largest K and V, which the pool's planes have space for."""
        return max((self.heads(layer) for layer in self.attention_layers), key=lambda heads: heads.kv_size)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with K and V of their own."""
        return tuple(layer for layer in self.attention_layers if self.heads(layer).kv_layer is None)

    def qkv_sizes(self, layer: int) -> tuple[int, ...]:
        """Outputs of the projections of q, with its gates, and of those of k and v that the layer has."""
        heads = self.heads(layer)
        num_others = 0 if heads.kv_layer is not None else 2 if heads.has_v else 1
        return heads.q_size * (2 if self.has_output_gate else 1), *(heads.kv_size,) * num_others

    def mlp_size(self, layer: int) -> int:
        """Intermediate size of a layer's MLP."""
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size

    @property
    def qkv_size(self) -> int:
        """Most outputs of these projections in a layer."""
        return max(sum(self.qkv_sizes(layer)) for layer in self.attention_layers)

    @property
    def attention_in_size(self) -> int:
        """Size of what q, k and v are computed from. An EAGLE-3 head has an embedding beside a hidden state there."""
        head = self.draft_head
        return 2 * self.hidden_size if head is not None and head.kind is DraftHeadKind.EAGLE3 else self.hidden_size

    @property
    def num_logits(self) -> int:
        """Number of tokens that may be drawn."""
        return self.vocab_size if self.draft_head is None else self.draft_head.num_tokens

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers with K and V, grouped by the positions that they see and the sizes of their K."""
        return grouped({layer: (self.windows[layer], self.heads(layer).kv_size) for layer in self.kv_layers})
