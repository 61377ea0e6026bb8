"""Draft heads: from a hidden state of the served model and the next token they make a state, from which the token after
the next is drafted. That state takes the place of the served model's hidden state for the draft after it.

A head is one layer, with KV of its own. It knows no requests and no sampling, as `decoder`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch, DraftHeadKind
from inferd.engine.arch.matrices import embedding, of_layer, state_projection, token_offsets
from inferd.engine.arch.matrices import head as head_matrix
from inferd.engine.arch.sharding import ONE_RANK
from inferd.engine.layers.attention import Attention, Context
from inferd.engine.layers.branch import MLP, Act, Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.norm import NoNorm, RMSNorm, rms_norm_of
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.rotary import cos_sin_table
from inferd.engine.models.decoder import Decoder, DecoderLayer
from inferd.engine.quant.checkpoints.reader import CheckpointError
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe
from inferd.kernels.ops.embed import embed
from inferd.kernels.ops.join import join
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.scaled_add import added


class _GivenInputs(Branch):
    """A branch whose input is not the norm of its stream: it is given as (input, stream)."""

    def __init__(self) -> None:
        self.norm = self.after = NoNorm()

    def enter(
        self, linear: Linear, x: Tensor, residual: Tensor | None, act: Act | None = None
    ) -> tuple[Tensor, Tensor]:
        assert residual is not None and act is None
        return linear(x), residual


def _norms(arch: Arch, place: Placement) -> tuple[RMSNorm, RMSNorm, RMSNorm]:
    """The norms of embeddings, of states, and of the state behind the layer."""
    size, owner = arch.hidden_size, of_layer(0)
    of_embedding, of_state = (rms_norm_of(arch, place, own, size, owner) for own in ("embedding_norm", "state_norm"))
    return of_embedding, of_state, rms_norm_of(arch, place, "norm", size)


class EagleHead:
    """An EAGLE-3 head of `arch` beside the model `served`, in its dtype and on its device."""

    rank = ONE_RANK
    _embedding: Tensor | None = None
    _token_ids: Tensor | None = None
    """[tokens] int64: id in the served vocabulary of each token that it may draft; None: all have their own."""

    def __init__(
        self,
        arch: Arch,
        served: Decoder,
        layers_read: Sequence[int],
        max_positions: int | None = None,
        recipe: Recipe = UNQUANTIZED,
    ) -> None:
        """`layers_read`: number of layers of the served model before each hidden state that it reads.
        `max_positions`: most positions of a sequence (default: all that the head was trained on)."""
        head = arch.draft_head
        assert head is not None
        self.arch, self.dtype, self._served, self._norms_residual = arch, served.dtype, served, head.norms_residual
        place = Placement(served.dtype, served.device, recipe)
        self._fc = Linear(state_projection(arch, len(layers_read) * head.state_size), place)
        self._embedding_norm, self._state_norm, self._norm = _norms(arch, place)
        self._mlp_branch = Branch(arch, 0, place, "mlp_norm", "mlp_post_norm")
        self._attention, self._mlp = Attention(arch, 0, place, _GivenInputs()), MLP(arch, 0, place, self._mlp_branch)
        self._lm_head = Linear(head_matrix(arch), place, torch.float32)
        num_positions = max_positions or arch.max_positions
        self._cos_sin = cos_sin_table(arch.ropes[0], num_positions, place.device, arch.max_positions)
        self.num_table_bytes = self._cos_sin.nbytes
        self.parameters = place.parameters
        if head.has_embedding:
            place.take(embedding(arch), self._take_table, recipe.narrow)
        if head.maps_tokens:
            place.take(token_offsets(head.num_tokens), self._take_offsets, torch.int64)

    def smooth_keys(self) -> None:
        """As of a decoder."""
        self._attention.smooth_keys()

    def read(self, states: Tensor) -> Tensor:
        """[T, states * hidden of the served model], the hidden states side by side -> [T, hidden]."""
        return self._fc(states)

    def forward(
        self, token_ids: Tensor, states: Tensor, batch: AttentionBatch, kv: Tensor, kv_scales: Tensor | None = None
    ) -> Tensor:
        """The states [T, hidden] behind these positions. token_ids [T] int64: the token that follows each position.
        states [T, hidden]: of the served model by `read`, or of this head at the position before. kv and kv_scales as
        of a decoder of one layer."""
        served, own = self._served, self._embedding
        rows = served.embedded(token_ids) if own is None else embed(token_ids, own, served.dtype)
        embedded = self._embedding_norm(rows)
        normed = self._state_norm(states)
        stream: Tensor | None = normed if self._norms_residual else states
        context = Context(batch, self._cos_sin, None, kv[0], None if kv_scales is None else kv_scales[0])
        x, stream = self._attention(join([embedded, normed]), stream, context)
        x, stream = self._mlp(x, stream)
        return x if stream is None else added(x, stream)

    def logits(self, states: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary of the served model] fp32. Tokens that it cannot draft have -inf."""
        logits = self._lm_head(self._norm(states))
        if self._token_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.arch.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._token_ids, logits)

    def _take_table(self, embedding: Tensor) -> None:
        self._embedding = embedding

    def _take_offsets(self, offsets: Tensor) -> None:
        token_ids = offsets + torch.arange(offsets.shape[0], device=offsets.device)
        different = set(token_ids.tolist())
        if len(different) < len(offsets) or min(different) < 0 or max(different) >= self.arch.vocab_size:
            raise CheckpointError(
                f"d2t must name {len(offsets)} different tokens of the {self.arch.vocab_size} of the served model, but "
                f"it names {len(different)}, from {min(different)} to {max(different)}; give another draft head"
            )
        self._token_ids = token_ids


class MTPLayer:
    """An MTP layer of `arch` beside the model `served`, whose embedding and logits it has."""

    rank = ONE_RANK

    def __init__(
        self, arch: Arch, served: Decoder, max_positions: int | None = None, recipe: Recipe = UNQUANTIZED
    ) -> None:
        """`max_positions`: most positions of a sequence (default: all that the model knows)."""
        assert arch.draft_head is not None
        size, num_positions = arch.hidden_size, max_positions or arch.max_positions
        self._reads_embedding_first = arch.draft_head.reads_embedding_first
        self.arch, self.dtype, self._served = arch, served.dtype, served
        place = Placement(served.dtype, served.device, recipe)
        self._fc, self._layer = Linear(state_projection(arch, 2 * size), place), DecoderLayer(arch, 0, place)
        self.parameters = place.parameters
        self._embedding_norm, self._state_norm, self._norm = _norms(arch, place)
        self._cos_sin = cos_sin_table(arch.ropes[0], num_positions, place.device, num_positions)
        self.num_table_bytes = self._cos_sin.nbytes

    def smooth_keys(self) -> None:
        """As of a decoder."""
        self._layer.smooth_keys()

    def read(self, states: Tensor) -> Tensor:
        """[T, hidden], the final hidden states of the served model, as they are."""
        return states

    def forward(
        self, token_ids: Tensor, states: Tensor, batch: AttentionBatch, kv: Tensor, kv_scales: Tensor | None = None
    ) -> Tensor:
        """As of `EagleHead`."""
        embedded = self._embedding_norm(self._served.embedded(token_ids))
        normed = self._state_norm(states)
        x = self._fc(join([embedded, normed] if self._reads_embedding_first else [normed, embedded]))
        context = Context(batch, self._cos_sin, None, kv[0], None if kv_scales is None else kv_scales[0])
        x, residual = self._layer(x, None, context)
        return self._norm(x) if residual is None else self._norm.add(x, residual)[0]

    def logits(self, states: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary] fp32."""
        return self._served.logits(states)


DraftHead = EagleHead | MTPLayer


def draft_head_of(
    arch: Arch, served: Decoder, layers_read: Sequence[int], max_positions: int | None, recipe: Recipe
) -> DraftHead:
    """The draft head of `arch`, without its weights."""
    if arch.draft_head is not None and arch.draft_head.kind is DraftHeadKind.MTP:
        return MTPLayer(arch, served, max_positions, recipe)
    return EagleHead(arch, served, layers_read, max_positions, recipe)
