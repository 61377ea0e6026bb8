"""Self-attention of one layer: project, normalise, rotate, write K and V to the pool, attend over it, project back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.norm import RMSNorm
from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.kernels.paged_attention import AttentionBatch, paged_attention
from inferd.kernels.rope import rope_and_cache


class Attention:
    """[T, hidden] -> [T, hidden], with the KV of earlier tokens in the layer's part of the pool."""

    def __init__(self, arch: Arch, layer: int, place: Placement) -> None:
        self._arch, self._window = arch, arch.windows[layer]
        self._qkv = Linear(arch.hidden_size, arch.qkv_size, place, arch.has_qkv_bias)
        self._o = Linear(arch.q_size, arch.hidden_size, place, arch.has_o_bias)
        self._q_norm: RMSNorm | None = None
        self._k_norm: RMSNorm | None = None
        if arch.has_qk_norm:
            self._q_norm = RMSNorm(arch.head_dim, arch.norm_eps, place)
            self._k_norm = RMSNorm(arch.head_dim, arch.norm_eps, place)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        modules = (("qkv", self._qkv), ("o", self._o), ("q_norm", self._q_norm), ("k_norm", self._k_norm))
        for name, module in modules:
            if module is not None:
                yield from ((f"{name}.{part}", parameter) for part, parameter in module.parameters())

    def __call__(self, x: Tensor, batch: AttentionBatch, cos_sin: Tensor, kv: Tensor) -> Tensor:
        """x [T, hidden]; cos_sin [P, rotary_dim]; kv [blocks, 2, G, block_size, D], which receives these tokens' KV."""
        arch = self._arch
        heads = self._qkv(x).view(x.shape[0], -1, arch.head_dim)
        q, k, v = torch.split(heads, [arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
        q_norm = self._q_norm.weight if self._q_norm else None
        k_norm = self._k_norm.weight if self._k_norm else None
        q = rope_and_cache(q, k, v, cos_sin, batch.positions, batch.write_slots, kv, q_norm, k_norm, arch.norm_eps)
        attended = paged_attention(q, kv, batch, arch.attention_scale, self._window, arch.attention_softcap)
        return self._o(attended.flatten(1))
