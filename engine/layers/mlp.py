"""The gated MLP: down(activation(gate(x)) * up(x)), gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from inferd.engine.arch.description import Activation, Arch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.kernels.gated_mul import gelu_mul, silu_mul

_GATES: dict[Activation, Callable[[Tensor], Tensor]] = {Activation.SILU: silu_mul, Activation.GELU_TANH: gelu_mul}


class GatedMLP:
    """[T, hidden] -> [T, hidden]."""

    def __init__(self, arch: Arch, place: Placement) -> None:
        self._gate_up = Linear(arch.hidden_size, 2 * arch.intermediate_size, place, arch.has_mlp_bias)
        self._down = Linear(arch.intermediate_size, arch.hidden_size, place, arch.has_mlp_bias)
        self._gate = _GATES[arch.activation]

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name, linear in (("gate_up", self._gate_up), ("down", self._down)):
            yield from ((f"{name}.{part}", parameter) for part, parameter in linear.parameters())

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._gate(self._gate_up(x)))
