"""Recipes: which scheme stores the weights of which layers, by the names that `--quantization` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inferd.engine.quant.fp8 import Fp8
from inferd.engine.quant.integer import Int4, Int8
from inferd.engine.quant.scheme import Dense, Scheme
from inferd.kernels.linear import ANY, Choices


@dataclass(frozen=True, slots=True)
class Recipe:
    """A scheme for each linear layer. Embedding, norms and biases always stay in the model's dtype."""

    layers: Scheme
    """Scheme of the matrices of attention and MLP."""
    head: Scheme
    """Scheme of the logits' matrix. If that matrix is tied to the embedding, the scheme stores a copy."""
    exceptions: Mapping[str, Scheme] = field(default_factory=dict)
    """Matrices of the layers that another scheme stores, by their names in the weight map: `layers.0.mlp.down`."""


def recipes(choices: Choices = ANY) -> Mapping[str, Recipe]:
    """All recipes, by name. The head keeps at least 8 bits: it is one matrix in hundreds, and its error reaches every
    token undamped.

    `choices` restricts the kernels of a GPU's products.
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
