"""The signature of a reader, and the checks that readers share. A reader turns the stored tensors of one matrix into
those that the scheme of its layout takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from inferd.engine.arch.weights import QuantizedSource

DAMAGED = "the file is damaged or was quantized wrongly; fetch it again, or quantize the model anew"


class CheckpointError(ValueError):
    """The weight files are damaged or contradict config.json. The message names the file or tensor, and the rule."""


class Rows(NamedTuple):
    """Rows of a tensor that a scheme takes."""

    name: str
    """Name of the tensor in `Scheme.takes`."""
    row: int
    """Its first row."""
    values: Tensor


Read = Callable[[QuantizedSource, Mapping[str, Tensor]], Iterator[Rows]]
"""Takes a matrix and its tensors by their suffixes. Raises `CheckpointError` with the name of a tensor that no writer
of the format would write."""


def check_scales(name: str, scales: Tensor) -> None:
    """Raises `CheckpointError` unless the numbers are finite and above 0."""
    if not (scales.isfinite() & (scales > 0)).all():
        raise CheckpointError(
            f"{name} must hold finite numbers above 0, but holds {scales.min():.3g} to {scales.max():.3g}: {DAMAGED}"
        )
