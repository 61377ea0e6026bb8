"""A linear layer: its parameters and their shapes. The scheme of its placement stores the weight and multiplies.

`Recipe.scheme_of` gives the matrix its `Scheme`. Once its tensors are there, `Scheme.bind` gives them to an op in
`kernels/ops`, such as `linear` or `linear_int4`. The op resolves which implementation binds them: in C++ `linear/cpu`
or `int_product`. That one returns a `Product` of `kernels/cpu/native`. A call of this layer calls it, and
`Product.run` calls the C++ function.

A rank has some of the layer's outputs. It may gather the others' at once, or leave that to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from inferd.engine.arch.matrix import LinearWeight
from inferd.engine.arch.sharding import num_rows
from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.engine.quant.scheme import Apply, TensorSpec
from inferd.kernels.ops.linear import fused
from inferd.kernels.ops.linear.fused import FewRows, Gate
from inferd.kernels.ops.linear_fp8 import TakesFp8
from inferd.kernels.ops.quantize_fp8 import Quantized

Gather = Callable[[Tensor, int], Tensor]
"""[T, outputs of this rank] and the number of all outputs -> [T, all outputs]: `Ranks.gather` or `Ranks.outputs`."""


class Linear:
    """The linear layer of a matrix: [T, in_size] -> [T, out_size] in `out_dtype`: the placement's dtype (None), or
    float32. Usable when all its parameters are written.

    A rank keeps some rows of the matrix. It returns those outputs alone, or all if it has a `gather`. If ranks split
    the matrix by its inputs, a rank takes its own alone, `gather` adds up what all ranks give, and the first rank adds
    the bias. `when_bound` is called once the layer is usable. Raises `QuantizationError` for a shape that the
    matrix's scheme cannot store.
    """

    def __init__(
        self,
        matrix: LinearWeight,
        place: Placement,
        out_dtype: torch.dtype | None = None,
        *,
        gather: Gather | None = None,
        when_bound: Callable[[], None] | None = None,
    ) -> None:
        own, scheme = place.ranks.own, place.recipe.scheme_of(matrix)
        out_size, in_size, rows, columns = matrix.num_rows, matrix.num_inputs, own.rows(matrix), own.columns(matrix)
        scheme.check(out_size, in_size if columns is None else columns[1] - columns[0])
        self._scheme, self._dtype, self._out_dtype = scheme.of_rows(rows), place.dtype, out_dtype
        self._rows, self._out_size = rows, out_size
        self._gather = None if num_rows(rows) == out_size and columns is None else gather
        self._when_bound = when_bound
        self._lora = place.loras.get(matrix.name)
        self._apply: Apply | None = None
        self._few_rows: FewRows | None = None
        self._takes_fp8: TakesFp8 | None = None
        needed = dict(scheme.takes(out_size, in_size, place.dtype))
        adds_bias = columns is None or own.adds_bias
        if matrix.has_bias:
            needed["bias"] = TensorSpec((out_size,), place.dtype, group_columns=None)
        self._parameters = {
            name: Parameter(
                spec.shape,
                spec.dtype,
                place.device,
                partial(self._take, name),
                () if name == "bias" and not adds_bias else spec.kept(rows),
                None if columns is None else spec.kept_columns(columns),
            )
            for name, spec in needed.items()
        }
        place.parameters.update((f"{matrix.name}.{name}", parameter) for name, parameter in self._parameters.items())
        self._num_awaited = sum(bool(parameter.missing_rows) for parameter in self._parameters.values())
        self._taken: dict[str, Tensor] = {}

    def take_weight(self, weight: Tensor) -> None:
        """Use `weight` [out_size, in_size], in the dtype that the scheme takes. A scheme that converts it keeps no
        reference to it."""
        ((start, end),) = self._rows
        self._take("weight", weight[start:end].to(self._parameters["weight"].dtype))

    def _take(self, name: str, tensor: Tensor) -> None:
        self._taken[name] = tensor
        if len(self._taken) == self._num_awaited:
            self._apply = self._scheme.bind(**{"bias": None, **self._taken}, out_dtype=self._out_dtype)
            self._taken.clear()
            if isinstance(self._apply, FewRows):
                self._few_rows = self._apply
            if isinstance(self._apply, TakesFp8):
                self._takes_fp8 = self._apply
            if self._when_bound is not None:
                self._when_bound()

    @property
    def bound(self) -> Apply:
        """The layer of this rank's outputs, without a gather."""
        assert self._apply is not None, "a linear layer was called before its weights were loaded"
        return self._apply

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        """x [T, in_size], or x as FP8 numbers and scales as `groups_of` tells for T."""
        if isinstance(x, Tensor):
            y = self.bound(x)
            if self._has_updates:
                assert self._lora is not None
                self._lora.add(y, x)
        else:
            assert self._takes_fp8 is not None
            y = self._takes_fp8.multiply(*x, self._dtype)
        return y if self._gather is None else self._gather(y, self._out_size)

    @property
    def _has_updates(self) -> bool:
        """Whether a row's adapter adds to the product, which no fused kernel can."""
        return self._lora is not None and self._lora.is_used

    def groups_of(self, num_rows: int) -> bool | None:
        """How a kernel before may quantize so many rows to FP8: with a scale for each 128 inputs (True), or for each
        row (False). None: this layer takes activations as they are, or quantizes them itself."""
        return None if self._takes_fp8 is None or self._has_updates else self._takes_fp8.groups_of(num_rows)

    def fuses_norm(self, x: Tensor, gate: Gate | None = None) -> bool:
        """Whether `after_norm` is one kernel for as many rows as x has."""
        few, op = self._few_rows, fused.NORM_LINEAR if gate is None else fused.GATE_UP_ACT
        if few is None or not few.is_few(x.shape[0]) or (gate is not None and few.bias is not None):
            return False
        if self._has_updates:
            return False
        return fused.fuses(op, x, few.weight)

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, gate: Gate | None = None) -> Tensor:
        """This layer of rms_norm(x, norm, eps). With a `gate`, [T, out_size / 2]: activation(first half) * second half.

        Only if `fuses_norm`.
        """
        assert self._few_rows is not None
        few = self._few_rows
        if gate is None:
            return fused.norm_linear(x, norm, eps, few.weight, few.bias, few.scales)
        assert few.bias is None
        return fused.gate_up_act(x, few.weight, gate, norm, eps, few.scales)

    def fuses_add(self, x: Tensor) -> bool:
        """Whether `add_to` is one kernel for as many rows as x has."""
        few = self._few_rows
        return (
            few is not None
            and self._gather is None
            and not self._has_updates
            and few.is_few(x.shape[0])
            and fused.fuses(fused.LINEAR_RESIDUAL, x, few.weight)
        )

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + this layer of x. Only if `fuses_add`."""
        assert self._few_rows is not None
        few = self._few_rows
        return fused.linear_residual(x, few.weight, few.bias, residual, few.scales)
