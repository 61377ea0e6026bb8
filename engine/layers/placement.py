"""Device, dtype, quantization scheme and ranks of a layer's parameters: passed by the decoder down to every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from inferd.engine.layers.ranks import ALONE, Ranks
from inferd.engine.quant.scheme import DENSE, Scheme


@dataclass(frozen=True, slots=True)
class Placement:
    """Dtype of activations and of parameters that are not quantized, the device, and the scheme of linear layers."""

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme = DENSE
    exceptions: Mapping[str, Scheme] = field(default_factory=dict)
    """Matrix name -> scheme, for matrices that do not use `scheme`. Names are relative to this placement's module."""
    dense: Scheme = DENSE
    """The scheme of routers, which are never quantized."""
    ranks: Ranks = ALONE
    """The processes that share the model."""

    def within(self, prefix: str) -> Placement:
        """The placement of the submodule whose names begin with `prefix`, which is cut off the exceptions' names."""
        own = {name.removeprefix(prefix): kept for name, kept in self.exceptions.items() if name.startswith(prefix)}
        return replace(self, exceptions=own)

    def of(self, matrix: str) -> Placement:
        return replace(self, scheme=self.exceptions.get(matrix, self.scheme))
