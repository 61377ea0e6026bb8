"""Schemes for the layouts of quantized checkpoints, and for matrices whose parts have different layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from inferd.engine.arch.sharding import Span, num_rows, within
from inferd.engine.arch.stored import Fp8Layout, IntLayout
from inferd.engine.arch.weights import MatrixPart
from inferd.engine.quant.fp8 import StoredFp8
from inferd.engine.quant.scheme import Apply, Scheme, TensorSpec
from inferd.kernels.ops.join import join
from inferd.kernels.ops.linear_int4 import linear_int4
from inferd.kernels.ops.linear_int8 import linear_int8
from inferd.kernels.ops.quantized import ROW_OF_BYTES, Matrix, rows_of

_PART_VALUES = 2**22
"""Number of values that are dequantized at once."""
_SCALES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def scheme_of(
    parts: Sequence[MatrixPart], dtype: torch.dtype, plain: Scheme, is_invariant: bool, *, as_declared: bool = False
) -> Scheme:
    """The scheme of a matrix with these parts. `dtype` is the activations' dtype, `plain` the scheme of parts that are
    not quantized. `as_declared`: activations are quantized as the checkpoint declares, if it does."""
    schemes = [_scheme(part, dtype, plain, is_invariant, as_declared) for part in parts]
    if len(parts) == 1:
        return schemes[0]
    return Joined(tuple(zip(schemes, (part.num_rows for part in parts), strict=True)))


def _scheme(part: MatrixPart, dtype: torch.dtype, plain: Scheme, is_invariant: bool, as_declared: bool) -> Scheme:
    match part.layout:
        case None:
            return plain
        case Fp8Layout(has_blocks, has_input_scale):
            return StoredFp8(dtype, has_blocks, has_input_scale, is_invariant)
        case IntLayout():
            modules = part.rows if part.layout.has_order else ()
            has_byte_rows = as_declared and part.layout.declares_activations
            return StoredIntegers(dtype, part.layout, modules, is_invariant, has_byte_rows)


@dataclass(frozen=True, slots=True)
class StoredIntegers:
    """Integers of a checkpoint as a kernel takes them. On CPUs activations are quantized to 8 bits in groups, or to 16
    bits by rows."""

    dtype: torch.dtype
    """Dtype of activations and results."""
    layout: IntLayout
    modules: tuple[int, ...]
    """With an order of inputs: numbers of rows of the stored matrices, each of which may have its own order."""
    is_invariant: bool = False
    """Whether a row's bits depend on that row alone, on a GPU too."""
    has_byte_rows: bool = False
    """Whether activations have 8 bits with one scale a row instead."""

    @property
    def name(self) -> str:
        return f"stored {self.layout.kind}"

    @property
    def input_group(self) -> int | None:
        """None if the inputs of a group may be any inputs."""
        return None if self.layout.has_order else self.layout.block_size or self.layout.group_size or 1

    def check(self, out_size: int, in_size: int) -> None:
        """The format has refused other shapes."""

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        layout, scale_dtype = self.layout, _SCALES[self.layout.scale_dtype]
        if layout.block_size is not None:
            scale_dtype = torch.int8
        groups = (out_size, 1 if layout.group_size is None else in_size // layout.group_size)
        is_short = layout.kind == "int4"
        given = {
            "q": TensorSpec((out_size, in_size), torch.uint8 if is_short else torch.int8),
            "scales": TensorSpec(groups, scale_dtype, group_columns=layout.group_size),
        }
        if layout.offsets == "zeros":
            zeros_dtype = torch.uint8 if is_short else torch.int16
            given["zeros"] = TensorSpec(groups, zeros_dtype, group_columns=layout.group_size)
        if layout.offsets == "minimums":
            given["minimums"] = TensorSpec(groups, scale_dtype, group_columns=layout.group_size)
        if layout.block_size is not None:
            blocks = (out_size, in_size // layout.block_size)
            for name in ("scales", "minimums"):
                if name in given:
                    given[f"block_{name}"] = TensorSpec(
                        blocks, _SCALES[layout.scale_dtype], group_columns=layout.block_size
                    )
        if layout.has_order:
            given["order"] = TensorSpec((len(self.modules), in_size), torch.int32, group_rows=None)
        return given

    def of_rows(self, rows: Sequence[Span]) -> StoredIntegers:
        starts = _starts(self.modules)
        own = (within(rows, start, size) for start, size in zip(starts, self.modules, strict=True))
        return replace(self, modules=tuple(num_rows(kept) for kept in own))

    @property
    def bind(self) -> Callable[..., Apply]:
        return self._bind

    def _bind(
        self,
        bias: Tensor | None,
        out_dtype: torch.dtype | None = None,
        order: Tensor | None = None,
        **tensors: Tensor,
    ) -> Apply:
        """`order` [modules, in] has each module's order of inputs. If all have one order, one kernel serves all."""
        orders = None if order is None else [None if _is_sorted(row) else row for row in order]
        if order is None or orders is None or (order == order[0]).all():
            parts = [(slice(None), None if orders is None else orders[0])]
        else:
            starts = _starts(self.modules)
            parts = [(slice(row, row + own), o) for row, own, o in zip(starts, self.modules, orders, strict=True)]

        return joined([self._linear(out_dtype, rows, bias, own, tensors) for rows, own in parts])

    def _linear(
        self,
        out_dtype: torch.dtype | None,
        rows: slice,
        bias: Tensor | None,
        order: Tensor | None,
        tensors: dict[str, Tensor],
    ) -> Apply:
        own = {name: tensor[rows] for name, tensor in tensors.items()}
        bias = None if bias is None else bias[rows]
        bits = self.layout.bits
        linear = partial(linear_int4, table=self.layout.table)
        if self.layout.kind == "int8":
            linear = partial(linear_int8, x_group_size=ROW_OF_BYTES if self.has_byte_rows else None)
        return linear(
            own["q"],
            own["scales"],
            bias,
            self.dtype,
            zeros=own.get("zeros"),
            minimums=own.get("minimums"),
            block_scales=own.get("block_scales"),
            block_minimums=own.get("block_minimums"),
            order=order,
            narrowed_to=None if bits in (4, 8) else bits,
            out_dtype=out_dtype,
            is_invariant=self.is_invariant,
        )

    def dequantized(self, dtype: torch.dtype, tensors: dict[str, Tensor]) -> Tensor:
        """The matrix [out, in] in `dtype`, of the tensors of `takes`. It has no zero points and no order."""
        given = tensors.get
        matrix = Matrix(
            tensors["q"],
            tensors["scales"],
            None,
            minimums=given("minimums"),
            table=self.layout.table,
            block_scales=given("block_scales"),
            block_minimums=given("block_minimums"),
        )
        num_rows, in_size = matrix.q.shape
        table = torch.empty((num_rows, in_size), dtype=dtype, device=matrix.q.device)
        step = max(1, _PART_VALUES // in_size)
        for row in range(0, num_rows, step):
            ids = torch.arange(row, min(row + step, num_rows), device=table.device)
            table[row : row + step] = rows_of(matrix, ids).to(dtype)
        return table


def _is_sorted(order: Tensor) -> bool:
    return torch.equal(order, torch.arange(len(order), dtype=order.dtype, device=order.device))


@dataclass(frozen=True, slots=True)
class Joined:
    """A matrix in parts of some rows each. A part has a scheme of its own, and the outputs are joined."""

    parts: tuple[tuple[Scheme, int], ...]
    """(scheme, number of rows) of each part."""
    name: str = "joined"

    @property
    def input_group(self) -> int | None:
        sizes = [scheme.input_group for scheme, _ in self.parts]
        known = [size for size in sizes if size is not None]
        return math.lcm(*known) if len(known) == len(sizes) else None

    def check(self, out_size: int, in_size: int) -> None:
        for scheme, size in self.parts:
            scheme.check(size, in_size)

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """The tensors of part i have the names that its scheme gives them, after `parti.`."""
        return {
            f"part{number}.{name}": replace(spec, first_row=row + spec.first_row)
            for number, ((scheme, size), row) in enumerate(zip(self.parts, self._rows, strict=True))
            for name, spec in scheme.takes(size, in_size, dtype).items()
        }

    def of_rows(self, rows: Sequence[Span]) -> Joined:
        own = [within(rows, row, size) for (_, size), row in zip(self.parts, self._rows, strict=True)]
        assert all(own), "a rank keeps rows of every part"
        parts = zip(self.parts, own, strict=True)
        return Joined(tuple((scheme.of_rows(kept), num_rows(kept)) for (scheme, _), kept in parts))

    @property
    def _rows(self) -> list[int]:
        """First row of each part."""
        return _starts([size for _, size in self.parts])

    @property
    def bind(self) -> Callable[..., Apply]:
        return self._bind

    def _bind(self, bias: Tensor | None, out_dtype: torch.dtype | None = None, **tensors: Tensor) -> Apply:
        applies = []
        for number, ((scheme, size), row) in enumerate(zip(self.parts, self._rows, strict=True)):
            prefix = f"part{number}."
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            part_bias = None if bias is None else bias[row : row + size]
            applies.append(scheme.bind(bias=part_bias, out_dtype=out_dtype, **own))
        return joined(applies)


def joined(applies: Sequence[Apply]) -> Apply:
    """A layer whose outputs are those of several layers, one after another."""
    if len(applies) == 1:
        return applies[0]
    return lambda x: join([apply(x) for apply in applies])


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]
