"""Schemes for the layouts of quantized checkpoints, and for matrices whose parts have different layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.arch.stored import Layout
from inferd.engine.arch.weights import Part
from inferd.engine.quant.fp8 import StoredFp8
from inferd.engine.quant.scheme import Apply, Dense, Scheme, TensorSpec
from inferd.kernels.linear import ANY, Choices


def scheme_of(parts: Sequence[Part], dtype: torch.dtype, choices: Choices = ANY) -> Scheme:
    """The scheme of a matrix with these parts. `dtype` is the activations' dtype."""
    schemes = [_scheme(part.layout, dtype, choices) for part in parts]
    return (
        schemes[0] if len(parts) == 1 else Joined(tuple(zip(schemes, (part.num_rows for part in parts), strict=True)))
    )


def _scheme(layout: Layout | None, dtype: torch.dtype, choices: Choices) -> Scheme:
    if layout is None:
        return Dense(choices)
    return StoredFp8(dtype, layout.has_blocks, layout.has_input_scale, choices.is_invariant)


@dataclass(frozen=True, slots=True)
class Joined:
    """A matrix in parts of some rows each. A part has a scheme of its own, and the outputs are joined."""

    parts: tuple[tuple[Scheme, int], ...]
    """(scheme, number of rows) of each part."""
    name: str = "joined"

    def check(self, out_size: int, in_size: int) -> None:
        for scheme, num_rows in self.parts:
            scheme.check(num_rows, in_size)

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """The tensors of part i have the names that its scheme gives them, after `parti.`."""
        return {
            f"part{number}.{name}": spec
            for number, (scheme, num_rows) in enumerate(self.parts)
            for name, spec in scheme.takes(num_rows, in_size, dtype).items()
        }

    @property
    def bind(self) -> Callable[..., Apply]:
        def bind(bias: Tensor | None, out_dtype: torch.dtype | None = None, **tensors: Tensor) -> Apply:
            applies, row = [], 0
            for number, (scheme, num_rows) in enumerate(self.parts):
                prefix = f"part{number}."
                own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                part_bias = None if bias is None else bias[row : row + num_rows]
                applies.append(scheme.bind(bias=part_bias, out_dtype=out_dtype, **own))
                row += num_rows
            return lambda x: torch.cat([apply(x) for apply in applies], 1)

        return bind
