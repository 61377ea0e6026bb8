"""Device, dtype, quantization scheme and ranks of a layer's parameters: passed by the decoder down to every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from inferd.engine.layers.ranks import ALONE, Ranks
from inferd.engine.quant.scheme import DENSE, Scheme

T = TypeVar("T")


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
    loras: Mapping[str, Lora] = field(default_factory=dict)
    """Matrix name -> its updates by adapters, with names as in `exceptions`. Empty if there are no adapters."""
    lora: Lora | None = None
    """Those of the one matrix that this placement is for."""

    def within(self, prefix: str) -> Placement:
        """The placement of the submodule whose names begin with `prefix`, which is cut off the matrices' names."""
        return replace(self, exceptions=_within(prefix, self.exceptions), loras=_within(prefix, self.loras))

    def of(self, matrix: str) -> Placement:
        return replace(self, scheme=self.exceptions.get(matrix, self.scheme), lora=self.loras.get(matrix))


def _within(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): kept for name, kept in named.items() if name.startswith(prefix)}
