"""One decoder for every model family, composed from the family's `Arch`.

It turns token ids and the step's attention metadata into hidden states and logits. It knows no requests, no sampling
and no files: `loader` fills the parameters that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrices import classifier, head
from inferd.engine.arch.recurrent import GatedDelta, Mamba2, ShortConv
from inferd.engine.arch.sharding import ONE_RANK, Rank
from inferd.engine.layers.attention import Attention, Context
from inferd.engine.layers.branch import MLP, Branch
from inferd.engine.layers.collectives import ALONE, Ranks
from inferd.engine.layers.embedding import Embedding
from inferd.engine.layers.experts import ExpertsBesideMLP, MixtureOfExperts
from inferd.engine.layers.gated_delta import GatedDeltaNet
from inferd.engine.layers.layer_inputs import LayerInput, LayerInputs
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.mamba2 import Mamba2Layer
from inferd.engine.layers.norm import LayerScalar, stream_norm
from inferd.engine.layers.packed_batch import PackedBatch
from inferd.engine.layers.placement import NO_LORAS, Lora, Placement
from inferd.engine.layers.recurrent import RecurrentLayer, StateContext, States
from inferd.engine.layers.rotary import cos_sin_table, query_table
from inferd.engine.layers.short_conv import ShortConvLayer
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe
from inferd.kernels.ops.join import join
from inferd.kernels.ops.kv_format import KV_GROUP
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.scaled_add import added, scaled


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Place of a layer's K and V in the pool."""

    group: int
    """Its cache group."""
    plane: int
    part: int
    """Part of the plane, if the group's layers share planes."""
    heads: tuple[int, int] | None
    """(this rank's KV heads, their size), if they are not those of the planes."""

    def of(self, pool: Tensor, group_size: int = 1) -> Tensor:
        """[planes, blocks, 2, G, block_size, D] -> the layer's part [blocks, 2, G, block_size, D], a view. `group_size`
        divides the size of a head, for scales."""
        plane = pool[self.plane]
        if self.heads is None:
            return plane
        num_heads, size = self.heads[0], self.heads[1] // group_size
        num_blocks, block_size = plane.shape[0], plane.shape[3]
        own = 2 * num_heads * block_size * size
        blocks = plane.view(num_blocks, -1)[:, self.part * own : (self.part + 1) * own]
        return blocks.view(num_blocks, 2, num_heads, block_size, size)


def kv_places(arch: Arch, rank: Rank = ONE_RANK) -> dict[int, KVPlace]:
    """Layer -> its place."""
    found: dict[int, KVPlace] = {}
    for group, members in enumerate(arch.cache_groups):
        for index, layer in enumerate(members.layers):
            heads, (first, end) = arch.heads(layer), rank.kv_heads(arch.heads(layer))
            shape = (end - first, heads.head_dim) if arch.layer_heads else None
            found[layer] = KVPlace(group, index // members.num_sharing, index % members.num_sharing, shape)
    shared = {layer: arch.heads(layer).kv_layer for layer in arch.attention_layers}
    return found | {layer: found[source] for layer, source in shared.items() if source is not None}


_RECURRENT: Mapping[type, type[RecurrentLayer]] = {
    GatedDelta: GatedDeltaNet, Mamba2: Mamba2Layer, ShortConv: ShortConvLayer
}  # fmt: skip


class DecoderLayer:
    """Norm, attention, add, norm, MLP, add. `Branch` decides which of them are fused into one kernel. A recurrent layer
    has a Gated DeltaNet, Mamba-2 or a short convolution in place of attention.

    A family may norm or scale the results of attention and MLP before they are added, and may leave out the norms
    before attention and MLP. It may scale the stream at the end.
    """

    def __init__(self, arch: Arch, layer: int, place: Placement) -> None:
        self._attention_branch = Branch(arch, layer, place, "attention_norm", "attention_post_norm")
        self._mlp_branch = Branch(arch, layer, place, "mlp_norm", "mlp_post_norm")
        self._mixer: Attention | RecurrentLayer
        if layer not in arch.recurrent_layers:
            self._mixer = self._attention = Attention(arch, layer, place, self._attention_branch)
        else:
            self._mixer = _RECURRENT[type(arch.recurrent)](arch, layer, place, self._attention_branch)
        self._scalar = LayerScalar(layer, place) if arch.has_layer_scalars else None
        self._mlp = _mlp_of(arch, layer, place, self._mlp_branch)
        self._input = LayerInput(arch, layer, place) if arch.layer_input_size else None

    def smooth_keys(self, source: DecoderLayer | None = None) -> None:
        """As of `Attention`. A recurrent layer has no keys."""
        assert isinstance(self._mixer, Attention)
        self._attention.smooth_keys(None if source is None else source._attention)

    @property
    def expert_loads(self) -> Tensor | None:
        """Number of tokens that each expert has had; None without experts."""
        return None if isinstance(self._mlp, MLP) else self._mlp.loads

    def __call__(
        self, x: Tensor, residual: Tensor | None, context: Context | StateContext, own_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(x, residual) before the layer -> after it. The stream is their sum, or x alone if residual is None.
        own_input [T, layer_input_size]: the layer's input from each token, if it has one."""
        if isinstance(context, StateContext):
            assert not isinstance(self._mixer, Attention)
            x, residual = self._mixer(x, residual, context)
        else:
            x, residual = self._attention(x, residual, context)
        x, residual = self._mlp(x, residual)
        if self._input is not None:
            assert own_input is not None
            x, residual = self._input(x, residual, own_input)
        return (x, residual) if self._scalar is None else (self._scalar(x, residual), None)

    def advance(self, projected: Tensor, context: StateContext) -> None:
        """Advance the states of a recurrent layer by projected inputs [T, in], for the states alone."""
        assert not isinstance(self._mixer, Attention)
        self._mixer.advance(projected, context)


def _mlp_of(arch: Arch, layer: int, place: Placement, branch: Branch) -> MLP | MixtureOfExperts | ExpertsBesideMLP:
    if not arch.has_experts(layer):
        return MLP(arch, layer, place, branch)
    kind = ExpertsBesideMLP if arch.has_mlp(layer) else MixtureOfExperts
    return kind(arch, layer, place, branch)


class Decoder:
    """Model of `arch` in `dtype` on `device`, for positions below `max_positions` (default: all that the model knows).

    Rope scalings that depend on a sequence length use `served_positions` (default: `max_positions`). `recipe` says how
    linear layers store their weights. `ranks`: the processes that share the model; this one keeps its part of each
    matrix. `loras`: updates by adapters, by the names of matrices. Raises `QuantizationError` if it cannot store one.
    """

    unrecordable: str | None = None
    """Why no step of this decoder can be recorded; None if an attempt may be made."""
    _layer_inputs: LayerInputs | None = None
    _lm_head: Linear

    num_table_bytes = 0
    """Bytes of the rotary tables, which a plan counts apart from the weights."""

    def __init__(
        self,
        arch: Arch,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int | None = None,
        served_positions: int | None = None,
        recipe: Recipe = UNQUANTIZED,
        ranks: Ranks = ALONE,
        layers_read: Sequence[int] | None = None,
        loras: Mapping[str, Lora] = NO_LORAS,
    ) -> None:
        """`layers_read`: number of layers before each hidden state that a draft head reads; empty: the final ones; None
        without a draft head."""
        place = Placement(dtype, torch.device(device), recipe, ranks, loras)
        self.arch, self.dtype, self.device, self.rank = arch, dtype, place.device, ranks.own
        self._layers_read, self._is_read = tuple(layers_read or ()), layers_read is not None
        self.parameters = place.parameters
        """By their names in the weight map. A head tied to the embedding has none of its own."""
        self._embedding = Embedding(arch, place, lambda: self._lm_head.bound, self._tie_head)
        self._layer_inputs = LayerInputs(arch, place) if arch.layer_input_size else None
        self._layers = [DecoderLayer(arch, layer, place) for layer in range(arch.num_layers)]
        self._norm = stream_norm(arch, place, "norm")
        if arch.has_head:
            head_place = replace(place, parameters={}) if arch.tie_embeddings else place
            self._lm_head = Linear(head(arch), head_place, torch.float32, gather=ranks.gather_at_first)
        self._classifier = Linear(classifier(arch), place, torch.float32) if arch.num_labels else None
        self._kv_places = {} if arch.is_bidirectional else kv_places(arch, ranks.own)
        self._state_planes = {layer: plane for plane, layer in enumerate(arch.recurrent_layers)}
        num_positions = max_positions or arch.max_positions
        tables = {rope: cos_sin_table(rope, num_positions, place.device, served_positions) for rope in set(arch.ropes)}
        query_tables = {rope: query_table(rope, table) for rope, table in tables.items()}
        self._cos_sin = [tables[rope] for rope in arch.ropes]
        self._query_cos_sin = [query_tables[rope] for rope in arch.ropes]
        grown = [table for table in query_tables.values() if table is not None]
        self.num_table_bytes = sum(table.nbytes for table in (*tables.values(), *grown))
        self._embedding_multiplier = arch.embedding_multiplier
        if arch.rounds_embedding_multiplier:
            self._embedding_multiplier = float(torch.tensor(arch.embedding_multiplier, dtype=dtype))

    def expert_loads(self) -> dict[int, Tensor]:
        """Number of tokens that each expert has had [experts] int64, by layer."""
        return {layer: found.expert_loads for layer, found in enumerate(self._layers) if found.expert_loads is not None}

    def smooth_keys(self) -> None:
        """Make the layers ready for K and V in int8, once the weights are loaded. It may be called again."""
        for index in self.arch.attention_layers:
            source = self.arch.heads(index).kv_layer
            self._layers[index].smooth_keys(None if source is None else self._layers[source])

    def forward(
        self,
        token_ids: Tensor,
        batches: Sequence[AttentionBatch],
        kv: Tensor,
        kv_scales: Tensor | None = None,
        states: States | None = None,
    ) -> Tensor:
        """Final hidden states [T, hidden] in the model's dtype, after the last norm. If a draft head reads hidden
        states, they follow in the same row: [T, (1 + states) * hidden], which `parts` takes apart.

        token_ids [T] int64. batches: one for each cache group; they differ in their block tables only. kv [planes,
        blocks, 2, G, block_size, D] holds the KV of the earlier positions that a row's layers see, and receives the KV
        of this step's positions. G and D are those of the widest layer, with this rank's KV heads. kv_scales [planes,
        blocks, 2, G, block_size, groups], only for a KV cache in 8 bits. states: those of the recurrent layers, which
        receive the states behind this step's rows; None if there are no such layers.
        A row's result depends on its own tokens alone.
        """
        x = self.embed(token_ids)
        inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, x)
        return self.run_layers(x, batches, kv, kv_scales, states, inputs)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]: the first part of `forward`."""
        x = self.embedded(token_ids)
        return x if self._embedding_multiplier == 1.0 else scaled(x, self._embedding_multiplier)

    def run_layers(
        self,
        x: Tensor,
        batches: Sequence[AttentionBatch],
        kv: Tensor,
        kv_scales: Tensor | None = None,
        states: States | None = None,
        inputs: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The rest of `forward`, from the result of `embed`. inputs: of each layer [T, layer_input_size], if they have
        any."""
        residual: Tensor | None = None
        read: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in self._layers_read:
                read[index] = x if residual is None else added(x, residual)
            if index in self._state_planes:
                assert states is not None
                x, residual = layer(x, residual, states.of(self._state_planes[index]))
                continue
            place = self._kv_places[index]
            scales = None if kv_scales is None else place.of(kv_scales, KV_GROUP)
            context = Context(batches[place.group], *self._tables(index), place.of(kv), scales)
            x, residual = layer(x, residual, context, None if inputs is None else inputs[index])
        if residual is None:
            hidden, read[len(self._layers)] = self._norm(x), x
        else:
            hidden, read[len(self._layers)] = self._norm.add(x, residual)
        if not self._layers_read:
            return hidden
        return join([hidden, *(read[number] for number in self._layers_read)])

    def encode(self, token_ids: Tensor, batch: PackedBatch) -> Tensor:
        """Final hidden states [T, hidden] of packed sequences, whose tokens see all of their own sequence. For an
        `Arch` that is bidirectional."""
        assert self.arch.is_bidirectional
        x = self.embed(token_ids)
        inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, x)
        residual: Tensor | None = None
        pools: dict[object, Tensor] = {}
        has_shared_kv = len(self.arch.kv_layers) < self.arch.num_layers
        for index, layer in enumerate(self._layers):
            heads = self.arch.heads(index)
            source = index if heads.kv_layer is None else heads.kv_layer
            shape = len(token_ids), 2, heads.num_kv_heads, 1, heads.head_dim
            key = source if has_shared_kv else shape
            if key not in pools:
                pools[key] = torch.empty(shape, dtype=self.dtype, device=self.device)
            context = Context(batch, *self._tables(index), pools[key], None)
            x, residual = layer(x, residual, context, None if inputs is None else inputs[index])
        return self._norm(x) if residual is None else self._norm.add(x, residual)[0]

    def _tables(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Cosines and sines of a layer, and those of its queries if they differ."""
        return self._cos_sin[layer], self._query_cos_sin[layer]

    def advance_states(self, projected: Tensor, states: States) -> None:
        """Advance the states of the recurrent layers by tokens that were computed before. projected [layers, T, in]:
        their inputs, as the layers kept them."""
        for layer, plane in self._state_planes.items():
            self._layers[layer].advance(projected[plane], states.of(plane))

    def parts(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """(final hidden states [T, hidden], those that a draft head reads [T, states * hidden] or None) of a result of
        `forward`, [T, ...]."""
        if not self._layers_read:
            return states, states if self._is_read else None
        hidden, read = torch.split(states, [self.arch.hidden_size, states.shape[1] - self.arch.hidden_size], 1)
        return hidden.contiguous(), read.contiguous()

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]: rows of the embedding, without a multiplier."""
        return self._embedding(token_ids)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, hidden] -> [R, vocab] fp32, written to `out` if it is given. They are the sums of the head's products and
        never rounded to the model's dtype, because steps of 1/16 would make ties decide answers. On a rank other than
        the first their content is undefined."""
        logits = self._lm_head(hidden)
        if out is not None:
            logits = out.copy_(logits)
        if self.arch.logits_divisor != 1.0:
            logits = logits.div_(self.arch.logits_divisor)
        cap = self.arch.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def labels(self, hidden: Tensor) -> Tensor:
        """[R, hidden], the state of each text that the classifier reads -> [R, labels] fp32: its logits."""
        assert self._classifier is not None, f"{self.arch.architecture} has no classifier"
        return self._classifier(hidden)

    def refuses_rows(self, kv: Tensor, kv_scales: Tensor | None, *, is_exact: bool) -> str | None:
        """Why a row's results depend on the other rows; None if they do not. Our kernels are tested for that."""
        return None

    def _tie_head(self, embedding: Tensor) -> None:
        if self.arch.tie_embeddings:
            self._lm_head.take_weight(embedding)
