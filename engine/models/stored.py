"""What the decoder of a checkpoint keeps its weights in: what was asked for, or what the checkpoint stores them in."""

from __future__ import annotations

import torch

from inferd.engine.arch.description import Arch, Scales
from inferd.engine.arch.registry import weights
from inferd.engine.quant.fp8 import StoredFp8
from inferd.engine.quant.recipe import Recipe, recipes
from inferd.kernels.linear import ANY, Choices


def recipe_of(arch: Arch, quantization: str, dtype: torch.dtype, choices: Choices = ANY) -> Recipe:
    """`quantization` is the name of a recipe; a checkpoint that is quantized keeps what it has, whatever was asked for.
    `dtype` is that of activations, `choices` are those of a GPU's products."""
    stored, known = arch.stored, recipes(choices)
    if stored is None:
        return known[quantization]
    layers = StoredFp8(dtype, stored.scales is Scales.BLOCK, stored.input_scale is not None, choices.is_invariant)
    plain = known["none"]
    left_out = dict.fromkeys(weights(arch).plain_matrices, plain.layers)
    return Recipe(layers, layers if stored.has_head else plain.head, left_out)
