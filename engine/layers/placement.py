"""Where and as what a layer's parameters live: said once by who builds a decoder, passed down to every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from inferd.engine.quant.dense import DENSE
from inferd.engine.quant.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Placement:
    """The dtype of activations and of what is not quantized, the device, and what linear layers keep weights in."""

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme = DENSE
    exceptions: Mapping[str, Scheme] = field(default_factory=dict)
    """By name, the matrices within this place that are kept in another scheme."""

    def within(self, prefix: str) -> Placement:
        """That of the modules whose names begin so; theirs are what is behind."""
        own = {name.removeprefix(prefix): kept for name, kept in self.exceptions.items() if name.startswith(prefix)}
        return replace(self, exceptions=own)

    def of(self, matrix: str) -> Placement:
        return replace(self, scheme=self.exceptions.get(matrix, self.scheme))
