"""The MLP of a layer, with a gate or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from inferd.engine.arch.description import Activation, Arch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.kernels.gated_mul import gelu_mul, silu_mul
from inferd.kernels.gelu import gelu

_GATES: dict[Activation, Callable[[Tensor], Tensor]] = {Activation.SILU: silu_mul, Activation.GELU_TANH: gelu_mul}


class MLP:
    """[T, hidden] -> [T, hidden]: down(activation(gate(x)) * up(x)), gate and up in one matrix; or, without a gate,
    down(gelu(up(x)))."""

    def __init__(self, arch: Arch, place: Placement) -> None:
        assert arch.has_gate or arch.activation is Activation.GELU_TANH
        self._in_name, self._act = ("gate_up", _GATES[arch.activation]) if arch.has_gate else ("up", gelu)
        in_rows = 2 * arch.intermediate_size if arch.has_gate else arch.intermediate_size
        self._in = Linear(arch.hidden_size, in_rows, place, arch.has_mlp_bias)
        self._down = Linear(arch.intermediate_size, arch.hidden_size, place, arch.has_mlp_bias)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name, linear in ((self._in_name, self._in), ("down", self._down)):
            yield from ((f"{name}.{part}", parameter) for part, parameter in linear.parameters())

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._act(self._in(x)))
