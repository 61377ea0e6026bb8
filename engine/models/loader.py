"""Loads a checkpoint's weights into a model: tensor by tensor, each copied once, every parameter proven complete.

It reads safetensors and GGUF only, because a pickled checkpoint can carry code. Before it reads any weights, it
compares the headers with the architecture and reports every difference at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferd.engine.api.checkpoint import TensorInfo
from inferd.engine.api.pinned_files import source_of
from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.encoder_registry import weights_of
from inferd.engine.arch.matrices import head as head_matrix
from inferd.engine.arch.weights import QuantizedSource, RowOrder, Source, WeightMap
from inferd.engine.layers.parameter import Parameter
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.draft_head import DraftHead
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.packed_decoder import PackedDecoder
from inferd.engine.quant.checkpoints import gguf
from inferd.engine.quant.checkpoints.reader import DAMAGED, CheckpointError, Rows
from inferd.engine.quant.checkpoints.registry import READERS
from inferd.engine.quant.recipe import Recipe, recipes
from inferd.engine.quant.scheme import Dense
from inferd.engine.quant.stored_schemes import scheme_of
from inferd.kernels.ops.linear import ANY, Choices

AnyModel = Decoder | DraftHead | Encoder | PackedDecoder
Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each tensor or quantized matrix."""


def recipe_of(
    arch: Arch | EncoderArch,
    quantization: str,
    dtype: torch.dtype,
    choices: Choices = ANY,
    narrow: torch.dtype | None = None,
    *,
    as_declared: bool = False,
) -> Recipe:
    """How the model of a checkpoint stores its weights: by the recipe named `quantization`, unless the checkpoint is
    quantized. A quantized checkpoint keeps its own format.

    `dtype` is the activations' dtype. `choices` restricts the kernels of a GPU's products. `narrow`: dtype with 16 bits
    that the embedding and dense layers of a float32 model keep. `as_declared`: activations are quantized as the
    checkpoint declares, if it does.
    """
    if arch.stored is None:
        return recipes(choices, narrow, of_encoder=isinstance(arch, EncoderArch))[quantization]
    plain = Dense(choices, narrow)
    schemes = {
        matrix: scheme_of(parts, dtype, plain, choices.is_invariant, as_declared=as_declared)
        for matrix, parts in weights_of(arch).parts().items()
    }
    head = plain if isinstance(arch, EncoderArch) else schemes.pop(head_matrix(arch).name, plain)
    most = Counter(schemes.values()).most_common(1)[0][0]
    exceptions = {matrix: scheme for matrix, scheme in schemes.items() if scheme != most}
    return Recipe(most, head, exceptions, plain, narrow)


def load(
    model: AnyModel,
    stored: Mapping[str, TensorInfo],
    progress: Progress | None = None,
    copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> int:
    """Fill every parameter of `model` from the tensors of a `Checkpoint`, by `copy(goal, values)`; returns the bytes
    read.

    Raises `CheckpointError` before anything is loaded if tensors are missing, unexpected, or differ from config.json in
    shape or dtype. Raises it too if a file cannot be read.
    """
    weight_map = weights_of(model.arch)
    _check(weight_map, stored)
    parameters = model.parameters
    loads = [_Load.of(source, stored) for source in weight_map.all_sources]
    for own in loads:
        own.check()
    total, done = sum(own.num_bytes for own in loads), 0
    for own in sorted(loads, key=lambda own: (own.file, own.source.parameter)):
        for name, row, values in own.rows(parameters):
            parameters[name].write(row, values, copy)
        done += own.num_bytes
        if progress is not None:
            progress(done, total)
    incomplete = {name: parameter.missing_rows for name, parameter in parameters.items() if parameter.missing_rows}
    assert not incomplete, f"rows that no tensor filled: {incomplete}"
    return done


@dataclass(frozen=True, slots=True)
class _Load:
    """A source, and its tensors in the files by their suffixes."""

    source: Source | QuantizedSource
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def of(cls, source: Source | QuantizedSource, stored: Mapping[str, TensorInfo]) -> _Load:
        if isinstance(source, Source):
            return cls(source, {"": stored[source.tensor]})
        return cls(source, {t.suffix: stored[name] for name, t in source.tensors.items() if name in stored})

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def file(self) -> Path:
        return min(tensor.file for tensor in self.tensors.values())

    def rows(self, parameters: Mapping[str, Parameter]) -> Iterator[Rows]:
        """Rows of our parameters. Of a tensor that is not quantized only the rows that this rank keeps are read.

        Raises `CheckpointError` for numbers that no checkpoint should hold.
        """
        source = self.source
        if isinstance(source, Source):
            parameter = parameters[source.parameter]
            for first, part in _parts(self.tensors[""]):
                part = _in_order(source.row_order, part)
                for row, values in parameter.needed(source.row + first, part):
                    yield _floats(source, row, values, parameter.dtype)
            return
        rows = READERS[source.format.name].read(source, self._read())
        for suffix, row, values in rows if source.row_order is None else _reordered(source, rows):
            name = f"{source.matrix}.{suffix}"
            yield Rows(name, row, parameters[name].cut(values))

    def check(self) -> None:
        """Raises `CheckpointError` for a quantized matrix whose tensors beside the weights are wrong."""
        if isinstance(self.source, QuantizedSource):
            READERS[self.source.format.name].check(self.source, self._read())

    def _read(self) -> dict[str, Tensor]:
        return {suffix: read_tensor(tensor) for suffix, tensor in self.tensors.items()}


def _check(weight_map: WeightMap, stored: Mapping[str, TensorInfo]) -> None:
    differences = weight_map.compare({name: tensor.shape for name, tensor in stored.items()})
    if differences:
        raise CheckpointError(f"the weights contradict config.json: {differences}")
    dtypes = {name: tensor.dtype for name, tensor in stored.items() if tensor.gguf is None}
    for name, dtype, known in weight_map.wrong_dtypes(dtypes):
        raise CheckpointError(
            f"{name} in {stored[name].file} is stored as {dtype}; by config.json it is one of: {', '.join(known)}"
        )
    for tie in weight_map.ties:
        if tie.tensor in stored and not torch.equal(read_tensor(stored[tie.tensor]), read_tensor(stored[tie.equals])):
            raise CheckpointError(
                f"config.json ties {tie.tensor} to {tie.equals}, but the checkpoint stores both and they differ"
            )


def _parts(tensor: TensorInfo) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a tensor. That of a GGUF file is dequantized part by part."""
    if tensor.gguf is None:
        values = read_tensor(tensor)
        yield 0, values if values.dim() else values[None]
        return
    try:
        yield from gguf.parts(tensor.gguf)
    except OSError as error:
        raise CheckpointError(f"cannot read {tensor.file}: {error}") from error


def _in_order(row_order: RowOrder | None, values: Tensor) -> Tensor:
    """Rows of whole heads, in the order of our matrix."""
    return values if row_order is None else values[row_order.order(len(values))]


def _reordered(source: QuantizedSource, rows: Iterator[Rows]) -> Iterator[Rows]:
    """The same rows, in the order of our matrix. A reader may cut heads, so whole tensors are put
    together. Tensors with another number of rows than the matrix, such as scales of blocks, stay as they are."""
    tensors: dict[str, list[Rows]] = {}
    for some in rows:
        tensors.setdefault(some.name, []).append(some)
    for name, parts in tensors.items():
        values = torch.cat([part.values for part in parts])
        if len(values) == source.shape[0]:
            values = _in_order(source.row_order, values)
        yield Rows(name, parts[0].row, values)


def _floats(source: Source, row: int, values: Tensor, dtype: torch.dtype) -> Rows:
    """The rows of a parameter in `dtype`, from its row `row` on. Raises `CheckpointError` for NaN and infinities.
    Ids stay whole numbers."""
    if not values.dtype.is_floating_point:
        return Rows(source.parameter, row, values)
    if torch.finfo(values.dtype).max > torch.finfo(dtype).max:
        values = values.to(dtype)  # a large number becomes infinite here
    check_finite(source.tensor, values)
    return Rows(source.parameter, row, values)


def check_finite(name: str, values: Tensor) -> None:
    """Raises `CheckpointError` for NaN and infinities.

    The sum of the values is not finite if one of them is not. If the sum only overflowed, the extremes are finite.
    Summing runs at 21 GB/s on one core, copying at 10 (AMD EPYC Zen 4, busy, 2026-11-22).
    """
    if not values.sum().isfinite() and not all(bound.isfinite() for bound in values.aminmax()):
        count = int((~values.isfinite()).sum())
        raise CheckpointError(
            f"{name} must hold finite numbers, but {count} of its {values.numel()} values are NaN or infinite in "
            f"{str(values.dtype).removeprefix('torch.')}: {DAMAGED}"
        )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(source_of(file), framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or no safetensors file: {error}") from error


def read_tensor(stored: TensorInfo) -> Tensor:
    """The tensor, as a view of the file, which is opened anew each time so that only one tensor is mapped at once. Of a
    tensor in a GGUF file, its bytes."""
    if stored.gguf is not None:
        try:
            return gguf.mapped(stored.gguf)
        except OSError as error:
            raise CheckpointError(f"cannot read {stored.file}: {error}") from error
    with _opened(stored.file) as handle:
        if stored.part is None:
            tensor: Tensor = handle.get_tensor(stored.name)
            return tensor
        place, first = stored.part, stored.part.first_row
        whole = handle.get_slice(stored.name)
        if place.step == 1 and not place.is_transposed:
            part: Tensor = whole[place.expert, first : first + place.num_rows]
        else:
            rows = whole[place.expert]
            part = (rows.T if place.is_transposed else rows)[first :: place.step]
        return part.reshape(place.shape)
