"""The weights of all adapters for one matrix, as kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.kernels.gpu import from_host

PANEL = 64
"""Number of outputs whose weights lie side by side (`cpu.cpp` has the same)."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Weights of N adapters for a matrix [out, in] whose outputs belong to P parts, one after the other. What lies
    behind an adapter's own rank may be anything."""

    down: Tensor
    """[N, P, rank, in]: A of each part."""
    up: Tensor
    """[N, panels, rank, 64]: B transposed, in panels of outputs of one part. The last panel of a part may be wider than
    what is left."""
    panels: Tensor
    """[panels, 3] int32: first output, number of outputs and part."""
    ranks: Tensor
    """[N, P] int32: 0 for a part that the adapter leaves alone."""
    scales: Tensor
    """[N, P] fp32."""
    panels_of: Sequence[slice]
    """Panels of each part."""

    @classmethod
    def empty(
        cls,
        num_adapters: int,
        rank: int,
        in_size: int,
        part_sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        empty: Callable[[Sequence[int], torch.dtype], Tensor] | None = None,
    ) -> LoraWeights:
        """Space for adapters of up to `rank`, none of which has weights yet. `empty` makes the two large tensors."""
        empty = empty or (lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=device))
        panels, panels_of, start = list[tuple[int, int, int]](), list[slice](), 0
        for part, size in enumerate(part_sizes):
            first_panel = len(panels)
            panels += [(start + first, min(PANEL, size - first), part) for first in range(0, size, PANEL)]
            panels_of.append(slice(first_panel, len(panels)))
            start += size
        shape = (num_adapters, len(part_sizes))
        return cls(
            down=empty((*shape, rank, in_size), dtype),
            up=empty((num_adapters, len(panels), rank, PANEL), dtype),
            panels=torch.tensor(panels, dtype=torch.int32, device=device),
            ranks=torch.zeros(shape, dtype=torch.int32, device=device),
            scales=torch.zeros(shape, dtype=torch.float32, device=device),
            panels_of=panels_of,
        )

    def put(self, adapter: int, part: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Give an adapter its weights of one part, which lie on the host: a [r, in], b [outputs of the part, r]. Does
        not wait for the device."""
        rank, padded = a.shape[0], torch.nn.functional.pad(b, (0, 0, 0, -b.shape[0] % PANEL))
        up = padded.view(-1, PANEL, rank).transpose(1, 2).to(self.up.dtype)
        self.down[adapter, part, :rank] = from_host(a.to(self.down.dtype), self.down.device)
        self.up[adapter, self.panels_of[part], :rank] = from_host(up.contiguous(), self.up.device)
        self.ranks[adapter, part], self.scales[adapter, part] = rank, scale

    def clear(self, adapter: int) -> None:
        """Have an adapter leave all parts alone."""
        self.ranks[adapter] = 0
