"""Reads the tensors of GGUF files, part by part: as numbers, or as the integers and scales of their blocks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.engine.api.pinned_files import source_of
from inferd.engine.arch.gguf.formats import GgufBlocks
from inferd.engine.arch.gguf.tensors import PlacedTensor
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
    shape, kind, num_heads = stored.tensor.shape, stored.tensor.type, stored.conversion.paired_heads
    num_rows, row_values = shape[0], math.prod(shape[1:])
    head_rows = num_rows // num_heads if num_heads else 1
    step = _rows_at_once(row_values, head_rows) if len(shape) > 1 else num_rows
    stored_bytes = mapped(stored)
    for row in range(0, num_rows, step):
        end = min(row + step, num_rows)
        first, last = (at * row_values // kind.block_size * kind.block_bytes for at in (row, end))
        values = dequantize(stored_bytes[first:last].view(-1, kind.block_bytes), kind.name).view(-1, *shape[1:])
        if stored.conversion.excess:
            values = values - stored.conversion.excess
        yield row, _unpaired(values, head_rows) if num_heads else values


def _check(source: QuantizedSource, tensors: Tensors) -> None:
    """Scales lie between the weights, and are looked at when these are read."""


def _read(source: QuantizedSource, tensors: Tensors) -> Iterator[Rows]:
    form, (num_rows, in_size) = source.format, source.shape
    assert isinstance(form, GgufBlocks)
    blocks = tensors["weight"].view(num_rows, -1)
    head_rows = num_rows // form.paired_heads if form.paired_heads else 1
    step = _rows_at_once(in_size, head_rows)
    for row in range(0, num_rows, step):
        some = blocks[row : row + step]
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
            yield Rows(name, source.row + row, _unpaired(own, head_rows) if form.paired_heads else own)


READER = Reader(_check, _read)


def _rows_at_once(row_values: int, head_rows: int) -> int:
    """Whole heads, of about `_PART_VALUES` values."""
    return max(1, _PART_VALUES // (row_values * head_rows)) * head_rows


def mapped(stored: PlacedTensor) -> Tensor:
    """The bytes of the tensor as a view of the file."""
    tensor = stored.tensor
    start = tensor.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with source_of(stored.file).open("rb") as file:
        num_bytes = tensor.begin - start + tensor.num_bytes
        # torch wants memory that it may write to. A copy is only made of a page that is written to, and none is.
        pages = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY, offset=start)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=tensor.begin - start, count=tensor.num_bytes)


def _unpaired(values: Tensor, head_rows: int) -> Tensor:
    """The rows of each head in the original order: first those at even places, then those at odd ones."""
    halves = values.view(-1, head_rows // 2, 2, *values.shape[1:]).transpose(1, 2)
    return halves.reshape(values.shape)
