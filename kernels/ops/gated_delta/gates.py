"""Inputs of the gated delta rule beside q, k and v."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Gates(NamedTuple):
    """The inputs of `decay` and `beta`, for Hv value heads."""

    b: Tensor
    """[T, Hv], its heads side by side."""
    a: Tensor
    """[T, Hv], its heads side by side."""
    a_log: Tensor
    """[Hv] fp32."""
    dt_bias: Tensor
    """[Hv] fp32."""
