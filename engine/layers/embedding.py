"""The embedding of tokens: a table in the model's dtype, or the blocks of a GGUF file, whose rows are dequantized as
they are read.

A GPU dequantizes the blocks once and keeps the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrices import embedding
from inferd.engine.arch.matrix import LinearWeight
from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.engine.quant.scheme import Apply
from inferd.engine.quant.stored_schemes import StoredIntegers
from inferd.kernels.ops.embed import embed
from inferd.kernels.ops.quantized import HasRows


class Embedding:
    """Rows [T, hidden] of the embedding. `head` gives the layer of the logits, once it is usable."""

    _table: Tensor | None = None
    _blocks: HasRows | None = None

    def __init__(
        self, arch: Arch, place: Placement, head: Callable[[], Apply], when_read: Callable[[Tensor], None]
    ) -> None:
        """`when_read` gets a table in the dtype, which a tied head multiplies by."""
        weight = embedding(arch)
        self._dtype, self._row_dtype = place.dtype, place.recipe.narrow or place.dtype
        self._when_read = when_read
        self._head: Callable[[], Apply] | None = None
        if not isinstance(weight, LinearWeight):
            place.take(weight, self._take_table, place.recipe.narrow)
            return
        scheme = place.recipe.scheme_of(weight)
        assert isinstance(scheme, StoredIntegers), "an embedding in blocks"
        self._scheme, self._taken = scheme, dict[str, Tensor]()
        assert arch.stored is not None
        if arch.stored.shares_head and place.device.type == "cpu" and place.ranks.own.count == 1:
            self._head = head
        needed = scheme.takes(weight.num_rows, weight.num_inputs, place.dtype)
        for name, spec in needed.items():
            kept = () if self._head is not None else None  # the head keeps the same rows
            use = partial(self._take, name, len(needed))
            place.parameters[f"{weight.name}.{name}"] = Parameter(spec.shape, spec.dtype, place.device, use, kept)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden] in the dtype of activations."""
        if self._blocks is None and self._head is not None:
            self._blocks = cast(HasRows, self._head())
        if self._blocks is not None:
            return self._blocks.rows(token_ids, self._dtype, self._row_dtype)
        assert self._table is not None, "the embedding was used before it was loaded"
        return embed(token_ids, self._table, self._dtype)

    def _take(self, name: str, num_awaited: int, tensor: Tensor) -> None:
        self._taken[name] = tensor
        if len(self._taken) < num_awaited:
            return
        if tensor.device.type == "cpu":
            self._blocks = cast(HasRows, self._scheme.bind(bias=None, **self._taken))
        else:
            self._table = self._scheme.dequantized(self._row_dtype, self._taken)
        self._taken.clear()

    def _take_table(self, table: Tensor) -> None:
        self._table = table
        self._when_read(table)
