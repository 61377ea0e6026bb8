"""Where and as what a layer's parameters live: said once by who builds a decoder, passed down to every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Placement:
    """The dtype of weights and activations, and their device."""

    dtype: torch.dtype
    device: torch.device
