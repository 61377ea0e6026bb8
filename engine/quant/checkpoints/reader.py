"""The signature of a reader, and the checks that readers share. A reader turns the stored tensors of one matrix into
those that the scheme of its layout takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.engine.arch.weights import QuantizedSource

DAMAGED = "the file is damaged or was quantized wrongly; fetch it again, or quantize the model anew"

Tensors = Mapping[str, Tensor]
"""The stored tensors of one matrix, by their suffixes. They are views of the files."""


class CheckpointError(ValueError):
    """The weight files are damaged or contradict config.json. The message names the file or tensor, and the rule."""


class Rows(NamedTuple):
    """Rows of a tensor that a scheme takes."""

    name: str
    """Name of the tensor in `Scheme.takes`."""
    row: int
    """Its first row."""
    values: Tensor


class Reader(NamedTuple):
    """The functions of one format. Both take a matrix and its tensors. Both raise `CheckpointError` with the name of a
    tensor that no writer of the format would write."""

    check: Callable[[QuantizedSource, Tensors], None]
    """Looks at every tensor but the weights themselves, and runs for all matrices before any memory is taken."""
    read: Callable[[QuantizedSource, Tensors], Iterator[Rows]]


def check_scales(name: str, scales: Tensor, *, has_signs: bool = False) -> None:
    """Raises `CheckpointError` unless the numbers are finite and above 0, or with `has_signs` not 0."""
    scales = scales.to(torch.float32)
    is_good = scales.isfinite() & ((scales != 0) if has_signs else (scales > 0))
    if not is_good.all():
        rule = "other than 0" if has_signs else "above 0"
        raise CheckpointError(
            f"{name} must hold finite numbers {rule}, but holds {scales.min():.3g} to {scales.max():.3g}: {DAMAGED}"
        )


def check_range(name: str, values: Tensor, least: int, most: int) -> None:
    """Raises `CheckpointError` unless all integers are in this range."""
    low, high = (int(bound) for bound in values.aminmax())
    if low < least or high > most:
        raise CheckpointError(f"{name} must hold integers from {least} to {most}, but holds {low} to {high}: {DAMAGED}")


def check_only(name: str, values: Tensor, number: int, why: str) -> None:
    """Raises `CheckpointError` unless all values are `number`."""
    if not (values == number).all():
        raise CheckpointError(
            f"{name} must hold {number} only, {why}, but holds {values.min():.3g} to {values.max():.3g}: {DAMAGED}"
        )
