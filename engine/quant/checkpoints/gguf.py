"""Reads the tensors of GGUF files, part by part: as numbers, or as the integers and scales of their blocks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.engine.api.pinned_files import source_of
from inferd.engine.arch.gguf.formats import GgufBlocks
from inferd.engine.arch.gguf.tensors import Conversion, PlacedTensor
from inferd.engine.arch.gguf.types import TYPES
from inferd.engine.arch.weights import QuantizedSource
from inferd.engine.quant.checkpoints.gguf_blocks import dequantize, unpack
from inferd.engine.quant.checkpoints.reader import DAMAGED, CheckpointError, Reader, Rows, Tensors

_PART_VALUES = 2**18
"""Number of values that are unpacked at once. Four times as many leave 30 MiB more in the allocator, and are no faster
(SmolLM2-135M, AMD EPYC Zen 4, busy, 2026-11-23)."""
_BLOCK_BYTES = {kind.name: kind.block_bytes for kind in TYPES.values()}


def parts(stored: PlacedTensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, values of some rows in fp32) of a tensor, in the order of the original checkpoint. Raises `OSError`
    if the file cannot be read."""
    shape, kind, conversion = stored.tensor.shape, stored.tensor.type, stored.conversion
    if len(shape) == 1:
        values = _original(dequantize(mapped(stored).view(-1, kind.block_bytes), kind.name).view(shape), conversion)
        yield 0, values if conversion.rows is None else values[conversion.rows.places(len(values))]
        return
    num_rows, row_values = shape[0], math.prod(shape[1:])
    stored_rows, step = mapped(stored).view(num_rows, -1), _rows_at_once(row_values)
    places = None if conversion.rows is None else conversion.rows.places(num_rows)
    columns = None if conversion.columns is None else conversion.columns.places(row_values)
    for row in range(0, num_rows, step):
        some = stored_rows[row : row + step] if places is None else stored_rows[places[row : row + step]]
        values = _original(dequantize(some.reshape(-1, kind.block_bytes), kind.name), conversion)
        values = values.view(-1, *shape[1:])
        yield row, values if columns is None else values[:, columns]


def _original(values: Tensor, conversion: Conversion) -> Tensor:
    """The values of the original tensor."""
    if conversion.is_decay:
        return torch.log(-values)
    return values - conversion.excess if conversion.excess else values


def _check(source: QuantizedSource, tensors: Tensors) -> None:
    """Scales lie between the weights, and are looked at when these are read."""


def _read(source: QuantizedSource, tensors: Tensors) -> Iterator[Rows]:
    form, (num_rows, in_size) = source.format, source.shape
    assert isinstance(form, GgufBlocks)
    blocks = tensors["weight"].view(num_rows, -1)
    places = None if form.rows is None else form.rows.places(num_rows)
    step = _rows_at_once(in_size)
    for row in range(0, num_rows, step):
        some = blocks[row : row + step] if places is None else blocks[places[row : row + step]]
        groups = unpack(some.reshape(-1, _BLOCK_BYTES[form.kind]), form.kind)
        for name, values in groups._asdict().items():
            if values is None:
                continue
            if values.is_floating_point() and not values.isfinite().all():
                count = int((~values.isfinite()).sum())
                raise CheckpointError(
                    f"{source.module}.weight must have finite {name}, but {count} of {values.numel()} in some rows "
                    f"are NaN or infinite: {DAMAGED}"
                )
            own = values.reshape(len(some), -1)
            yield Rows(name, source.row + row, own if form.columns is None else own[:, _columns(form, name, in_size)])


READER = Reader(_check, _read)


def _columns(form: GgufBlocks, name: str, in_size: int) -> list[int]:
    """The places in a row of the columns of the tensor `name`."""
    assert form.columns is not None
    group_size = 1 if name == "q" else form.layout.block_size if "block" in name else form.layout.group_size
    assert group_size is not None
    columns = form.columns.of_groups(group_size)
    assert columns is not None
    return columns.places(in_size // group_size)


def _rows_at_once(row_values: int) -> int:
    return max(1, _PART_VALUES // row_values)


def mapped(stored: PlacedTensor) -> Tensor:
    """The bytes of the tensor as a view of the file."""
    tensor = stored.tensor
    start = tensor.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with source_of(stored.file).open("rb") as file:
        num_bytes = tensor.begin - start + tensor.num_bytes
        # torch wants memory that it may write to. A copy is only made of a page that is written to, and none is.
        pages = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY, offset=start)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=tensor.begin - start, count=tensor.num_bytes)
