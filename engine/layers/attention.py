"""Self-attention of one layer: project, norm, rotate, write K and V to the pool, attend over the pool, project back.
Some families multiply each head by a gate before the last projection.

A rank computes its own heads, and has their K and V alone. The projection back reads all heads, so it gathers them. A
norm over all heads of q or k gathers them too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.matrices import attention, of_layer, sinks
from inferd.engine.arch.sharding import Span
from inferd.engine.layers import smoothing
from inferd.engine.layers.branch import Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.norm import RMSNorm, rms_norm_of
from inferd.engine.layers.packed_batch import PackedBatch
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.head_gate import sigmoid_gate
from inferd.kernels.ops.packed_attention import packed_attention
from inferd.kernels.ops.paged_attention import AttentionBatch, paged_attention
from inferd.kernels.ops.rope import rope_and_cache


@dataclass(slots=True)
class Context:
    """Inputs of one layer's attention in one step, besides hidden states."""

    batch: AttentionBatch | PackedBatch
    """Packed sequences, of which each token sees all of its own, need no earlier KV: the pool has a block for each of
    their tokens."""
    cos_sin: Tensor
    """[P, rotary_dim]"""
    query_cos_sin: Tensor | None
    """[P, rotary_dim] for queries; None: they are rotated by `cos_sin` like keys."""
    kv: Tensor
    """[blocks, 2, G, block_size, D], with blocks that may lie apart: holds the KV of earlier tokens, and receives the
    KV of this step's tokens. G is the number of this rank's KV heads."""
    kv_scales: Tensor | None
    """[blocks, 2, G, block_size, groups], if K and V are stored in 8 bits."""


class Attention:
    """Attention of a step's tokens x [T, hidden] to themselves and to earlier tokens, whose KV lies in the pool."""

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        self._arch, self._layer, self._place = arch, layer, place
        self._window, self._branch = arch.windows[layer], branch
        self._ranks, own, self._heads = place.ranks, place.ranks.own, arch.heads(layer)
        heads, (qkv, o) = self._heads, attention(arch, layer)
        self._sizes = [end - start for start, end in own.rows(qkv)]
        self._qkv, self._o = Linear(qkv, place), Linear(o, place, gather=place.ranks.outputs)
        self._sinks: Tensor | None = None
        self._smoothing: Tensor | None = None
        if arch.has_sinks:
            place.take(sinks(arch, layer), self._take_sinks, torch.float32)

        def norm_of(name: str, size: int) -> RMSNorm:
            return rms_norm_of(arch, place, f"attention.{name}", size, of_layer(layer))

        self._head_norms: tuple[RMSNorm, RMSNorm] | None = None
        self._projection_norms: tuple[RMSNorm, RMSNorm] | None = None
        match arch.qk_norm:
            case QKNorm.HEAD:
                q_norm = norm_of("q_norm", heads.head_dim)
                self._head_norms = q_norm, norm_of("k_norm", heads.head_dim) if heads.kv_layer is None else q_norm
            case QKNorm.PROJECTION:
                self._projection_norms = norm_of("q_norm", heads.q_size), norm_of("k_norm", heads.kv_size)

    def _take_sinks(self, scores: Tensor) -> None:
        self._sinks = scores

    def smooth_keys(self, source: Attention | None = None) -> None:
        """Find the factors of channels (`smoothing`) for K and V in int8, once the weights are loaded. A layer that
        reads K of another one has the factors of that layer, `source`.

        They are found from the layer's keys for noise. Its LoRA adapters are left out, and so is the division by the
        RMS of all heads, which is the same for all channels.
        """
        if source is not None:
            self._smoothing = source._smoothing
            return
        size, rope = attention(self._arch, self._layer)[0].num_inputs, self._arch.ropes[self._layer]
        x = self._branch.norm(smoothing.noise(size, self._place.dtype, self._place.device))
        parts = torch.split(self._qkv.bound(x), self._sizes, dim=1)
        k = parts[min(1, len(parts) - 1)]
        if self._projection_norms is not None:
            first, end = (head * self._heads.head_dim for head in self._ranks.own.kv_heads(self._heads))
            k = k * self._projection_norms[1].weight[first:end]
        k = k.reshape(k.shape[0], -1, self._heads.head_dim)
        if self._head_norms is not None:
            k = self._head_norms[1](k)
        self._smoothing = smoothing.factors(k, 0 if rope is None else rope.rotary_dim)

    def __call__(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        qkv, stream = self._branch.enter(self._qkv, x, residual)
        heads = self._ranks.inputs(self._attend(qkv, context), self._heads.q_size)
        return self._branch.leave(self._o, heads, stream)

    def _attend(self, qkv: Tensor, context: Context) -> Tensor:
        """[T, q, k and v of this rank's heads] -> [T, this rank's heads]."""
        arch, batch, kv, kv_scales = self._arch, context.batch, context.kv, context.kv_scales
        heads, parts = self._heads, torch.split(qkv, self._sizes, dim=1)
        q, k, v = parts[0], parts[min(1, len(parts) - 1)], parts[-1]
        gate: Tensor | None = None
        if arch.has_output_gate:
            q, gate = q.view(qkv.shape[0], -1, 2, heads.head_dim).unbind(2)
        if self._projection_norms is not None:
            norms, own = self._projection_norms, self._ranks.own
            q = self._norm_of_all(norms[0], q, own.heads(arch), heads.q_size)
            k = self._norm_of_all(norms[1], k, own.kv_heads(heads), heads.kv_size)
        q, k, v = (part if part.dim() == 3 else part.view(qkv.shape[0], -1, heads.head_dim) for part in (q, k, v))
        if heads.kv_layer is not None:
            k = v = q[:, :0]
        q = self._rotate(q, k, v, context)
        if isinstance(batch, PackedBatch):
            k, v = kv[:, 0, :, 0], kv[:, 1, :, 0]
            attended = packed_attention(q, k, v, batch.starts, arch.attention_scale, self._window)
        else:
            attended = paged_attention(
                q, kv, batch, arch.attention_scale, self._window, arch.attention_softcap, kv_scales, self._sinks
            )
        return (attended if gate is None else sigmoid_gate(attended, gate)).flatten(1)

    def _rotate(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q rotated; k, rotated, and v are written into the pool, if the layer has them.

        The kernel turns q and k by one table. If they have different ones, a first call is made for q alone, and the
        second call writes over what the first one wrote into the pool.
        """
        batch, kv, kv_scales = context.batch, context.kv, context.kv_scales
        q_norm, k_norm = (norm.weight for norm in self._head_norms) if self._head_norms else (None, None)

        def rotate(cos_sin: Tensor) -> Tensor:
            return rope_and_cache(
                q, k, v, cos_sin, batch.positions, batch.write_slots, kv, q_norm, k_norm, self._arch.norm_eps,
                kv_scales, norms_v=self._arch.has_v_norm, smoothing=self._smoothing,
            )  # fmt: skip

        if context.query_cos_sin is None:
            return rotate(context.cos_sin)
        rotated = rotate(context.query_cos_sin)
        rotate(context.cos_sin)
        return rotated

    def _norm_of_all(self, norm: RMSNorm, part: Tensor, heads: Span, size: int) -> Tensor:
        """The norm of all heads, of which this rank has `heads`: [T, those] -> [T, those]. `size` counts the numbers of
        all. If several ranks have a head, each gives a part of it to the others."""
        first, last = (head * self._heads.head_dim for head in heads)
        start, end = self._ranks.own.span(size)
        whole = self._ranks.gather(part[:, start - first : end - first], size)
        return norm(whole)[:, first:last]
