"""Recipes: which scheme stores the weights of which layers, by the names that `--quantization` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrices import layer_matrices
from inferd.engine.arch.matrix import Component, LinearWeight
from inferd.engine.arch.sharding import Rank
from inferd.engine.quant.fp8 import Fp8
from inferd.engine.quant.integer import Int4, Int8
from inferd.engine.quant.scheme import DENSE, Dense, Scheme
from inferd.kernels.ops.linear import ANY, Choices


@dataclass(frozen=True, slots=True)
class Recipe:
    """A scheme for each linear layer. Norms and biases always stay in the model's dtype."""

    layers: Scheme
    """Scheme of the matrices of attention and MLP."""
    head: Scheme
    """Scheme of the logits' matrix. If that matrix is tied to the embedding, the scheme stores a copy."""
    exceptions: Mapping[str, Scheme] = field(default_factory=dict)
    """Matrices of the layers that another scheme stores, by their names in the weight map: `layers.0.mlp.down`."""
    dense: Scheme = DENSE
    """Scheme of the routers of experts, which are never quantized."""
    narrow: torch.dtype | None = None
    """Dtype of the embedding, with 16 bits, in a float32 model; None: the model's dtype."""

    def scheme_of(self, matrix: LinearWeight) -> Scheme:
        """The scheme that stores this matrix."""
        if not matrix.is_quantizable:
            return self.dense
        return self.head if matrix.component is Component.HEAD else self.exceptions.get(matrix.name, self.layers)


def cut_groups(arch: Arch, recipe: Recipe, rank: Rank) -> str | None:
    """Why ranks cannot split the matrices `o` and `down` by their inputs: what shares a number would be cut. None if
    they can. All ranks find the same."""
    assert rank.splits_inputs
    for matrix in layer_matrices(arch):
        starts = [replace(rank, index=i).columns(matrix) for i in range(rank.count)]
        if starts[0] is None:
            continue
        scheme = recipe.scheme_of(matrix)
        group = scheme.input_group
        if group is None:
            return f"{matrix.name} in {scheme.name} has groups of any inputs"
        if any(columns is not None and columns[0] % group for columns in starts):
            return f"{rank.count} ranks would cut groups of {group} inputs of {matrix.name} in {scheme.name}"
    return None


def recipes(
    choices: Choices = ANY, narrow: torch.dtype | None = None, *, of_encoder: bool = False
) -> Mapping[str, Recipe]:
    """All recipes, by name. The head keeps at least 8 bits as an integer: it is one matrix in hundreds, and its error
    reaches every token undamped. In e4m3 it would cost as much as all other matrices together.

    `choices` restricts the kernels of a GPU's products. `narrow`: dtype with 16 bits that the embedding and dense
    layers of a float32 model keep. `of_encoder`: 8 bits share a scale in groups of 128.
    """
    is_invariant = choices.is_invariant
    dense, fp8, int8 = Dense(choices, narrow), Fp8(is_invariant), Int8(is_invariant, has_long_groups=of_encoder)
    layers_and_head: dict[str, tuple[Scheme, Scheme]] = {
        "none": (dense, dense),
        "fp8": (fp8, dense),
        "int8": (int8, int8),
        "int4": (Int4(is_invariant), int8),
    }
    return {name: Recipe(layers, head, dense=dense, narrow=narrow) for name, (layers, head) in layers_and_head.items()}


RECIPES = recipes()
UNQUANTIZED = RECIPES["none"]
