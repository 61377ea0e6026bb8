"""The Triton implementation for weights of 4 bits (`gpu/integers.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from inferd.kernels.gpu import Shipped
from inferd.kernels.gpu.integers import bind, bind_invariant, forms

__all__ = ["bind", "bind_invariant", "shipped"]


def shipped() -> Iterator[Shipped]:
    return forms("linear_int4", 4)
