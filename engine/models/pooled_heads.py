"""The heads of a sentence-transformers folder, loaded: dense layers and layer norms of pooled vectors, in float32.

A row's bits depend on that row alone. The decoder's and the encoder's workers apply them after they have pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from inferd.engine.api.checkpoint import read_header
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.api.sentence_heads import WEIGHTS, DenseActivation, DenseHead, Head, UnitHead
from inferd.engine.models.loader import check_finite, read_tensor
from inferd.engine.quant.checkpoints.reader import CheckpointError
from inferd.kernels.ops.gelu import gelu_erf
from inferd.kernels.ops.layer_norm import layer_norm
from inferd.kernels.ops.linear import ANY, Choices, linear

Apply = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[DenseActivation, Apply] = {
    DenseActivation.IDENTITY: lambda x: x,
    DenseActivation.TANH: torch.tanh_,
    DenseActivation.RELU: torch.relu_,
    DenseActivation.GELU_ERF: gelu_erf,
}
_NORM_EPS = 1e-5
"""That of torch's LayerNorm, which sentence-transformers leaves as it is."""


class PooledHeads:
    """All heads of a model, one after the other."""

    def __init__(self, heads: Sequence[Apply] = (), num_outputs: int | None = None) -> None:
        """`num_outputs`: components behind the last one; None without heads."""
        self._heads, self.num_outputs = tuple(heads), num_outputs

    @classmethod
    def of(
        cls,
        path: Path,
        sentences: SentenceFolder,
        hidden_size: int,
        device: torch.device | str,
        choices: Choices = ANY,
    ) -> PooledHeads:
        """The heads in the model's folder `path`, of vectors with `hidden_size` components. `choices` as of `linear`.
        Raises `CheckpointError` for files that cannot be read, or that were made for vectors of another size."""
        if sentences.heads and sentences.heads[0].num_inputs != hidden_size:
            raise CheckpointError(
                f"{path / sentences.heads[0].folder} takes vectors of {sentences.heads[0].num_inputs} components, but "
                f"the model's hidden states have {hidden_size}"
            )
        return cls([_loaded(path, head, device, choices) for head in sentences.heads], sentences.num_outputs)

    def apply(self, pooled: Tensor) -> Tensor:
        """[rows, hidden] fp32 -> [rows, outputs] fp32."""
        for head in self._heads:
            pooled = head(pooled)
        return pooled


NO_HEADS = PooledHeads()


def _scaled(x: Tensor) -> Tensor:
    """Each row at length 1; a row of zeros stays as it is."""
    wide = x.to(torch.float64)
    lengths = wide.square().sum(dim=-1, keepdim=True).sqrt()
    return (wide / lengths.masked_fill(lengths == 0.0, 1.0)).to(torch.float32)


def _loaded(path: Path, head: Head, device: torch.device | str, choices: Choices) -> Apply:
    if isinstance(head, UnitHead):
        return _scaled
    tensors: dict[str, Tensor] = {}
    for info in read_header(path / head.folder / WEIGHTS):
        tensors[info.name] = read_tensor(info).to(device, torch.float32)
        check_finite(info.name, tensors[info.name])
    if not isinstance(head, DenseHead):
        weight, bias = tensors["norm.weight"], tensors["norm.bias"]
        return lambda x: layer_norm(x, weight, bias, _NORM_EPS)
    multiply = linear(tensors["linear.weight"], tensors.get("linear.bias"), choices)
    activate = _ACTIVATIONS[head.activation]
    if not head.has_residual:
        return lambda x: activate(multiply(x))
    again = linear(tensors["residual.weight"], None, choices) if "residual.weight" in tensors else None
    return lambda x: activate(multiply(x)) + (x if again is None else again(x))
