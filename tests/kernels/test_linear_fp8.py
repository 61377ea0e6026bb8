"""The FP8 linear layer agrees with its formula in fp64 on the quantized numbers; a row's bits depend on that row alone.
The C++ kernel takes activations as they are, and so does the Triton kernel for few rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.linear.fused import FewRows, gate_up_act, linear_residual, norm_linear
from inferd.kernels.ops.linear_fp8 import (
    BLOCK,
    FP8,
    LINEAR_FP8,
    Activations,
    Key,
    cuda,
    linear_fp8,
    quantize_groups,
    quantize_rows,
    quantize_static,
    quantize_weight,
)
from inferd.kernels.ops.quantize_fp8 import QUANTIZE_FP8
from tests.kernels.conftest import COMPILED, REFERENCE, TRITON

pytestmark = pytest.mark.usefixtures("implementation", "plain_quantization")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Relative to the largest result: the rounding of fp32 sums, or one to the dtype."""
TENSOR_CORE_TOLERANCE = 2**-12
"""A tensor core keeps about 14 bits of the sum of 128 products of FP8 numbers."""
SHAPES = [(1, 1), (33, 7), (77, 100), (130, 300), (200, 128), (40, 512)]
"""(out, in), with incomplete tiles of 64 outputs and incomplete blocks of 128 x 128."""


@pytest.fixture
def plain_quantization(implementation: str) -> Iterator[None]:
    """Quantize in plain PyTorch: interpreting a program for each row would take longest here, and has a test of its
    own."""
    QUANTIZE_FP8.force("reference")
    yield
    QUANTIZE_FP8.force(None)


Scales = Literal["rows", "groups", "blocks"]
"""Weights that share a scale: a row, 128 inputs of a row, or those of 128 rows."""
SCALES: tuple[Scales, ...] = get_args(Scales)


def random_layer(out_size: int, in_size: int, kind: Scales) -> tuple[Tensor, Tensor]:
    """Unrelated numbers and scales, as in a checkpoint."""
    q = (torch.randn(out_size, in_size) * 50).to(FP8)
    num_groups = -(-in_size // BLOCK)
    shapes = {"rows": (out_size,), "groups": (out_size, num_groups), "blocks": (-(-out_size // BLOCK), num_groups)}
    shape = shapes[kind]
    return q, torch.rand(shape) * 0.01 + 0.001


def dequantized(q: Tensor, scales: Tensor) -> Tensor:
    """[out, in] fp64, for `scales` of rows, of blocks, or of a token's blocks of inputs."""
    rows, columns = q.shape
    if scales.dim() == 1:
        return q.double() * scales.double()[:, None]
    wide = scales.double().repeat_interleave(BLOCK, 1)[:, :columns]
    return q.double() * (wide if len(wide) == rows else wide.repeat_interleave(BLOCK, 0)[:rows])


def product(x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None, quantize: Activations | None) -> Tensor:
    near = x.double() if quantize is None else dequantized(*quantize(x))
    out = near @ dequantized(q, scales).T
    return out if bias is None else out + bias.double()


def is_cpp(implementation: str) -> bool:
    return implementation not in (REFERENCE, TRITON, COMPILED)


def takes_as_they_are(implementation: str, dtype: torch.dtype, num_rows: int) -> bool:
    """Whether the activations of a layer that may vary with the number of rows are not quantized."""
    is_few = implementation in (TRITON, COMPILED) and dtype != torch.float32 and num_rows <= 8
    return is_few or is_cpp(implementation)


def tolerance(dtype: torch.dtype, implementation: str) -> float:
    return max(TOLERANCE[dtype], TENSOR_CORE_TOLERANCE * (implementation == COMPILED))


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.sampled(keep=16, of="triton")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_equals_the_formula(dtype: torch.dtype, kind: Scales, out_size: int, in_size: int, implementation: str) -> None:
    if is_cpp(implementation) and dtype == torch.float16:
        pytest.skip("runs in plain PyTorch")
    q, scales = random_layer(out_size, in_size, kind)
    for num_rows, bias in ((3, None), (8, torch.randn(out_size).to(dtype)), (70, torch.randn(out_size).to(dtype))):
        quantize = quantize_rows if kind == "rows" else quantize_groups
        if takes_as_they_are(implementation, dtype, num_rows):
            quantize = None
        x = torch.randn(num_rows, in_size).to(dtype)
        x[-1] = 0
        result = linear_fp8(q, scales, bias, dtype)(x)
        assert result.dtype == dtype
        assert error(result, product(x, q, scales, bias, quantize)) < tolerance(dtype, implementation)


@pytest.mark.parametrize("kind", SCALES)
def test_the_tolerance_sees_other_scales_and_other_activations(kind: Scales, implementation: str) -> None:
    q, scales = random_layer(260, 300, kind)
    x = torch.randn(9, 300)
    x[:, :128] *= 20
    result = linear_fp8(q, scales, None, torch.float32)(x)
    ways = {"rows": quantize_rows, "groups": quantize_groups, "none": None}
    own = ways.pop("none" if is_cpp(implementation) else "rows" if kind == "rows" else "groups")
    assert error(result, product(x, q, scales, None, own)) < tolerance(torch.float32, implementation)
    assert error(result, product(x, q, scales.roll(1, 0), None, own)) > 0.01
    for other in ways.values():
        assert error(result, product(x, q, scales, None, other)) > 0.001


def test_a_static_scale_is_everybodys_and_saturates(implementation: str) -> None:
    q, scales = random_layer(20, 40, "rows")
    x = torch.randn(5, 40)
    x[0, 0], x[1, 1] = 1e6, -1e6
    found, found_scales = quantize_static(0.01)(x)
    assert (found[0, 0].item(), found[1, 1].item()) == (448.0, -448.0)
    assert (found_scales == 0.01).all()
    result = linear_fp8(q, scales, None, torch.float32, quantize_static(0.01))(x)
    own = None if is_cpp(implementation) else quantize_static(0.01)
    assert error(result, product(x, q, scales, None, own)) < tolerance(torch.float32, implementation)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_quantized_weight_is_near_the_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 200).to(dtype)
    weight[3] = 0
    weight[4] *= 1e-4
    q, scales = quantize_weight(weight)
    assert q.dtype == FP8 and scales.shape == (50, 2)
    wide = weight.double()
    # Half a unit of the last of four binary digits; below the smallest normal number, 2^-6, half a unit of 2^-9.
    allowed = torch.maximum(wide.abs() * 2**-4, scales.double().repeat_interleave(BLOCK, 1)[:, :200] * 2**-10)
    assert ((dequantized(q, scales) - wide).abs() <= allowed * 1.0001).all()
    largest = torch.stack([group.float().abs().amax(1) for group in torch.split(q, BLOCK, 1)])
    assert (largest[:, torch.arange(50) != 3] == 448).all()


@pytest.mark.parametrize(("is_invariant", "counts"), [(True, (2, 3, 8, 17, 64)), (False, (2, 3, 8))])
@pytest.mark.parametrize("kind", SCALES)
def test_a_row_is_its_own(kind: Scales, is_invariant: bool, counts: tuple[int, ...]) -> None:
    q, scales = random_layer(70, 300, kind)
    layer = linear_fp8(q, scales, torch.randn(70), torch.bfloat16, is_invariant=is_invariant)
    row = torch.randn(1, 300).to(torch.bfloat16)
    alone = layer(row)[0]
    for num_rows in counts:
        neighbours = torch.randn(num_rows, 300).to(torch.bfloat16) * 10
        neighbours[num_rows // 2] = row
        assert torch.equal(layer(neighbours)[num_rows // 2], alone), num_rows


def test_sums_of_the_reference_are_exact(implementation: str) -> None:
    """The same inputs in another order give the same bits."""
    if implementation != REFERENCE:
        pytest.skip("sums in fp32")
    q, scales = random_layer(40, 2000, "rows")
    x, order = torch.randn(6, 2000), torch.randperm(2000)
    first = linear_fp8(q, scales, None, torch.float32)(x)
    assert torch.equal(linear_fp8(q[:, order].contiguous(), scales, None, torch.float32)(x[:, order]), first)


FUSED = ("norm", "residual", "gate", "norm and gate")


@pytest.mark.sampled(keep=16, of="triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_size", [300, 512])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("what", FUSED)
def test_few_rows_are_fused(what: str, kind: Scales, in_size: int, dtype: torch.dtype, implementation: str) -> None:
    """By the kernel for few rows, or by the plain operations with a widened weight."""
    if dtype == torch.float16 and what != "residual" and implementation in (TRITON, COMPILED):
        pytest.skip("a norm's factor may overflow before it is divided")
    q, scales = random_layer(150, in_size, kind)
    x, factor, residual = torch.randn(5, in_size).to(dtype), torch.randn(in_size).to(dtype), torch.randn(5, 150)
    residual = residual.to(dtype)

    def run(scales: Tensor) -> Tensor:
        if what == "norm":
            return norm_linear(x, factor, 1e-5, q, None, scales)
        if what == "residual":
            return linear_residual(x, q, None, residual, scales)
        return gate_up_act(x, q, "silu", factor if "norm" in what else None, 1e-5, scales)

    near = x.double()
    if "norm" in what:
        near = near / (near.square().mean(1, keepdim=True) + 1e-5).sqrt() * factor.double()
    expected = near @ dequantized(q, scales).T
    if what == "residual":
        expected += residual.double()
    if "gate" in what:
        gates, ups = expected.split(75, 1)
        expected = torch.nn.functional.silu(gates) * ups
    # The plain operations round the weight, the product and the parts.
    allowed = TOLERANCE[dtype] * (3 if implementation in (TRITON, COMPILED) else 6)
    assert error(run(scales), expected) < allowed
    assert error(run(scales.roll(1, 0)), expected) > 2 * allowed or len(scales) == 1


def test_a_layer_has_a_kernel_for_few_rows_unless_bits_matter(implementation: str) -> None:
    q, scales = random_layer(40, 128, "groups")
    may_vary, is_own = (linear_fp8(q, scales, None, torch.bfloat16, is_invariant=flag) for flag in (False, True))
    has_one = isinstance(may_vary, FewRows)
    assert (has_one, isinstance(is_own, FewRows)) == (implementation in (TRITON, COMPILED), False)
    if isinstance(may_vary, FewRows):
        assert [may_vary.is_few(count) for count in (1, 8, 9)] == [True, True, False]


@pytest.mark.parametrize("kind", SCALES)
def test_what_is_not_a_number_stays_in_its_row(kind: Scales) -> None:
    q, scales = random_layer(40, 200, kind)
    layer = linear_fp8(q, scales, None, torch.float32)
    x = torch.randn(6, 200)
    clean = layer(x)
    x[1, 50], x[4, 3] = torch.nan, torch.inf
    result = layer(x)
    assert result[1].isnan().all() and not result[4].isfinite().any()
    assert torch.equal(result[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert layer(x[:0]).shape == (0, 40)


def test_the_others_say_why_not() -> None:
    q, scales = random_layer(8, 32, "blocks")
    linear_fp8(q, scales, None, torch.float32)(torch.ones(2, 32))
    key = Key("cpu", torch.float32, 8, 32, has_groups=True, is_invariant=False)
    choice = next(choice for choice in LINEAR_FP8.choices() if choice.key == key)
    if choice.chosen == "cpp":
        return
    assert dict(choice.refused)["scaled_mm"] in (
        "takes a scale for each row, not for 128 inputs",
        f"{choice.chosen} is forced",
    )


class Library:
    """`torch.nn.functional.scaled_mm` as documented: shapes and strides of scales as its source checks them."""

    def __init__(self) -> None:
        self.recipes: list[str] = []

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, output_dtype: Any
    ) -> Tensor:
        (rows, inputs), columns = a.shape, b.shape[1]
        groups = -(-inputs // BLOCK)
        self.recipes += [recipe_a.name, recipe_b.name]
        assert (a.stride(1), b.stride(0), scale_a.shape, scale_a.stride(0)) == (1, 1, (rows, groups), 1)
        assert groups == 1 or scale_a.stride(1) == rows
        if recipe_b.name == "BlockWise1x128":
            assert scale_b.shape == (columns, groups) and scale_b.stride(0) == 1
        else:
            padded = -(-groups // 4) * 4
            assert scale_b.shape == (padded, -(-columns // BLOCK)) and scale_b.stride() == (1, padded)
            scale_b = scale_b[:groups].T
        return (dequantized(a, scale_a) @ dequantized(b.T, scale_b).T).to(output_dtype)


@pytest.mark.parametrize("kind", ["groups", "blocks"])
def test_the_library_gets_groups_as_it_documents(kind: Scales, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", library)
    q, scales = random_layer(400, 640, kind)
    x, bias = torch.randn(9, 640).bfloat16(), torch.randn(400)
    result = cuda.bind_groups(q, scales, bias, quantize_groups)(x)
    assert error(result, product(x, q, scales, bias, quantize_groups)) < 3 * TOLERANCE[torch.bfloat16]
    assert library.recipes == ["BlockWise1x128", "BlockWise128x128" if kind == "blocks" else "BlockWise1x128"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, None),
        ({"dtype": torch.float16}, "gives bfloat16, not torch.float16"),
        ({"in_size": 4096 + 16}, "takes whole groups of 128 inputs, not 4112 inputs"),
        ({"sm": 100}, "on compute capability 9 only; this GPU has 10.0"),
        ({"cuda": "12.8"}, "from CUDA 12.9 on; this torch was built with 12.8"),
        ({"has_it": False}, "needs torch.nn.functional.scaled_mm, which torch has from 2.10 on; this is torch"),
    ],
)
def test_the_library_says_why_it_takes_no_groups(
    given: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.interpret(False)
    device = DeviceProperties.of(given.get("sm", 90), 132)
    monkeypatch.setattr(gpu, "properties_of", lambda *_: device)
    monkeypatch.setattr(torch.version, "cuda", given.get("cuda", "13.0"))
    if not given.get("has_it", True):
        monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    reason = cuda.refuses_groups("cuda", given.get("dtype", torch.bfloat16), 4096, given.get("in_size", 4096))
    assert (reason is None) if words is None else words in (reason or "")
