"""The MLP of a layer, with a gate or without."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from inferd.engine.arch.description import Activation, Arch
from inferd.engine.layers.branch import Act, Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.kernels.gated_mul import gelu_mul, silu_mul
from inferd.kernels.gelu import gelu

_GATES = {Activation.SILU: Act(silu_mul, "silu"), Activation.GELU_TANH: Act(gelu_mul, "gelu")}


class MLP:
    """down(activation(gate(x)) * up(x)) with gate and up in one matrix; in a family without a gate down(gelu(up(x))).
    x is [T, hidden]."""

    def __init__(self, arch: Arch, place: Placement, branch: Branch) -> None:
        assert arch.has_gate or arch.activation is Activation.GELU_TANH
        self._in_name, self._act = ("gate_up", _GATES[arch.activation]) if arch.has_gate else ("up", Act(gelu))
        self._branch = branch
        in_rows = 2 * arch.intermediate_size if arch.has_gate else arch.intermediate_size
        self._in = Linear(arch.hidden_size, in_rows, place.of(self._in_name), arch.has_mlp_bias)
        self._down = Linear(arch.intermediate_size, arch.hidden_size, place.of("down"), arch.has_mlp_bias)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name, linear in ((self._in_name, self._in), ("down", self._down)):
            yield from ((f"{name}.{part}", parameter) for part, parameter in linear.parameters())

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        hidden, stream = self._branch.enter(self._in, x, residual, self._act)
        return self._branch.leave(self._down, hidden, stream)
