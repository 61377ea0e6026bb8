"""The Triton product by integer weights of experts has the bits of each expert's own layer, in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.gpu.integers import Layer, bind_invariant
from inferd.kernels.gpu.packed_integers import Packed
from inferd.kernels.ops.experts import PRODUCT, Key, Router, Routing, bind_experts, route
from tests.kernels import interpreter
from tests.kernels.conftest import is_on_gpu
from tests.kernels.test_linear_integers_triton import cases, sized

pytest.importorskip("triton")

NUM_EXPERTS = 5
CASES = [case for case in cases() if "order" not in case[1]]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    PRODUCT.force("triton_integers")
    if not is_on_gpu(request.config):
        gpu.interpret(True)
        interpreter.repair()
    yield
    gpu.interpret(False)
    PRODUCT.force(None)


def experts_of(bits: int, layout: str, group_size: int, *, has_bias: bool) -> list[Layer]:
    made: list[Layer] = []
    for _ in range(NUM_EXPERTS):
        of = sized(bits, layout, group_size)
        layer = bind_invariant(replace(of, bias=torch.randn(len(of.q)) if has_bias else None), torch.bfloat16)
        assert isinstance(layer, Layer)
        made.append(layer)
    return made


def each(layers: list[Layer], x: Tensor, routing: Routing) -> Tensor:
    """Results of every expert's own layer, in the order of the pairs."""
    ends = routing.offsets.tolist()
    inputs = x[routing.rows.long()]
    return torch.cat([layer(inputs[a:b]) for layer, a, b in zip(layers, ends[:-1], ends[1:], strict=True)])


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(("bits", "layout", "group_size"), CASES)
def test_a_pair_has_the_bits_of_its_experts_layer(bits: int, layout: str, group_size: int) -> None:
    """Some experts have several tiles of 64 with 150 rows, and most experts have none with one row."""
    layers = experts_of(bits, layout, group_size, has_bias=bits == 4)
    in_size = layers[0].packed.in_size
    kept = [(layer.packed.weight.clone(), layer.packed.scales.clone()) for layer in layers]
    inputs = [torch.randn(num_rows, in_size).to(torch.bfloat16) for num_rows in (1, 20, 150)]
    routings = [route(torch.randn(len(x), NUM_EXPERTS) * 3, Router(2, True)) for x in inputs]
    expected = [each(layers, x, routing) for x, routing in zip(inputs, routings, strict=True)]
    products = bind_experts(layers, CPU, torch.bfloat16)
    for x, routing, own in zip(inputs, routings, expected, strict=True):
        assert torch.equal(products(x, routing, True), own)
        assert torch.equal(products(x[routing.rows.long()], routing, False), own)
        assert torch.equal(each(layers, x, routing), own), "the layers' views of the stack"
    for layer, (weight, scales) in zip(layers, kept, strict=True):
        assert torch.equal(layer.packed.weight, weight) and torch.equal(layer.packed.scales, scales)
        assert layer.packed.weight._base is not None


def test_layers_of_one_layout_are_a_stack_and_others_are_not() -> None:
    alike = experts_of(4, "zeros", 32, has_bias=False)
    ordered = replace(alike[0], order=torch.arange(alike[0].packed.in_size))
    others: tuple[list[Layer], ...] = (
        [*alike[1:], experts_of(4, "zeros", 64, has_bias=False)[0]],
        [*alike[1:], experts_of(4, "zeros", 32, has_bias=True)[0]],
        [*alike[1:], ordered],
        [*alike[1:], replace(alike[0], out_dtype=torch.float32)],
    )
    PRODUCT.force(None)
    for layers in others:
        bind_experts(layers, CPU, torch.bfloat16)
    unlike = Key("cpu", torch.bfloat16)
    assert [choice.chosen for choice in PRODUCT.choices() if choice.key == unlike] == ["reference"]
    key = Key("cuda", torch.bfloat16, stack="integers")
    assert PRODUCT.choice(key).chosen == "triton_integers" and not PRODUCT.choice(key).varies
    assert Packed.stacked([layer.packed for layer in alike])[2].layout == alike[2].packed.layout
