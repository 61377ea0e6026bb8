"""The Triton kernels that route to experts and add up their results: three launches a layer, the reference's choices
for NaN and infinities, and one order of pairs for any tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inferd.kernels import gpu
from inferd.kernels.ops.experts import ADD, MOST_EXPERTS, ROUTE, Key, Router, add_up, reference, route
from tests.kernels import interpreter
from tests.kernels.conftest import is_on_gpu
from tests.kernels.test_experts import experts_of

pytest.importorskip("triton")

from inferd.kernels.ops.experts import triton_routing

MOST_LAUNCHES = 4


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    if not is_on_gpu(request.config):
        gpu.interpret(True)
        interpreter.repair()
    for op in (ROUTE, ADD):
        op.force("triton")
    yield
    gpu.interpret(False)
    for op in (ROUTE, ADD):
        op.force(None)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of torch's operations, but of those that only take memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() != "aten::empty.memory_format":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Launches:
    """In the place of a kernel: keeps the options of each launch, and does nothing."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(count, int) and count > 0 for count in grid)
        return lambda *_, **options: self.options.append(options)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("num_rows", [1, 256, 8192])
def test_a_layer_takes_at_most_four_launches(num_rows: int, is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 experts, of which a row goes to 8. Nothing else is computed, and no number is read back."""
    launches = Launches()
    for name, value in vars(triton_routing).items():
        if hasattr(value, "arg_names"):
            monkeypatch.setattr(triton_routing, name, launches)
    logits, parts = torch.randn(num_rows, 128), torch.empty(num_rows * 8, 16, dtype=torch.bfloat16)
    bias, loads = torch.zeros(128), torch.zeros(128, dtype=torch.int64)
    with Operations() as operations, gpu.early_starts() if is_early else nullcontext():
        add_up(parts, route(logits, Router(8, True), bias, loads, bias))
    assert operations.names == []
    assert 0 < len(launches.options) <= MOST_LAUNCHES
    assert {(one["IS_DEPENDENT"], one["launch_pdl"]) for one in launches.options} == {(is_early, is_early)}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "router",
    [
        Router(3, True),
        Router(3, False),
        Router(3, True, has_sigmoid=True),
        Router(3, False, has_sigmoid=True, num_groups=4, num_chosen_groups=2),
        Router(2, False, num_groups=2),
    ],
    ids=["softmax normalized", "softmax", "sigmoid normalized", "sigmoid groups", "softmax groups"],
)
def test_numbers_that_are_not_finite(router: Router, has_bias: bool) -> None:
    """NaN is chosen before all numbers, as the reference's sort does it."""
    logits, inf, nan = torch.randn(7, 12), torch.inf, torch.nan
    logits[0] = nan
    logits[1, 5:8] = nan
    logits[2, 4] = inf
    logits[3] = -inf
    logits[4, :10] = -inf
    logits[5, 2], logits[5, 7], logits[5, 9] = -inf, inf, -nan
    logits[6] = torch.tensor([0.0, -0.0]).repeat(6)
    bias = torch.linspace(-0.1, 0.1, 12) if has_bias else None
    if bias is not None:
        bias[3], bias[8] = -inf, nan
    loads = torch.zeros(12, dtype=torch.int64)
    found, expected = route(logits, router, bias), reference.route(logits, router, bias, loads, None)
    assert torch.equal(experts_of(found), experts_of(expected))
    assert torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-20, equal_nan=True)


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("num_chosen", [1, 3, 10])
@pytest.mark.parametrize("choices", [16, 64, 4096])
def test_the_order_of_pairs_does_not_depend_on_the_tile(
    choices: int, num_chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that look at 1 row together, at a few, and at all of 45."""
    logits, router = torch.randn(45, 13) + torch.arange(13) * 0.2, Router(num_chosen, True)
    expected = reference.route(logits, router, None, torch.zeros(13, dtype=torch.int64), None)
    monkeypatch.setattr(triton_routing, "_TILES", ((choices, 1),))
    found = route(logits, router)
    assert all(torch.equal(one, other) for one, other in zip(found[1:], expected[1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_chosen", [1, 5])
def test_sums_are_the_references_bits(dtype: torch.dtype, num_chosen: int) -> None:
    """Also of logits that lie between others, and for each row alone."""
    routing = route(torch.randn(6, 40)[:, ::4], Router(num_chosen, False))
    parts = torch.randn(6 * num_chosen, 1030).to(dtype)
    found = add_up(parts, routing)
    assert torch.equal(found, reference.add_up(parts, routing))
    alone = routing._replace(weights=routing.weights[4:5], places=routing.places[4:5])
    assert torch.equal(add_up(parts, alone)[0], found[4])


def test_what_is_chosen_on_a_gpu() -> None:
    """Too many experts for a program go to the reference."""
    for op in (ROUTE, ADD):
        op.force(None)
    assert ROUTE.choice(Key("cuda", torch.float32, num_experts=MOST_EXPERTS)).chosen == "triton"
    choice = ROUTE.choice(Key("cuda", torch.float32, num_experts=MOST_EXPERTS + 1))
    assert choice.chosen == "reference" and "at most 16,384 experts, not 16,385" in dict(choice.refused)["triton"]
    assert {ADD.choice(Key("cuda", dtype)).chosen for dtype in (torch.bfloat16, torch.float32)} == {"triton"}
