"""Device, dtype, quantization and ranks of a layer's parameters: passed by the decoder down to every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from inferd.engine.arch.matrix import Weight
from inferd.engine.layers.collectives import ALONE, Ranks
from inferd.engine.layers.parameter import Parameter
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe


class Lora(Protocol):
    """The updates of one matrix by LoRA adapters."""

    @property
    def is_used(self) -> bool:
        """Whether a row of the step has an adapter."""
        ...

    def add(self, y: Tensor, x: Tensor) -> None:
        """Add to y [T, out], in place, what the rows' adapters give for x [T, in]. Only if `is_used`."""
        ...


NO_LORAS: Mapping[str, Lora] = {}


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and storage of a layer's parameters, and the ranks that share them."""

    dtype: torch.dtype
    """Dtype of activations, and of parameters that are not quantized."""
    device: torch.device
    recipe: Recipe = UNQUANTIZED
    ranks: Ranks = ALONE
    """The processes that share the model."""
    loras: Mapping[str, Lora] = field(default_factory=dict)
    """Name of a matrix -> its updates by adapters. Empty if there are no adapters."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    """The parameters of all layers, by their names in the weight map. Each layer adds its own."""

    def take(self, weight: Weight, use: Callable[[Tensor], None], dtype: torch.dtype | None = None) -> None:
        """Add a parameter in `dtype` (default: that of activations). `use` gets the rows that this rank keeps."""
        rows = self.ranks.own.rows(weight)
        self.parameters[weight.parameter] = Parameter(weight.shape, dtype or self.dtype, self.device, use, rows)
