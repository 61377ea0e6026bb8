"""Where and as what a layer's parameters live: said once by who builds a decoder, passed down to every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferd.engine.quant.dense import DENSE
from inferd.engine.quant.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Placement:
    """The dtype of activations and of what is not quantized, the device, and what linear layers keep weights in."""

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme = DENSE
