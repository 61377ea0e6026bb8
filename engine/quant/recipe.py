"""Which layers of a model are kept in what, by the name that a setting gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inferd.engine.quant.dense import Dense
from inferd.engine.quant.fp8 import Fp8
from inferd.engine.quant.int4 import Int4
from inferd.engine.quant.int8 import Int8
from inferd.engine.quant.scheme import Scheme
from inferd.kernels.linear import ANY, Choices


@dataclass(frozen=True, slots=True)
class Recipe:
    """Embedding, norms and biases stay in the model's dtype in every one."""

    layers: Scheme
    """The matrices of attention and MLP."""
    head: Scheme
    """The logits' matrix; where it is tied to the embedding, a copy."""
    exceptions: Mapping[str, Scheme] = field(default_factory=dict)
    """Matrices of the layers that are kept in another scheme, as the weight map calls them: `layers.0.mlp.down`."""


def recipes(choices: Choices = ANY) -> Mapping[str, Recipe]:
    """All there are. The head keeps 8 bits: one matrix in hundreds, whose error is seen in every token undamped.

    `choices` are those of a GPU's products.
    """
    dense, fp8 = Dense(choices), Fp8(choices.is_invariant)
    return {
        "none": Recipe(dense, dense),
        "fp8": Recipe(fp8, fp8),
        "int8": Recipe(Int8(), Int8()),
        "int4": Recipe(Int4(), Int8()),
    }


RECIPES = recipes()
UNQUANTIZED = RECIPES["none"]
