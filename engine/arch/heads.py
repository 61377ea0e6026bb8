"""The heads of each layer's attention, and how layers share the blocks of the KV pool.

It knows layers by their numbers only, and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.engine.arch import paging

_MAX_UNUSED_PLANES = 0.15
"""Share of the KV memory that may stay unused in order to have fewer block tables."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_v: bool = True
    """Whether v has a projection. Otherwise it is the projection of k, before k's norm and rotation."""
    kv_layer: int | None = None
    """Layer whose K and V this one reads, because it has none of its own."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table per request, because they see the same positions.

    Any block can serve any group of the model: it has as many planes of memory as the largest group needs. A plane has
    space for the layer with the largest K and V. Of layers with smaller ones, several share a plane.
    """

    window: int | None
    layers: tuple[int, ...]
    num_sharing: int = 1
    """Number of layers that share a plane. `layers[i]` uses part i % `num_sharing` of plane i // `num_sharing`."""

    @property
    def num_planes(self) -> int:
        return -(-len(self.layers) // self.num_sharing)

    def max_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks of this group that a sequence of `num_tokens` needs at once, at up to `step_tokens` a step."""
        return paging.max_blocks(self.window, num_tokens, step_tokens, block_size)


def grouped(layers: Mapping[int, tuple[int | None, int]]) -> tuple[CacheGroup, ...]:
    """The cache groups of `layers`: number -> (window or None, size of K). Those that see all come first, then windows,
    widest first.

    One pool serves all groups, and a block has as many planes as the largest group needs. So each kind of layer is cut
    into groups of as many planes: the most that leave at most `_MAX_UNUSED_PLANES` of the memory unused.
    """
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for layer, kind in layers.items():
        kinds.setdefault(kind, []).append(layer)
    ordered = sorted(kinds, key=lambda kind: (kind[0] is not None, -(kind[0] or 0), -kind[1]))
    largest = max(size for _, size in kinds)
    sharing = {kind: largest // kind[1] for kind in kinds}

    def planes(num_planes: int) -> int:
        """Number of planes of all groups, if each has so many."""
        return sum(-(-len(own) // (num_planes * sharing[kind])) * num_planes for kind, own in kinds.items())

    smallest = min(-(-len(own) // sharing[kind]) for kind, own in kinds.items())
    allowed = sum(len(own) * size for (_, size), own in kinds.items()) / largest * (1 + _MAX_UNUSED_PLANES)
    num_planes = next((count for count in range(smallest, 0, -1) if planes(count) <= allowed), 1)
    return tuple(
        CacheGroup(kind[0], tuple(kinds[kind][first : first + num_planes * sharing[kind]]), sharing[kind])
        for kind in ordered
        for first in range(0, len(kinds[kind]), num_planes * sharing[kind])
    )
