"""Which layers have a sliding window: the ways in which configs say so.

A window that is at least as long as the model's longest sequence counts as none. So its layers share the block table of
full attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferd.engine.arch.fields import Fields

Windows = tuple[int | None, ...]
_IS_WINDOWED = {"full_attention": False, "sliding_attention": True}


def windowed_layers(fields: Fields, num_layers: int, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Whether each layer has a window: by `layer_types`, or without that list by `default` of the layer's index."""
    if fields.has("layer_types"):
        return fields.choices("layer_types", _IS_WINDOWED, num_layers)
    return tuple(default(layer) for layer in range(num_layers))


def windows_of(fields: Fields, windowed: Sequence[bool], max_positions: int) -> Windows:
    """`sliding_window` for the layers that have a window, None for the others."""
    if not any(windowed):
        return (None,) * len(windowed)
    window = fields.integer("sliding_window")
    return tuple(window if is_windowed and window < max_positions else None for is_windowed in windowed)


def in_every_layer(fields: Fields, num_layers: int, max_positions: int) -> Windows:
    """`sliding_window` for all layers; None for all if it is absent or null."""
    return windows_of(fields, (fields.has("sliding_window"),) * num_layers, max_positions)


def if_used(fields: Fields, num_layers: int, max_positions: int, default: Callable[[int], bool]) -> Windows:
    """The windows of `windowed_layers` if `use_sliding_window` is true; otherwise no layer has a window."""
    is_used = fields.boolean("use_sliding_window", default=False)
    if is_used:
        return windows_of(fields, windowed_layers(fields, num_layers, default), max_positions)
    if any(windowed_layers(fields, num_layers, default=lambda _: False)):
        raise fields.refuse("use_sliding_window", "must be true if layer_types names sliding_attention")
    return (None,) * num_layers
