"""Linear layers on a GPU, interpreted: the product, its fused neighbours, and bits that depend on the row alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.device import DeviceProperties
from inferd.kernels.gpu.few_rows import few_rows
from inferd.kernels.ops.linear import LINEAR, Choices, Key, cuda, linear
from inferd.kernels.ops.linear.fused import gate_up_act, linear_residual, norm_linear
from inferd.kernels.ops.linear.tuning import BUCKETS, LIBRARY, Table, cases
from tests.kernels import interpreter

pytest.importorskip("triton")

TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2e-6}
"""Relative to the largest result: one rounding to the dtype."""
SHAPES = [(1, 1), (33, 7), (20, 300), (130, 64), (17, 512)]
"""(out, in), with incomplete tiles of 16 or 64 weight rows, and incomplete or full steps of 256 or 64 inputs."""


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    gpu.interpret(True)
    interpreter.repair()
    yield
    gpu.interpret(False)
    LINEAR.force(None)


@pytest.fixture(params=["triton_few_rows", "triton_invariant"])
def kernel(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    LINEAR.force(name)
    return name


def layer(weight: Tensor, bias: Tensor | None, kernel: str, out_dtype: torch.dtype | None = None) -> Any:
    return linear(weight, bias, Choices(is_invariant=kernel == "triton_invariant"), out_dtype)


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_equals_the_product(kernel: str, dtype: torch.dtype, out_size: int, in_size: int) -> None:
    if kernel == "triton_few_rows" and dtype == torch.float32:
        pytest.skip("the tensor cores have no float32")
    weight, bias = torch.randn(out_size, in_size).to(dtype), torch.randn(out_size).to(dtype)
    wide = torch.randn(5, in_size + 3).to(dtype)
    for x, added in ((wide[:, :in_size], None), (wide[:1, 3:], bias)):
        expected = x.double() @ weight.double().T + (0 if added is None else added.double())
        assert error(layer(weight, added, kernel)(x), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_in_fp32_are_not_rounded(kernel: str, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(35, 96).to(dtype), torch.randn(35).to(dtype), torch.randn(5, 96).to(dtype)
    expected = x.double() @ weight.double().T + bias.double()
    result = layer(weight, bias, kernel, torch.float32)(x)
    assert result.dtype == torch.float32 and error(result, expected) < 2e-6
    assert error(result.to(dtype), expected) > 100 * 2e-6
    if kernel == "triton_few_rows":
        assert torch.equal(result.to(dtype), layer(weight, bias, kernel)(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_its_own(kernel: str, dtype: torch.dtype) -> None:
    if kernel == "triton_few_rows" and dtype == torch.float32:
        pytest.skip("the tensor cores have no float32")
    apply = layer(torch.randn(70, 200).to(dtype), torch.randn(70).to(dtype), kernel)
    row = torch.randn(1, 200).to(dtype)
    alone = apply(row)[0]
    for num_rows in (1, 2, 3, 8) if kernel == "triton_few_rows" else (1, 2, 3, 8, 17, 64, 65):
        place = int(torch.randint(0, num_rows, ()))
        neighbours = torch.randn(num_rows, 200).to(dtype) * 10
        neighbours[place] = row
        neighbours[(place + 1) % num_rows] = row if num_rows == 1 else torch.nan
        assert torch.equal(apply(neighbours)[place], alone), num_rows


@pytest.mark.parametrize("in_size", [200, 512])
def test_more_than_eight_rows_have_the_same_bits(in_size: int) -> None:
    """Another tile multiplies them, by the same chain of instructions."""
    weight, x = torch.randn(40, in_size).bfloat16(), torch.randn(16, in_size).bfloat16()
    bias, residual = torch.randn(40).bfloat16(), torch.randn(16, 40).bfloat16()
    many = few_rows(x, weight, bias, residual=residual)
    for first, end in ((0, 1), (3, 11), (8, 16)):
        assert torch.equal(few_rows(x[first:end], weight, bias, residual=residual[first:end]), many[first:end])


def test_no_rows(kernel: str) -> None:
    assert layer(torch.randn(6, 32).bfloat16(), None, kernel)(torch.empty(0, 32).bfloat16()).shape == (0, 6)


def normed(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(1, keepdim=True) + eps).sqrt() * factor.double()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "in_size", "norm_dtype"),
    [(1, 40, torch.bfloat16), (3, 300, torch.bfloat16), (16, 256, torch.bfloat16), (3, 300, torch.float32)],
)
def test_a_norm_before(num_rows: int, in_size: int, norm_dtype: torch.dtype, has_bias: bool) -> None:
    x, factor, weight = torch.randn(num_rows, in_size), torch.randn(in_size), torch.randn(35, in_size)
    x, factor, weight = x.bfloat16() * 3, factor.to(norm_dtype), weight.bfloat16()
    bias = torch.randn(35).bfloat16() if has_bias else None
    result = norm_linear(x, factor, 1e-3, weight, bias)
    added = 0 if bias is None else bias.double()
    # Activations are rounded once more, each by up to 2^-9 of itself.
    tolerance = 2 * TOLERANCE[torch.bfloat16]
    assert error(result, normed(x, factor, 1e-3) @ weight.double().T + added) < tolerance
    assert error(result, normed(x, factor.roll(1), 1e-3) @ weight.double().T + added) > 10 * tolerance
    assert error(norm_linear(x / 300, factor, 1e-3, weight), normed(x / 300, factor, 0) @ weight.double().T) > tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_residual_after(dtype: torch.dtype) -> None:
    x, weight, residual = torch.randn(3, 70).to(dtype), torch.randn(20, 70).to(dtype), torch.randn(3, 20).to(dtype) * 9
    for bias in (None, torch.randn(20).to(dtype)):
        expected = x.double() @ weight.double().T + residual.double() + (0 if bias is None else bias.double())
        assert error(linear_residual(x, weight, bias, residual), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_gate_after(gate: Any, has_norm: bool) -> None:
    x, factor, weight = torch.randn(4, 96).bfloat16(), torch.randn(96).bfloat16(), torch.randn(2 * 21, 96).bfloat16()
    weight = weight / 10
    wide = normed(x, factor, 1e-5) if has_norm else x.double()
    gates, ups = (wide @ weight.double().T).split(21, 1)
    act = torch.nn.functional.silu(gates) if gate == "silu" else torch.nn.functional.gelu(gates, approximate="tanh")
    result = gate_up_act(x, weight, gate, factor if has_norm else None, 1e-5)
    assert error(result, act * ups) < 3 * TOLERANCE[torch.bfloat16]
    assert error(result, gates * ups) > 30 * TOLERANCE[torch.bfloat16]


def test_a_fused_row_is_its_own() -> None:
    factor, weight = torch.randn(120).bfloat16(), torch.randn(40, 120).bfloat16()
    row = torch.randn(1, 120).bfloat16()
    alone = gate_up_act(row, weight, "silu", factor, 1e-5)[0]
    for num_rows in (2, 7, 16):
        neighbours = torch.randn(num_rows, 120).bfloat16() * 10
        neighbours[num_rows // 2] = row
        assert torch.equal(gate_up_act(neighbours, weight, "silu", factor, 1e-5)[num_rows // 2], alone)


def test_many_rows_run_the_plain_ops_in_turn() -> None:
    x, factor, weight = torch.randn(17, 64), torch.randn(64), torch.randn(10, 64)
    assert error(norm_linear(x, factor, 1e-5, weight), normed(x, factor, 1e-5) @ weight.double().T) < 1e-5
    assert error(linear_residual(x, weight, None, x[:, :10]), x.double() @ weight.double().T + x[:, :10]) < 1e-5


def test_a_table_decides_who_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    LINEAR.force("triton_few_rows")
    weight = torch.randn(6, 32).bfloat16()
    calls: list[int] = []
    plain = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: (calls.append(len(x)), plain(x, *rest))[1])

    def rows_of_the_library(table: Table | None) -> list[int]:
        calls.clear()
        apply = linear(weight, None, Choices(table=table))
        for num_rows in (1, 2, 5, 8, 9, 17):
            apply(torch.ones(num_rows, 32).bfloat16())
        return list(calls)

    assert rows_of_the_library(None) == [9, 17]
    table = Table("here", {case.name: LIBRARY for case in cases(6, 32, "torch.bfloat16") if case.num_rows in (1, 8)})
    assert rows_of_the_library(table) == [1, 5, 8, 9, 17]
    other = Table("here", {case.name: LIBRARY for case in cases(6, 64, "torch.bfloat16")})
    assert rows_of_the_library(other) == [9, 17]
    assert len(BUCKETS) == len(cases(6, 32, "torch.bfloat16"))


@pytest.mark.parametrize("weight_bytes", [3 * 10**6, 33_554_432, 10**8, 10**9])
def test_a_measured_weight_is_read_from_memory(weight_bytes: int) -> None:
    """Between two uses of a copy others of twice the cache's size are read, or the weight itself is larger."""
    cache_bytes = 50 * 2**20
    count = cuda.num_weights(weight_bytes, cache_bytes)
    assert (count - 1) * weight_bytes >= 2 * cache_bytes or (count == 1 and weight_bytes > 2 * cache_bytes)
    assert (count - 2) * weight_bytes < 2 * cache_bytes
    assert cuda.num_weights(1000, cache_bytes) == 48


class SimulatedGraph:
    """torch's part of a GPU while a product is timed. A replay takes 2 ms for each captured call."""

    def __init__(self, patch: pytest.MonkeyPatch, device: DeviceProperties) -> None:
        patch.setattr(gpu, "properties_of", lambda *_: device)
        patch.setattr(cuda, "_stream", functools.cache(cuda._stream.__wrapped__))  # no stand-in is left behind
        self.num_streams = 0
        self.is_capturing, self.captured, self.clock_ms = False, list[tuple[int, bool]](), 0.0
        properties = SimpleNamespace(L2_cache_size=16_000)
        self.now = stream = SimpleNamespace(wait_stream=lambda _: None)
        for name, value in {
            "get_device_properties": lambda _: properties,
            "Stream": self._made,
            "current_device": lambda: 0,
            "current_stream": lambda: stream,
            "set_stream": lambda stream: setattr(self, "now", stream),
            "stream": lambda _: nullcontext(),
            "CUDAGraph": lambda: self,
            "graph": self._capturing,
            "Event": lambda **_: SimulatedEvent(self),
        }.items():
            patch.setattr(torch.cuda, name, value)

    def _made(self, device_index: int) -> SimpleNamespace:
        assert device_index == 0
        self.num_streams += 1
        return SimpleNamespace(wait_stream=lambda _: None)

    def _capturing(self, graph: SimulatedGraph, *, stream: object, capture_error_mode: str) -> SimulatedGraph:
        assert graph is self and stream is cuda._stream(0) and capture_error_mode == "thread_local"
        return self

    def __enter__(self) -> None:
        self.is_capturing = True

    def __exit__(self, *_: object) -> None:
        self.is_capturing = False

    def product(self, weight: Tensor) -> None:
        if self.is_capturing:
            self.captured.append((weight.data_ptr(), gpu.dependent_options()["launch_pdl"]))

    def replay(self) -> None:
        self.clock_ms += 2.0 * len(self.captured)


class SimulatedEvent:
    def __init__(self, graph: SimulatedGraph) -> None:
        self._graph, self._at = graph, 0.0

    def record(self) -> None:
        self._at = self._graph.clock_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: SimulatedEvent) -> float:
        return end._at - self._at


@pytest.mark.parametrize(("sm", "is_early"), [(80, False), (90, True)])
@pytest.mark.parametrize(("num_numbers", "num_weights"), [(4000, 5), (40_000, 1)])
def test_products_are_timed_in_a_graph(
    num_numbers: int, num_weights: int, sm: int, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is slow to queue a product changes no measurement. Copies of a small weight take turns."""
    graph = SimulatedGraph(monkeypatch, DeviceProperties.of(sm, 132))
    seconds = cuda._seconds(graph.product, torch.zeros(1, num_numbers, dtype=torch.bfloat16))
    assert seconds == pytest.approx(0.002)
    places = [place for place, _ in graph.captured]
    assert len(places) >= 8 and len(set(places)) == num_weights
    assert all(places[at] == places[at % num_weights] for at in range(len(places)))
    assert {early for _, early in graph.captured} == {is_early} and not gpu.dependent_options()["launch_pdl"]


def test_all_measurements_share_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream that it was called on."""
    graph = SimulatedGraph(monkeypatch, DeviceProperties.of(90, 132))
    for num_numbers in (4000, 40_000):
        cuda._seconds(graph.product, torch.zeros(1, num_numbers, dtype=torch.bfloat16))
    assert graph.num_streams == 1


def test_a_capture_that_failed_leaves_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not leave the stream of a capture that it cannot end. The next measurement has another stream."""
    graph = SimulatedGraph(monkeypatch, DeviceProperties.of(90, 132))
    current, weight = graph.now, torch.zeros(1, 4000, dtype=torch.bfloat16)

    def product(_: Tensor) -> None:
        if graph.is_capturing:
            graph.now = cuda._stream(0)
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        cuda._seconds(product, weight)
    assert graph.now is current
    cuda._seconds(graph.product, weight)
    assert graph.num_streams == 2


def test_the_switch_chooses_one_kernel_and_a_cpu_needs_none() -> None:
    LINEAR.force(None)
    chosen = {key: LINEAR.resolve(key) for key in (Key("cuda", torch.float32, True), Key("cuda", torch.float32))}
    names = {choice.key: choice.chosen for choice in LINEAR.choices() if choice.key in chosen}
    assert list(names.values()) == ["triton_invariant", "torch"]
    assert LINEAR.resolve(Key("cpu", torch.float32, True)) is LINEAR.resolve(Key("cpu", torch.float32))
