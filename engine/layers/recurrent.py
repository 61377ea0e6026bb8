"""States of recurrent layers in one step: which rows they belong to, and what is kept of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from inferd.kernels.states import StateRows, keep_rows


class Drafted(NamedTuple):
    """Projected inputs of a step's drafts, from which states go on behind those that turn out to be right."""

    projected: Tensor
    """[drafts, in] for each layer: what its input projection gave."""
    tokens: Tensor
    """[drafts] int64: index of each draft among the step's tokens."""
    num_drafts: Tensor
    """[1] int64."""


@dataclass(slots=True)
class StateContext:
    """One layer's states in one step."""

    rows: StateRows
    matrices: Tensor
    """[slots, heads, ...] fp32: holds the rows' states, and receives those behind them."""
    inputs: Tensor
    """[slots, conv_width - 1, channels]: the last inputs of the convolution, likewise."""
    drafted: Drafted | None = None
    """The layer's part; None if steps verify no drafts."""

    def keep(self, projected: Tensor) -> None:
        """Keep those of the projected inputs [T, in] that are drafts'."""
        if self.drafted is not None:
            keep_rows(projected, self.drafted.projected, self.drafted.tokens, self.drafted.num_drafts)


@dataclass(frozen=True, slots=True)
class States:
    """All layers' states in one step, by their order among the recurrent layers."""

    rows: StateRows
    matrices: Tensor
    inputs: Tensor
    drafted: Drafted | None = None
    """With `projected` [layers, drafts, in]."""

    def of(self, plane: int) -> StateContext:
        drafted = self.drafted
        if drafted is not None:
            drafted = drafted._replace(projected=drafted.projected[plane])
        return StateContext(self.rows, self.matrices[plane], self.inputs[plane], drafted)
