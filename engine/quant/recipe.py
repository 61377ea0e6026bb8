"""Which layers of a model are kept in what, by the name that a setting gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.engine.quant.dense import DENSE
from inferd.engine.quant.int4 import Int4
from inferd.engine.quant.int8 import Int8
from inferd.engine.quant.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Recipe:
    """Embedding, norms and biases stay in the model's dtype in every one."""

    layers: Scheme
    """The matrices of attention and MLP."""
    head: Scheme
    """The logits' matrix; where it is tied to the embedding, a copy."""


RECIPES: Mapping[str, Recipe] = {
    "none": Recipe(DENSE, DENSE),
    "int8": Recipe(Int8(), Int8()),
    "int4": Recipe(Int4(), Int8()),
}
"""The head keeps 8 bits: it is one matrix in hundreds, and its error is seen in every token undamped."""
UNQUANTIZED = RECIPES["none"]
