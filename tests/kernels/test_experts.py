"""The routing to experts equals a plain softmax and top-k, products equal each expert's layer bit for bit, and sums are
those of an ordered loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.experts import PRODUCT, Router, Routing, add_up, bind_experts, reference, route
from inferd.kernels.ops.linear import linear
from inferd.kernels.ops.linear_fp8 import linear_fp8, quantize_weight
from inferd.kernels.ops.linear_int4 import linear_int4, quantize_int4
from inferd.kernels.ops.linear_int8 import linear_int8, quantize_int8

pytestmark = pytest.mark.usefixtures("implementation")

NUM_EXPERTS, NUM_CHOSEN, IN, OUT = 11, 3, 64, 80
CPU = torch.device("cpu")
Layer = Callable[[Tensor], Tensor]


def experts_of(routing: Routing) -> Tensor:
    """[T, K]: the expert of each pair, from its place."""
    return torch.bucketize(routing.places, routing.offsets[1:], right=True)


@pytest.mark.sampled(keep=3, of="triton")
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(NUM_EXPERTS, NUM_CHOSEN), (64, 8), (16, 16), (1, 1)])
def test_routing_is_softmax_and_top_k(normalizes: bool, num_experts: int, num_chosen: int) -> None:
    logits = torch.randn(37, num_experts) * 3
    routing = route(logits, Router(num_chosen, normalizes))
    shares, chosen = logits.double().softmax(1).topk(num_chosen, 1)
    expected = shares / shares.sum(1, keepdim=True) if normalizes else shares
    error = (routing.weights - expected).abs().max()
    assert error < 1e-6 < (routing.weights - expected.roll(1, 0)).abs().max() or num_experts == 1
    assert torch.equal(experts_of(routing), chosen)
    scales = torch.randn(num_experts)
    scaled = route(logits, Router(num_chosen, normalizes), scales=scales)
    assert torch.equal(scaled.weights, routing.weights * scales[chosen])
    assert torch.equal(scaled.places, routing.places)
    assert sorted(routing.places.flatten().tolist()) == list(range(37 * num_chosen))
    rows = torch.empty(37 * num_chosen, dtype=torch.int32)
    rows[routing.places.flatten().long()] = torch.arange(37, dtype=torch.int32).repeat_interleave(num_chosen)
    assert torch.equal(routing.rows, rows)
    inside = torch.ones(len(rows) - 1, dtype=torch.bool)
    inside[routing.offsets[1:-1][(routing.offsets[1:-1] > 0) & (routing.offsets[1:-1] < len(rows))].long() - 1] = False
    assert (rows.diff()[inside] > 0).all(), "the rows of an expert ascend"


@pytest.mark.sampled(keep=3, of="triton")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    "router",
    [
        Router(3, True, has_sigmoid=True, factor=2.5, added=1e-20),
        Router(4, False, has_sigmoid=True, num_groups=4, num_chosen_groups=2, added=1e-20),
        Router(3, True, num_groups=3, num_chosen_groups=1, added=0.01),
    ],
    ids=["sigmoid", "groups", "softmax"],
)
def test_routing_by_biased_scores_of_groups(router: Router, has_bias: bool) -> None:
    """As transformers chooses experts in DeepSeek V3: from the groups whose two best have the largest sums."""
    logits, bias = torch.randn(37, 24) * 2, torch.randn(24) * 0.3 if has_bias else torch.zeros(24)
    scores = logits.double().sigmoid() if router.has_sigmoid else logits.double().softmax(1)
    groups = (scores + bias).view(37, router.num_groups, -1)
    best = groups.topk(2, dim=2)[0].sum(2).topk(router.num_chosen_groups, 1)[1]
    outside = torch.ones(37, router.num_groups, dtype=torch.bool).scatter_(1, best, value=False)
    chosen = groups.masked_fill(outside[:, :, None], -torch.inf).flatten(1).topk(router.num_chosen, 1)[1]
    expected = scores.gather(1, chosen)
    if router.normalizes:
        expected = expected / (expected.sum(1, keepdim=True) + router.added)
    expected *= router.factor
    routing = route(logits, router, bias if has_bias else None)
    assert torch.equal(experts_of(routing), chosen)
    error = (routing.weights - expected).abs().max()
    assert error < 1e-6 < (routing.weights * 1.0001 - expected).abs().max()
    assert not has_bias or not torch.equal(experts_of(route(logits, router, bias.roll(1))), chosen)


ROUTERS = {
    "softmax": (60, Router(4, False)),
    "softmax normalized": (128, Router(8, True)),
    "softmax factor": (8, Router(2, True, factor=2.5)),
    "softmax groups": (160, Router(6, False, num_groups=8, num_chosen_groups=3, factor=16.0)),
    "sigmoid": (384, Router(8, True, has_sigmoid=True, factor=2.827, added=1e-20)),
    "sigmoid groups": (256, Router(8, True, has_sigmoid=True, num_groups=8, num_chosen_groups=4, added=1e-20)),
    "sigmoid odd groups": (60, Router(5, False, has_sigmoid=True, num_groups=3, num_chosen_groups=2)),
    "many": (512, Router(10, True)),
    "all": (9, Router(9, False)),
}
"""Routers of families with experts and others, by name, and their numbers of experts."""


@pytest.mark.sampled(keep=3, of="triton")
@pytest.mark.parametrize("has_vectors", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_routing_equals_the_reference(name: str, has_vectors: bool) -> None:
    """Places, rows and offsets are equal, with a tie in each row. A row alone has the bits that it has among others."""
    num_experts, router = ROUTERS[name]
    logits = torch.randn(13, num_experts) * 2
    logits[:, 3] = logits[:, 1] = logits.amax(1)
    bias, scales = torch.randn(2, num_experts).mul(0.2).unbind() if has_vectors else (None, None)
    if bias is not None:
        bias[3] = bias[1]
    own, plain = torch.arange(num_experts), torch.arange(num_experts)
    routing = route(logits, router, bias, own, scales)
    expected = reference.route(logits, router, bias, plain, scales)
    chosen = experts_of(routing)
    assert torch.equal(chosen, experts_of(expected))
    for found, exact in zip((*routing[1:], own), (*expected[1:], plain), strict=True):
        assert found.dtype == exact.dtype and torch.equal(found, exact)
    allowed = 5e-6 * expected.weights.abs()
    assert ((routing.weights - expected.weights).abs() <= allowed).all()
    assert ((routing.weights * 1.00002 - expected.weights).abs() > allowed).all(), "a wrong weight is seen"
    for index in (0, 11):
        alone = route(logits[index : index + 1], router, bias, scales=scales)
        assert torch.equal(alone.weights[0], routing.weights[index])
        assert torch.equal(experts_of(alone)[0], chosen[index])


def test_loads_count_the_rows_of_each_expert() -> None:
    loads = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    counts = [route(torch.randn(9, NUM_EXPERTS), Router(3, True), loads=loads).offsets.diff() for _ in range(2)]
    assert torch.equal(loads, sum(counts, torch.zeros_like(loads))) and loads.sum() == 2 * 9 * 3


def test_of_equal_logits_the_lower_index_comes_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [-torch.inf] * 4 + [0.0]])
    chosen = experts_of(route(logits, Router(4, True)))
    assert chosen.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [4, 0, 1, 2]]


def test_a_row_without_numbers_gets_experts_and_stays_alone() -> None:
    logits = torch.randn(5, NUM_EXPERTS)
    sound = route(logits, Router(NUM_CHOSEN, False))
    logits[2] = torch.nan
    broken = route(logits, Router(NUM_CHOSEN, False))
    others = [0, 1, 3, 4]
    assert broken.weights[2].isnan().all() and len(set(experts_of(broken)[2].tolist())) == NUM_CHOSEN
    assert torch.equal(broken.weights[others], sound.weights[others])
    assert torch.equal(experts_of(broken)[others], experts_of(sound)[others])


def layers(kind: str, dtype: torch.dtype, shape: tuple[int, int] = (OUT, IN)) -> list[Layer]:
    made: list[Layer] = []
    for _ in range(NUM_EXPERTS):
        weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
        match kind:
            case "dense":
                made.append(linear(weight, bias))
            case "int8":
                made.append(linear_int8(*quantize_int8(weight), bias, dtype))
            case "int4":
                q, scales, minimums = quantize_int4(weight)
                made.append(linear_int4(q, scales, bias, dtype, minimums=minimums))
            case "fp8":
                made.append(linear_fp8(*quantize_weight(weight), None, dtype))
    return made


class Dense:
    """A layer as GPUs have it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, self.scales = weight, bias, None

    def __call__(self, x: Tensor) -> Tensor:
        product = x.double() @ self.weight.double().T
        return (product if self.bias is None else product + self.bias.double()).to(x.dtype)


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.float32, True), (torch.bfloat16, False)])
def test_products_of_weights_that_stay_as_they_are(dtype: torch.dtype, has_bias: bool) -> None:
    """Triton multiplies a stack of them. Of 150 rows some experts have two tiles, and in most steps some have none."""
    biases = torch.randn(5, 40).to(dtype)
    own: list[Layer] = [Dense(torch.randn(40, 72).to(dtype), biases[e].clone() if has_bias else None) for e in range(5)]
    weights = [layer.weight.clone() for layer in own]  # type: ignore[attr-defined]
    added = biases.double() if has_bias else torch.zeros(5, 40, dtype=torch.float64)
    products = bind_experts(own, CPU, dtype)
    for num_rows, num_chosen in ((1, 1), (3, 2), (150, 3)):
        x, logits = torch.randn(num_rows, 72).to(dtype), torch.randn(num_rows, 5) * torch.tensor([1.0, 1, 1, 9, 1])
        routing = route(logits, Router(num_chosen, True))
        pairs = products(x, routing, True)
        inputs = x[routing.rows.long()]
        assert torch.equal(products(inputs, routing, False), pairs)
        experts = torch.bucketize(torch.arange(len(inputs)), routing.offsets[1:], right=True).tolist()
        exact = torch.stack(
            [
                weights[expert].double() @ row.double() + added[expert]
                for expert, row in zip(experts, inputs, strict=True)
            ]
        )
        allowed = 2e-3 * exact.abs().max() if dtype == torch.bfloat16 else 1e-5
        assert (pairs - exact.to(dtype)).abs().max() <= 2 * allowed
        for place in range(0, len(pairs), 7):
            alone = Routing(
                torch.ones(1, 1),
                torch.zeros(1, 1, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
                (torch.arange(6) > experts[place]).to(torch.int32),
            )
            assert torch.equal(products(inputs[place : place + 1], alone, False)[0], pairs[place])
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(own, weights, strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "int8", "int4", "fp8"])
def test_products_are_those_of_each_experts_layer(
    kind: str, dtype: torch.dtype, num_threads: int, implementation: str
) -> None:
    """Also with more threads than experts, so that threads share a matrix."""
    if implementation == "triton":
        pytest.skip("multiplies weights that stay as they are")
    torch.set_num_threads(num_threads)
    own = layers(kind, dtype)
    products = bind_experts(own, CPU, dtype)
    for num_rows in (1, 2, 50):
        x, logits = torch.randn(num_rows, IN).to(dtype), torch.randn(num_rows, NUM_EXPERTS)
        routing = route(logits, Router(NUM_CHOSEN, True))
        pairs = products(x, routing, True)
        assert torch.equal(products(x[routing.rows.long()], routing, False), pairs)
        chosen = experts_of(routing)
        for row in range(num_rows):
            for expert, place in zip(chosen[row].tolist(), routing.places[row].tolist(), strict=True):
                assert torch.equal(pairs[place], own[expert](x[row : row + 1])[0])


def test_cpp_calls_every_format_that_it_multiplies(implementation: str) -> None:
    if implementation in ("reference", "triton", "portable"):
        pytest.skip("has no C++ products")
    for kind in ("dense", "int8", "int4", "fp8"):
        bind_experts(layers(kind, torch.float32), CPU, torch.float32)
    assert {choice.chosen for choice in PRODUCT.choices()} == {"cpp"}


@pytest.mark.parametrize("size", [37, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_added_in_the_order_of_the_choices(dtype: torch.dtype, size: int) -> None:
    routing = route(torch.randn(23, NUM_EXPERTS), Router(NUM_CHOSEN, False))
    parts = torch.randn(23 * NUM_CHOSEN, size).to(dtype)
    total = torch.zeros(23, size)
    for index in range(NUM_CHOSEN):
        total += routing.weights[:, index, None] * parts[routing.places[:, index].long()].float()
    assert torch.equal(add_up(parts, routing), total.to(dtype))
