"""Mixture of experts in the place of a layer's MLP, or beside it: a router, and the gated MLP of each expert. There may
be a shared expert beside them, which every token goes to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrices import (
    expert,
    expert_scales,
    norm,
    of_layer,
    router,
    score_bias,
    shared_expert,
    shared_gate,
)
from inferd.engine.arch.matrix import LinearWeight
from inferd.engine.layers.branch import GATES, MLP, Act, Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.norm import RMSNorm
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.experts import Products, Router, Routing, add_up, bind_experts, route
from inferd.kernels.ops.gated_mul import limited_mul
from inferd.kernels.ops.head_gate import add_gated
from inferd.kernels.ops.scaled_add import added


class ExpertLinears:
    """One matrix of each expert, and the kernel that multiplies each row by those of its experts."""

    def __init__(self, matrices: Sequence[LinearWeight], place: Placement) -> None:
        self._device, self._dtype = place.device, place.dtype
        self._num_awaited, self._products = len(matrices), None
        self._linears = [Linear(matrix, place, when_bound=self._when_bound) for matrix in matrices]

    _products: Products | None

    def _when_bound(self) -> None:
        self._num_awaited -= 1
        if not self._num_awaited:
            self._products = bind_experts([linear.bound for linear in self._linears], self._device, self._dtype)

    def __call__(self, x: Tensor, routing: Routing, *, by_row: bool) -> Tensor:
        """[pairs, out] of x [pairs, in], or of x [T, in] if `by_row`."""
        assert self._products is not None, "experts were called before their weights were loaded"
        return self._products(x, routing, by_row)


class SharedExpert:
    """The MLP of an expert that every token goes to, in some families times the sigmoid of a gate."""

    def __init__(self, arch: Arch, layer: int, place: Placement, act: Act, has_gate: bool) -> None:
        gate_up, down = shared_expert(arch, layer)
        self._ranks, self._act, self._size = place.ranks, act, down.num_inputs
        self._gate_up, self._down = Linear(gate_up, place), Linear(down, place)
        self._gate = Linear(shared_gate(arch, layer), place, torch.float32) if has_gate else None

    def add_to(self, result: Tensor, x: Tensor) -> Tensor:
        """This rank's outputs of the chosen experts, with those of this one for x [T, hidden] added."""
        hidden = self._ranks.inputs(self._act.run(self._gate_up(x)), self._size)
        own = self._down(hidden)
        return added(result, own) if self._gate is None else add_gated(result, own, self._gate(x))


class MixtureOfExperts:
    """The sum of the chosen experts' MLPs, each times its weight, and of the shared one. x is [T, hidden]."""

    _score_bias: Tensor | None = None
    """[experts] fp32."""

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        assert arch.experts is not None
        experts, hidden = arch.experts, arch.hidden_size
        self._branch, self._ranks, self._experts, self._act = branch, place.ranks, experts, GATES[arch.activation]
        if experts.limit is not None:
            self._act = Act(partial(limited_mul, limit=experts.limit.limit, alpha=experts.limit.alpha))
        self._router = Linear(router(arch, layer), place, torch.float32)
        self._rule = Router(
            experts.num_chosen,
            experts.normalizes,
            experts.has_sigmoid,
            experts.num_groups,
            experts.num_chosen_groups,
            experts.factor,
            experts.added,
        )
        if experts.has_score_bias:
            place.take(score_bias(arch, layer), self._take_bias, torch.float32)
        gate_ups, downs = zip(*(expert(arch, layer, index) for index in range(experts.num_experts)), strict=True)
        self._gate_up, self._down = ExpertLinears(gate_ups, place), ExpertLinears(downs, place)
        self._shared: SharedExpert | None = None
        if experts.shared_size:
            self._shared = SharedExpert(arch, layer, place, self._act, experts.has_shared_gate)
        self._router_norm: RMSNorm | None = None
        self._scales: Tensor | None = None
        if experts.beside_mlp:
            weight = norm("mlp.router_norm", hidden, of_layer(layer))
            self._router_norm = RMSNorm(weight, arch.norm_eps, place, factor=hidden**-0.5)
            place.take(expert_scales(arch, layer), self._take_scales, torch.float32)
        self._size = hidden
        self.loads = torch.zeros(experts.num_experts, dtype=torch.int64, device=place.device)
        """Number of tokens that each expert has had, tokens that only pad a step included."""

    def _take_scales(self, scales: Tensor) -> None:
        self._scales = scales

    def _take_bias(self, bias: Tensor) -> None:
        self._score_bias = bias.flatten()

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        normed, stream = self._branch.normed(x, residual)
        logits = self._router(normed if self._router_norm is None else self._router_norm(stream))
        routing = route(logits, self._rule, self._score_bias, self.loads, self._scales)
        hidden = self._act.run(self._gate_up(normed, routing, by_row=True))
        hidden = self._ranks.inputs(hidden, self._experts.intermediate_size)
        result = add_up(self._down(hidden, routing, by_row=False), routing)
        if self._shared is not None:
            result = self._shared.add_to(result, normed)
        return self._branch.after(self._ranks.outputs(result, self._size)), stream


class ExpertsBesideMLP:
    """An MLP and a mixture of experts, each of the stream's own norm, and both results normed and added up."""

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        self._branch = branch
        self._of_mlp = Branch(arch, layer, place, "", "mlp.post_norm", norm=branch.norm)
        self._of_experts = Branch(arch, layer, place, "mlp.experts_norm", "mlp.experts_post_norm")
        self._mlp = MLP(arch, layer, place, self._of_mlp)
        self._experts = MixtureOfExperts(arch, layer, place, self._of_experts)
        self.loads = self._experts.loads

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        of_mlp, stream = self._mlp(x, residual)
        assert stream is not None, "the MLP's result is normed, and not added yet"
        of_experts, _ = self._experts(stream, None)
        return self._branch.after(added(of_mlp, of_experts)), stream
