"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.experts.reference import Router, Routing


def route(logits: Tensor, router: Router, bias: Tensor | None, loads: Tensor, scales: Tensor | None) -> Routing:
    logits = logits.contiguous()
    rows, num_experts = logits.shape
    num_chosen = router.num_chosen
    routing = Routing(
        torch.empty((rows, num_chosen), dtype=torch.float32),
        torch.empty((rows, num_chosen), dtype=torch.int32),
        torch.empty((rows * num_chosen,), dtype=torch.int32),
        torch.empty((num_experts + 1,), dtype=torch.int32),
    )
    native.function("inferd_experts_route")(
        logits.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        rows,
        num_experts,
        *router,
        router.compares_scores(bias),
        *(tensor.data_ptr() for tensor in routing),
        loads.data_ptr(),
        torch.get_num_threads(),
    )
    return routing


def bind(
    linears: Sequence[Callable[[Tensor], Tensor]], dtype: torch.dtype
) -> Callable[[Tensor, Routing, bool], Tensor]:
    """A table of the experts' kernels and arguments, from which C++ calls those of chosen experts."""
    products = [cast(native.Product, linear) for linear in linears]
    in_size, out_size, num_experts = products[0].in_size, products[0].out_size, len(products)
    calls = [product.call(dtype) for product in products]
    packed = [ctypes.create_string_buffer(arguments, len(arguments)) for _, arguments in calls]
    fields = [
        field
        for (address, arguments), place in zip(calls, packed, strict=True)
        for field in (address, ctypes.addressof(place), len(arguments) // 8)
    ]
    table = (ctypes.c_int64 * len(fields))(*fields)
    run = native.function("inferd_experts_product")

    def apply(x: Tensor, routing: Routing, by_row: bool) -> Tensor:
        assert x.shape[1] == in_size and x.dtype == dtype and len(products) == len(packed)
        x = x.contiguous()
        out = torch.empty((len(routing.rows), out_size), dtype=dtype)
        run(
            x.data_ptr(),
            out.data_ptr(),
            routing.rows.data_ptr() if by_row else 0,
            routing.offsets.data_ptr(),
            num_experts,
            ctypes.addressof(table),
            in_size * dtype.itemsize,
            out_size * dtype.itemsize,
            torch.get_num_threads(),
        )
        return out

    return apply


def add_up(parts: Tensor, routing: Routing) -> Tensor:
    parts = parts.contiguous()
    rows, num_chosen = routing.places.shape
    out = torch.empty((rows, parts.shape[1]), dtype=parts.dtype)
    native.function("inferd_experts_add")(
        parts.data_ptr(),
        routing.weights.data_ptr(),
        routing.places.data_ptr(),
        out.data_ptr(),
        rows,
        num_chosen,
        parts.shape[1],
        native.DTYPE_CODES[parts.dtype],
        torch.get_num_threads(),
    )
    return out
