"""Mixture of experts: which experts each row goes to, the products of each expert's rows with its matrix, and the
weighted sum of each row's results.

A pair is a row and one of its experts. Pairs are sorted by expert, and those of an expert by row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.experts import cpu, reference
from inferd.kernels.ops.experts.reference import Router, Routing
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = ["Router", "Routing", "add_up", "bind_experts", "route"]

Apply = Callable[[Tensor], Tensor]
Products = Callable[[Tensor, Routing, bool], Tensor]


@runtime_checkable
class Dense(Protocol):
    """A layer of a GPU that keeps its weight [out, in] as it is, if it has no scales."""

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None


@runtime_checkable
class Integers(Protocol):
    """A layer of a GPU whose weight is 8-bit or 4-bit integers."""

    packed: Packed
    bias: Tensor | None
    order: Tensor | None
    """[K] int64: the order of inputs that the weight's columns have; None: their own."""
    out_dtype: torch.dtype


class Packed(Protocol):
    @property
    def layout(self) -> Hashable:
        """Equal for matrices that one kernel multiplies."""
        ...


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    """Dtype of activations and results, or of the router's logits."""
    is_native: bool = False
    """For products: whether every expert's matrix is one C++ product."""
    stack: Literal["none", "dense", "integers"] = "none"
    """For products: what every expert's layer is, if all are alike: `Dense`, or `Integers`."""
    num_experts: int = 0
    """For routing."""


MOST_EXPERTS = 2**14
"""Most experts that a Triton program chooses from: 16 a lane of its most warps."""


def _refuses_cpp(key: Key) -> str | None:
    return native.refuses(key.device_type, key.dtype)


def _refuses_products(key: Key) -> str | None:
    return _refuses_cpp(key) if key.is_native else "calls matrices that one C++ kernel multiplies"


def _refuses_route(key: Key) -> str | None:
    if key.dtype != torch.float32:
        return f"takes logits in float32, not {key.dtype}"
    if key.num_experts > MOST_EXPERTS:
        return f"chooses from at most {MOST_EXPERTS:,} experts, not {key.num_experts:,}"
    return gpu.refuses(key.device_type, key.dtype)


def _refuses_add(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype)


def _refuses_triton(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype) if key.stack == "dense" else "multiplies by unquantized weights"


def _refuses_integers(key: Key) -> str | None:
    if key.stack != "integers":
        return "multiplies by integers of one layout, without an order of inputs"
    return gpu.refuses(key.device_type, key.dtype)


ROUTE: Op[Key, Callable[[Tensor, Router, Tensor | None, Tensor, Tensor | None], Routing]] = Op(
    "experts_route",
    [
        Implementation("cpp", cpu.route, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton_routing", "route"), _refuses_route),
        Implementation("reference", reference.route, always),
    ],
)
PRODUCT: Op[Key, Callable[[Sequence[Apply], torch.dtype], Products]] = Op(
    "experts_product",
    [
        Implementation("cpp", cpu.bind, _refuses_products),
        Implementation("triton", Deferred(f"{__name__}.triton", "bind"), _refuses_triton),
        Implementation("triton_integers", Deferred(f"{__name__}.triton_integers", "bind"), _refuses_integers),
        Implementation("reference", reference.bind, always),
    ],
)
ADD: Op[Key, Callable[[Tensor, Routing], Tensor]] = Op(
    "experts_add",
    [
        Implementation("cpp", cpu.add_up, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton_routing", "add_up"), _refuses_add),
        Implementation("reference", reference.add_up, always),
    ],
)


def route(
    logits: Tensor,
    router: Router,
    bias: Tensor | None = None,
    loads: Tensor | None = None,
    scales: Tensor | None = None,
) -> Routing:
    """Chooses experts for each row of logits [T, experts] fp32. Of equal ones the lower index comes first. `bias`
    [experts] fp32 is added to the scores that are compared. Each expert's number of rows is added to `loads` [experts]
    int64. Weights are multiplied by `scales` [experts] fp32 of the experts. A row with a NaN has valid experts
    too. A row's bits do not depend on the other rows."""
    num_experts, group_size = logits.shape[1], logits.shape[1] // router.num_groups
    assert logits.dtype == torch.float32 and 0 < router.num_chosen <= group_size * router.num_chosen_groups
    assert num_experts % router.num_groups == 0 and (router.num_groups == 1 or group_size >= 2)
    assert bias is None or (bias.shape == (num_experts,) and bias.dtype == torch.float32 and bias.is_contiguous())
    loads = torch.zeros(num_experts, dtype=torch.int64, device=logits.device) if loads is None else loads
    assert loads.shape == (num_experts,) and loads.dtype == torch.int64 and loads.is_contiguous()
    assert scales is None or (scales.shape == loads.shape and scales.dtype == torch.float32 and scales.is_contiguous())
    key = Key(logits.device.type, logits.dtype, num_experts=num_experts)
    return ROUTE.resolve(key)(logits, router, bias, loads, scales)


def bind_experts(linears: Sequence[Apply], device: torch.device, dtype: torch.dtype) -> Products:
    """The products of all pairs, from each expert's layer [T, in] -> [T, out], in `dtype` both.

    The result is called as f(x, routing, by_row): [pairs, out] of x [pairs, in], or of x [T, in] if `by_row`. Only
    matrices of chosen experts are read. A row's bits do not depend on the other rows if the layers' do not.
    """
    is_native = all(isinstance(linear, native.Product) for linear in linears)
    kinds = {_kind_of(linear, dtype) for linear in linears}
    stack = next(iter(kinds))[0] if len(kinds) == 1 else "none"
    return PRODUCT.resolve(Key(device.type, dtype, is_native, stack))(linears, dtype)


def _kind_of(linear: Apply, dtype: torch.dtype) -> tuple[Literal["none", "dense", "integers"], object]:
    """(what a layer is, a value that layers of one stack share)."""
    if isinstance(linear, Dense) and linear.scales is None:
        return "dense", linear.bias is None
    if isinstance(linear, Integers) and linear.order is None and linear.out_dtype == dtype:
        return "integers", (linear.bias is None, linear.packed.layout)
    return "none", None


def add_up(parts: Tensor, routing: Routing) -> Tensor:
    """parts [pairs, size] -> [T, size]: the sum of each row's results times their weights, in the order of its choices,
    computed in fp32 and rounded once."""
    return ADD.resolve(Key(parts.device.type, parts.dtype))(parts, routing)
