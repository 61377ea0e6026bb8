"""`Modelled`: what is known of a model that transformers' own modelling code computes.

A process that has torch finds it out (`engine/models/describe`). It crosses to other processes as JSON. It knows no
tensor library and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.arch.matrix import Axis, Component, LinearWeight, Weight


class ModellingError(Exception):
    """A model that cannot be served through transformers' code. The message says what it lacks."""


@dataclass(frozen=True, slots=True)
class ModelledTensor:
    """One tensor that the checkpoint must hold."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    component: Component
    own: str
    """Our name behind that of the layer: `attention.self_attn.q_proj`."""
    owner: str = ""
    leaf: str = "weight"
    """As of `Weight`."""

    @property
    def of(self) -> Weight:
        rows = (Axis(self.shape[0] if self.shape else 1),)
        known = self.own, self.component, rows, self.shape[1:], self.owner, self.leaf
        if len(self.shape) < 2 or self.component is Component.EMBEDDING:
            return Weight(*known)
        return LinearWeight(*known, is_quantizable=self.component is not Component.NORMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """Sizes of the model, its attention as its code asked for it, and its tensors."""

    architecture: str
    vocab_size: int
    hidden_size: int
    widest: int
    """Most outputs of a matrix of the layers."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    attention_scale: float
    attention_softcap: float | None
    windows: tuple[int | None, ...]
    """Number of last positions that each layer sees; None for all."""
    tie_embeddings: bool
    dtype: str
    tensors: tuple[ModelledTensor, ...]
    ties: tuple[str, ...] = ()
    """Names of tensors in the checkpoint that must equal the embedding."""
    unread: tuple[str, ...] = ()
    """Names of tensors in the checkpoint that transformers does not read either."""
