"""One decoder for every family, composed from its `Arch`.

Takes token ids and the step's attention metadata, gives hidden states and logits. Knows no requests, no sampling and no
files: `loader` fills the parameters it names.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.layers.attention import Attention
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.mlp import GatedMLP
from inferd.engine.layers.norm import RMSNorm
from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.rotary import cos_sin_table
from inferd.kernels.paged_attention import AttentionBatch


class DecoderLayer:
    """norm, attention, add, norm, MLP; the last add is fused with the next layer's norm."""

    def __init__(self, arch: Arch, layer: int, place: Placement) -> None:
        self._attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps, place)
        self._attention = Attention(arch, layer, place)
        self._mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps, place)
        self._mlp = GatedMLP(arch, place)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        modules = (
            ("attention_norm", self._attention_norm),
            ("attention", self._attention),
            ("mlp_norm", self._mlp_norm),
            ("mlp", self._mlp),
        )
        for name, module in modules:
            yield from ((f"{name}.{part}", parameter) for part, parameter in module.parameters())

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: AttentionBatch, cos_sin: Tensor, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(x, residual), whose sum is the layer's output; the first layer's residual is None."""
        if residual is None:
            normed, residual = self._attention_norm(x), x
        else:
            normed, residual = self._attention_norm.add(x, residual)
        x = self._attention(normed, batch, cos_sin, kv)
        normed, residual = self._mlp_norm.add(x, residual)
        return self._mlp(normed), residual


class Decoder:
    """`arch` in `dtype` on `device`, for positions below `max_positions` (default: all that the model knows)."""

    _embedding: Tensor

    def __init__(
        self, arch: Arch, dtype: torch.dtype, device: torch.device | str, max_positions: int | None = None
    ) -> None:
        place = Placement(dtype, torch.device(device))
        self.arch, self.dtype, self.device = arch, dtype, place.device
        self._embed = Parameter((arch.vocab_size, arch.hidden_size), dtype, place.device, self._take_embedding)
        self._layers = [DecoderLayer(arch, layer, place) for layer in range(arch.num_layers)]
        self._norm = RMSNorm(arch.hidden_size, arch.norm_eps, place)
        self._lm_head = Linear(arch.hidden_size, arch.vocab_size, place)
        self._cos_sin = cos_sin_table(arch.rope, max_positions or arch.max_positions, place.device)

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by the name that the weight map uses. A tied head has none of its own."""
        named = {"embed.weight": self._embed, "norm.weight": dict(self._norm.parameters())["weight"]}
        for index, layer in enumerate(self._layers):
            named.update((f"layers.{index}.{name}", parameter) for name, parameter in layer.parameters())
        if not self.arch.tie_embeddings:
            named.update((f"lm_head.{name}", parameter) for name, parameter in self._lm_head.parameters())
        return named

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        """Final hidden states [T, hidden] in the model's dtype, normed.

        token_ids [T] int64; kv [layers, blocks, 2, G, block_size, D], which holds the KV of all earlier positions of
        each row and receives that of these. A row's result depends on nothing but its own tokens.
        """
        x = torch.nn.functional.embedding(token_ids, self._embedding)
        residual: Tensor | None = None
        for index, layer in enumerate(self._layers):
            x, residual = layer(x, residual, batch, self._cos_sin, kv[index])
        assert residual is not None
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] fp32, rounded to the model's dtype on the way, as transformers does."""
        logits = self._lm_head(hidden).to(torch.float32)
        cap = self.arch.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _take_embedding(self, embedding: Tensor) -> None:
        self._embedding = embedding
        if self.arch.tie_embeddings:
            self._lm_head.take_weight(embedding)
