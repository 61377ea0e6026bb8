"""The layers of an encoder: its embedding, attention within packed sequences, MLP, and the classifier.

Encoders run in one process: no rank shares their matrices, and no adapter updates them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inferd.engine.arch import encoder_tensors
from inferd.engine.arch.description import Activation
from inferd.engine.arch.encoder import EncoderArch, HeadActivation, Pooling, RelativeBias
from inferd.engine.arch.matrices import of_layer
from inferd.engine.arch.matrix import Weight
from inferd.engine.layers.branch import GATES
from inferd.engine.layers.disentangled import DisentangledAttention, DistanceTable
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.norm import LayerNorm, NoNorm, Norm, RMSNorm
from inferd.engine.layers.packed_batch import PackedBatch, sequence_means
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.embed import embed
from inferd.kernels.ops.gelu import gelu, gelu_erf
from inferd.kernels.ops.packed_attention import packed_attention
from inferd.kernels.ops.rope import rope_and_cache
from inferd.kernels.ops.scaled_add import added

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU_TANH: gelu,
    Activation.GELU_ERF: gelu_erf,
    Activation.RELU: torch.relu,
}
"""Activations of MLPs without a gate."""


def encoder_norm(arch: EncoderArch, place: Placement, own: str, owner: str = "") -> Norm:
    weight = encoder_tensors.stream_norm(arch, own, owner)
    if arch.has_rms_norms:
        return RMSNorm(weight, arch.norm_eps, place)
    return LayerNorm(weight, arch.norm_eps, place, has_bias=arch.has_norm_bias)


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """All that an encoder computes from."""

    token_ids: Tensor
    """[T] int64."""
    token_types: Tensor | None
    """[T] int64; None in a family without types."""
    position_rows: Tensor | None
    """[T] int64: each token's row of the table of positions; None in a family without one."""
    batch: PackedBatch


class EncoderEmbedding:
    """norm(row of the token + row of its type + row of its position), which a matrix may follow, [T, hidden]."""

    def __init__(self, arch: EncoderArch, place: Placement) -> None:
        self._dtype, self._positions = place.dtype, arch.positions
        self._tables: dict[str, Tensor] = {}
        needed: list[Weight] = [encoder_tensors.embedding(arch)]
        if arch.num_token_types:
            needed.append(encoder_tensors.token_types(arch))
        if arch.positions is not None:
            needed.append(encoder_tensors.position_table(arch))
        for weight in needed:
            place.take(weight, partial(self._take, weight.name), place.recipe.narrow)
        self._has_types = bool(arch.num_token_types)
        own = encoder_tensors.EMBEDDING_NORM
        self._norm = encoder_norm(arch, place, own) if arch.has_embedding_norm else NoNorm()
        self._project = None if arch.projected_from is None else Linear(encoder_tensors.projection(arch), place)

    def _take(self, name: str, table: Tensor) -> None:
        self._tables[name] = table

    def inputs_of(self, token_ids: Tensor, batch: PackedBatch, token_types: Tensor | None) -> EncoderInputs:
        """token_types [T] int64, or None for the first type."""
        types, rows = None, None
        if self._has_types:
            types = torch.zeros_like(token_ids) if token_types is None else token_types
        if self._positions is not None:
            places = _positions_without(self._positions.padding_id, token_ids, batch.positions)
            rows = places + self._positions.first_row
        return EncoderInputs(token_ids, types, rows, batch)

    def __call__(self, of: EncoderInputs) -> Tensor:
        x = self._normed(of)
        return x if self._project is None else self._project(x)

    def _normed(self, of: EncoderInputs) -> Tensor:
        x = self._rows("embed", of.token_ids)
        if of.token_types is not None:
            own = self._rows("token_types", of.token_types)
            if of.position_rows is None:
                return self._norm.add(x, own)[0]
            x = added(x, own)
        if of.position_rows is None:
            return self._norm(x)
        return self._norm.add(x, self._rows("positions", of.position_rows))[0]

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        return embed(ids, self._tables[name], self._dtype)


def _positions_without(padding_id: int | None, token_ids: Tensor, positions: Tensor) -> Tensor:
    """The position of each token among those of its sequence that are no padding, [T] int64; -1 for a padding token.
    None as `padding_id`: there is no such token."""
    if padding_id is None:
        return positions
    is_padding = token_ids == padding_id
    if not is_padding.any():
        return positions
    num_so_far = is_padding.cumsum(0)
    first = torch.arange(len(positions), device=positions.device) - positions
    num_before = num_so_far - num_so_far[first] + is_padding[first].to(torch.int64)
    return torch.where(is_padding, -1, positions - num_before)


class BiasTable:
    """The bias of each distance from query to key, [heads, 2 * max_distance + 1] fp32, from a row for each bucket."""

    distances: Tensor

    def __init__(self, arch: EncoderArch, place: Placement) -> None:
        assert arch.relative_bias is not None
        self._bias = arch.relative_bias
        place.take(encoder_tensors.relative_bias(arch), self._take, torch.float32)

    def _take(self, table: Tensor) -> None:
        reach = self._bias.max_distance
        distances = torch.arange(-reach, reach + 1, device=table.device)
        self.distances = table[_bucket(self._bias, distances)].T.contiguous()


class Alibi:
    """The bias of each distance by a factor of each head, as `BiasTable` has it, for texts of `max_positions`."""

    def __init__(self, num_heads: int, max_positions: int, device: torch.device) -> None:
        reach = max(1, max_positions - 1)
        slopes = torch.tensor(alibi_slopes(num_heads), device=device)
        self.distances = -slopes[:, None] * torch.arange(-reach, reach + 1, device=device).abs()


def alibi_slopes(num_heads: int) -> list[float]:
    """The factor of each head: powers of a number, and for counts that are no power of two some of those between."""
    size = 2 ** (num_heads.bit_length() - 1)
    powers = [2.0 ** (-8.0 * (head + 1) / size) for head in range(size)]
    return powers + [2.0 ** (-4.0 * (2 * head + 1) / size) for head in range(num_heads - size)]


def _bucket(bias: RelativeBias, distances: Tensor) -> Tensor:
    """The bucket of each distance. All that are at least `max_distance` have one."""
    half = bias.num_buckets // 2
    num_exact, size = half // 2, distances.abs()
    growth = torch.log(size.clamp(min=1) / num_exact) / torch.log(torch.tensor(bias.max_distance / num_exact))
    ranges = (num_exact + (growth * (half - num_exact)).to(torch.int64)).clamp(max=half - 1)
    return torch.where(size < num_exact, size, ranges) + half * (distances > 0)


class PackedAttention:
    """Attention of all tokens x [T, hidden] to the tokens of their own sequences."""

    def __init__(self, arch: EncoderArch, layer: int, place: Placement, bias: BiasTable | Alibi | None) -> None:
        qkv, o = encoder_tensors.attention(arch, layer)
        self._qkv, self._o, self._bias = Linear(qkv, place), Linear(o, place), bias
        self._counts, self._head_dim, self._window = arch.head_counts, arch.head_dim, arch.window(layer)
        self._scale = arch.score_scale

    def __call__(self, x: Tensor, batch: PackedBatch, cos_sin: Tensor | None) -> Tensor:
        """cos_sin [P, D] fp32: as of `rope_and_cache`; None without rope."""
        heads = self._qkv(x).view(x.shape[0], sum(self._counts), self._head_dim)
        q, k, v = torch.split(heads, list(self._counts), dim=1)
        if cos_sin is not None:
            turned = list(self._counts[:2])
            q, k = torch.split(self._rotated(heads[:, : sum(turned)], cos_sin, batch), turned, dim=1)
        bias = None if self._bias is None else self._bias.distances
        attended = packed_attention(q, k, v, batch.starts, self._scale, self._window, bias)
        return self._o(attended.flatten(1))

    def _rotated(self, heads: Tensor, cos_sin: Tensor, batch: PackedBatch) -> Tensor:
        """All heads of q and k, as queries of a kernel that has no keys to write."""
        none, pool = heads[:, :0], torch.empty(0, 2, 0, 1, self._head_dim, dtype=heads.dtype, device=heads.device)
        return rope_and_cache(heads, none, none, cos_sin, batch.positions, batch.positions, pool)


Bias = BiasTable | Alibi | DistanceTable
"""A model's table of what distances add to scores."""


class EncoderMLP:
    """down(activation(gate(x)) * up(x)) with gate and up in one matrix; in a family without a gate
    down(activation(up(x)))."""

    def __init__(self, arch: EncoderArch, layer: int, place: Placement) -> None:
        before, down = encoder_tensors.mlp(arch, layer)
        self._act = GATES[arch.activation].run if arch.has_gate else _ACTIVATIONS[arch.activation]
        self._in, self._down = Linear(before, place), Linear(down, place)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._act(self._in(x)))


class EncoderLayer:
    """Attention and MLP, each with an add and a norm after it, or a norm before it and an add.

    The stream between layers is held as (x, residual) in a family with norms before: it is their sum, which the next
    norm's kernel adds on its way. In others it is x alone.
    """

    def __init__(self, arch: EncoderArch, layer: int, place: Placement, bias: Bias | None) -> None:
        self._has_pre_norms, owner = arch.has_pre_norms, of_layer(layer)
        self._attention = (
            DisentangledAttention(arch, layer, place, bias)
            if isinstance(bias, DistanceTable)
            else PackedAttention(arch, layer, place, bias)
        )
        self._mlp = EncoderMLP(arch, layer, place)
        has_norm = arch.has_attention_norm(layer)
        self._attention_norm = encoder_norm(arch, place, "attention_norm", owner) if has_norm else None
        self._mlp_norm = encoder_norm(arch, place, "mlp_norm", owner)

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: PackedBatch, cos_sin: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(x, residual) before the layer -> after it, [T, hidden] each."""
        if not self._has_pre_norms:
            assert self._attention_norm is not None
            x = self._attention_norm.add(self._attention(x, batch, cos_sin), x)[0]
            return self._mlp_norm.add(self._mlp(x), x)[0], None
        if residual is None:
            normed, stream = x if self._attention_norm is None else self._attention_norm(x), x
        else:
            assert self._attention_norm is not None
            normed, stream = self._attention_norm.add(x, residual)
        normed, stream = self._mlp_norm.add(self._attention(normed, batch, cos_sin), stream)
        return self._mlp(normed), stream


_HEAD_ACTIVATIONS: dict[HeadActivation, Callable[[Tensor], Tensor]] = {
    HeadActivation.TANH: lambda x: x.float().tanh_().to(x.dtype),
    HeadActivation.RELU: torch.relu,
    HeadActivation.GELU_ERF: gelu_erf,
}


class ClassifierHead:
    """Logits [sequences, labels] fp32 from hidden states [T, hidden]."""

    def __init__(self, arch: EncoderArch, place: Placement) -> None:
        assert arch.classifier is not None
        head, (dense, out) = arch.classifier, encoder_tensors.classifier(arch)
        self._pooling, self._act = head.pooling, _HEAD_ACTIVATIONS[head.activation]
        self._dense, self._out = Linear(dense, place), Linear(out, place, torch.float32)
        self._norm = encoder_norm(arch, place, "classifier.norm") if head.has_norm else None

    def __call__(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """Every sequence has a token."""
        match self._pooling:
            case Pooling.FIRST:
                return self._logits(embed(starts[:-1].to(torch.int64), hidden))
            case Pooling.MEAN:
                return self._logits(sequence_means(hidden, starts))
            case Pooling.LATE:
                return sequence_means(self._logits(hidden), starts)

    def _logits(self, x: Tensor) -> Tensor:
        x = self._act(self._dense(x))
        return self._out(x if self._norm is None else self._norm(x))
